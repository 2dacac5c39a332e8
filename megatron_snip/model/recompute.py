"""Activation recomputation: which parts of a stage keep only their input and run again in backward.

    full, uniform    groups of --recompute-num-layers consecutive blocks
    full, block      the first --recompute-num-layers blocks of a stage, one by one
    selective        in every block, the --recompute-modules: core_attn, mlp
    a memory plan    one of `CHOICES` for each block; offload recomputes nothing (see `offload`)

Names and meanings are Megatron-LM's (arXiv 2205.05198), except the plan's.  Recomputation changes no bit.
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
#: What a memory plan may choose for a block: keep all activations; recompute MODULES; recompute the whole block; keep
#: them on the host.
CHOICES = ("keep", "selective", "full", "offload")


@dataclass(frozen=True)
class Recompute:
    """The options of recomputation.  --recompute-granularity decides which of them matter.

    plan: under a memory plan, the choice of each block of the model; then nothing else matters.
    """

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    plan: tuple[str, ...] = ()

    def runs(self, held: range) -> list[tuple[range, bool]]:
        """The groups in which a stage runs the blocks that it holds, and whether each is recomputed.

        Groups count from the stage's first block.
        """
        blocks = len(held)
        if self.plan:
            return [(range(i, i + 1), self.plan[block] == "full") for i, block in enumerate(held)]
        if self.granularity == "full" and self.method == "uniform":
            starts = range(0, blocks, self.num_layers)
            return [(range(start, min(start + self.num_layers, blocks)), True) for start in starts]
        first = self.num_layers if self.granularity == "full" else 0
        return [(range(block, block + 1), block < first) for block in range(blocks)]

    def offloads(self, block: int) -> bool:
        """Whether a block of the model keeps its activations on the host."""
        return bool(self.plan) and self.plan[block] == "offload"

    def of_block(self, index: int) -> Recompute:
        """The options of one block."""
        if not self.plan:
            return self
        return Recompute("selective", modules=MODULES) if self.plan[index] == "selective" else NOTHING

    def of_part(self, module: str) -> bool:
        """Whether this module of a block is recomputed on its own."""
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
