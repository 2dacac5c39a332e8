"""What a forward pass receives besides its tensors, from the pipeline schedule down to each linear."""

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

    iteration: the optimiser step, for random bits.  loss_tokens: the number of tokens in the global batch that count in
    the loss, which is divided by it.  precision: replaces every linear's own.  observers: by the linear's name.
    key: the microbatch's, without a linear's stream; the stage makes it.
    token_losses: a list to which the last stage appends each microbatch's losses [T], in nats, of tokens that count.
    """

    iteration: int = 0
    loss_tokens: int | Tensor = 1
    precision: LinearPrecision | None = None
    observers: Mapping[str, LinearObserver] = dataclasses.field(default_factory=dict)
    key: RoundingKey | None = None
    token_losses: list[Tensor] | None = None

    @property
    def observed(self) -> bool:
        """Whether a probe observes this pass; it would see nothing of compiled code."""
        return bool(self.observers)


#: A pass with nothing special.
PLAIN = StepContext()
