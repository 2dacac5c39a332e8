"""AdamW on BF16 weights without a float32 master, with what `Optimizer` needs of a torch optimiser.

quant/adamw/step.py specifies the step; docs/numerics.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_snip.quant import RoundingKey
from megatron_snip.quant.adamw.expansion import LOW
from megatron_snip.quant.adamw.kernels import adamw
from megatron_snip.quant.adamw.step import Scalars, Stored

WEIGHT_LOW, V_LOW = f"weight{LOW}", f"exp_avg_sq{LOW}"
#: --optimizer-precision -> the low parts that it stores.
LOW_PARTS: Mapping[str, tuple[str, ...]] = {
    "collage-light": (WEIGHT_LOW,),
    "collage-plus": (WEIGHT_LOW, V_LOW),
    "bf16-stochastic": (),
    "bf16": (),
}


class Bf16AdamW:
    """Parameters, gradients and everything in `state` are BF16.

    precision: of `LOW_PARTS`.  keys: the random bits of each parameter, for any iteration.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], precision: str, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.low_parts = LOW_PARTS[precision]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.keys: dict[nn.Parameter, RoundingKey] = {}
        self.steps = 0  # updates made
        self.clip = 1.0  # the factor of all gradients
        self._betas, self._eps, self._stochastic = betas, eps, precision == "bf16-stochastic"

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.steps += 1
        for group in self.param_groups:
            numbers = (group["lr"], group["weight_decay"], self._betas, self._eps, self.clip)
            scalars = Scalars.of(self.steps, *numbers)
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, scalars)

    def _update(self, p: nn.Parameter, grad: Tensor, scalars: Scalars) -> None:
        state, shape, key = self.state[p], p.shape, None
        if self._stochastic:
            shape, key = torch.Size((len(p), p.numel() // len(p))), replace(self.keys[p], iteration=self.steps)
        weight, m, v = (one.view(shape) for one in (p.detach(), state["exp_avg"], state["exp_avg_sq"]))
        stored = Stored(weight, m, v, state.get(WEIGHT_LOW), state.get(V_LOW), key)
        adamw(stored, grad.reshape(shape), scalars)
