"""What a forward is told beside its tensors, from the schedule down to each linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_snip.quant.operands import LinearObserver
from megatron_snip.quant.precision import LinearPrecision
from megatron_snip.quant.rounding import RoundingKey


@dataclass(frozen=True, eq=False)
class StepContext:
    """One pass over a batch, made by who runs it; stages, blocks and linears are handed it and keep nothing of it.

    iteration: the optimiser step, for random bits.  loss_tokens: those of the global batch that count, by which the
    loss is divided.  precision: of all linears, in place of each one's own.  observers: of linears, by name.
    key: the microbatch's, of no linear yet; its stage makes it.
    token_losses: the last stage adds the losses [T] in nats of each microbatch's tokens that count to this list.
    """

    iteration: int = 0
    loss_tokens: int | Tensor = 1
    precision: LinearPrecision | None = None
    observers: Mapping[str, LinearObserver] = dataclasses.field(default_factory=dict)
    key: RoundingKey | None = None
    token_losses: list[Tensor] | None = None

    @property
    def observed(self) -> bool:
        """Whether a probe looks, which compiled code would not show anything."""
        return bool(self.observers)


#: A pass of which nobody asks anything.
PLAIN = StepContext()
