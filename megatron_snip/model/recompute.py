"""What of a stage runs once more in backward, and keeps no more than its input until then.

    full, uniform    each --recompute-num-layers blocks in a row, as one
    full, block      the first --recompute-num-layers blocks of a stage, one by one
    selective        of every block the --recompute-modules: core_attn, mlp

Names and meanings are Megatron-LM's (arXiv 2205.05198).  Bits are those of a run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_snip.parallel.tensor import Region

#: Parts of a block that --recompute-modules may name.
MODULES = ("core_attn", "mlp")


@dataclass(frozen=True)
class Recompute:
    """The options of that name; what --recompute-granularity does not ask for is not looked at."""

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    def runs(self, blocks: int) -> list[tuple[range, bool]]:
        """How a stage's blocks run, in order: which of them as one, and whether that is recomputed."""
        if self.granularity == "full" and self.method == "uniform":
            starts = range(0, blocks, self.num_layers)
            return [(range(start, min(start + self.num_layers, blocks)), True) for start in starts]
        first = self.num_layers if self.granularity == "full" else 0
        return [(range(block, block + 1), block < first) for block in range(blocks)]

    def of_part(self, module: str) -> bool:
        """Whether a part of every block is recomputed by itself."""
        return self.granularity == "selective" and module in self.modules


NOTHING = Recompute()


def run_again(function: Callable[..., Any], *args: Any, region: Region) -> Any:
    """``function(*args)``, of which backward runs all once more; the first time nothing is cast for wgrad alone."""
    if not torch.is_grad_enabled():
        return function(*args)
    # nothing here draws from torch's generators: their state need not be kept
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False,
        context_fn=lambda: (region.run_again_later(), nullcontext()),
    )  # fmt: skip
