"""What a forward gets besides its tensors, from the pipeline schedule down to each linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.linears.operands import LinearObserver
from megatron_snip.quant.linears.precision import LinearPrecision


@dataclass(frozen=True, eq=False)
class StepContext:
    """One pass over a batch.  Stages, blocks and linears receive it and keep nothing of it.

    iteration: the optimiser step, for random bits.  loss_tokens: the number of tokens of the global batch that count in
    the loss, by which it is divided.  precision: of all linears, in place of each one's own.  observers: of linears, by
    name.  key: the microbatch's, without a linear's stream; its stage makes it.
    token_losses: the last stage appends to this list the losses [T] in nats of each microbatch's tokens that count.
    """

    iteration: int = 0
    loss_tokens: int | Tensor = 1
    precision: LinearPrecision | None = None
    observers: Mapping[str, LinearObserver] = dataclasses.field(default_factory=dict)
    key: RoundingKey | None = None
    token_losses: list[Tensor] | None = None

    @property
    def observed(self) -> bool:
        """Whether a probe observes this pass; compiled code would show it nothing."""
        return bool(self.observers)


#: A pass without any requests.
PLAIN = StepContext()
