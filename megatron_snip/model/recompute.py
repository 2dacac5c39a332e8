"""Activation recomputation: which parts of a stage keep only their input and run again in backward.

    full, uniform    groups of --recompute-num-layers consecutive blocks
    full, block      the first --recompute-num-layers blocks of a stage, one by one
    selective        in every block, the --recompute-modules: core_attn, mlp

Names and meanings are Megatron-LM's (arXiv 2205.05198).  Recomputation changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_snip.parallel.tensor import Region

#: Values of --recompute-modules.
MODULES = ("core_attn", "mlp")


@dataclass(frozen=True)
class Recompute:
    """The options of recomputation.  --recompute-granularity decides which of them matter."""

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    def runs(self, blocks: int) -> list[tuple[range, bool]]:
        """The groups of blocks in which a stage runs, in order, and whether each is recomputed."""
        if self.granularity == "full" and self.method == "uniform":
            starts = range(0, blocks, self.num_layers)
            return [(range(start, min(start + self.num_layers, blocks)), True) for start in starts]
        first = self.num_layers if self.granularity == "full" else 0
        return [(range(block, block + 1), block < first) for block in range(blocks)]

    def of_part(self, module: str) -> bool:
        """Whether this module of every block is recomputed on its own."""
        return self.granularity == "selective" and module in self.modules


NOTHING = Recompute()


def run_again(function: Callable[..., Any], *args: Any, region: Region) -> Any:
    """``function(*args)``, recomputed in backward.  The first run skips casts that only wgrad needs."""
    if not torch.is_grad_enabled():
        return function(*args)
    # nothing here uses torch's generators, so their state need not be kept
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False,
        context_fn=lambda: (region.run_again_later(), nullcontext()),
    )  # fmt: skip
