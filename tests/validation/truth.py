"""The truth that predictions of updates face, by brute force: updates with changed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.study.planted import linears_of
from examples.study.truth import precisions
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.operands import REDUCTION_DIM
from megatron_snip.snip.updates import adam_update
from megatron_snip.train.setup import Parts


@contextmanager
def tiles_along_channels() -> Iterator[None]:
    """Inside, wgrad's operands are tiled along channels, as those of the prototype that set the required figures.

    No tensor core could multiply these, whose scales differ within the sum over tokens; emulation can.
    """
    dims = REDUCTION_DIM["wgrad"]
    before = dict(dims)
    dims.update(grad_output=1, input=1)
    try:
        yield
    finally:
        dims.update(before)


class Updates:
    """AdamW's updates of all linears on one batch, with some of them in another precision."""

    def __init__(self, parts: Parts, batch: Any, iteration: int) -> None:
        self.parts, self.batch, self.iteration = parts, batch, iteration
        self.names = list(linears_of(parts))
        self.clip = parts.stepper.gradients(batch, iteration)[0].clip
        parts.optimizer.zero_grad()
        self.base = self._updates()
        self.whole = float(torch.stack([u.double().square().sum() for u in self.base.values()]).sum().sqrt())

    def _updates(self) -> dict[str, Tensor]:
        parts, adam = self.parts, self.parts.coordinator.probe.updates.adam
        parts.stepper.gradients(self.batch, self.iteration)
        out = {}
        for name in self.names:
            m, v = parts.optimizer.moments(f"{name}.weight")
            grad = parts.optimizer.gradient(f"{name}.weight") * self.clip
            out[name] = adam_update(grad, m, v, parts.optimizer.steps + 1, adam)
        parts.optimizer.zero_grad()
        return out

    def change_of_wgrad(self, fmt: str) -> np.ndarray:
        """|u - u0|_F / U of each linear with wgrad alone in a format: [L].  All at once: its error reaches no other."""
        with precisions(self.parts, dict.fromkeys(self.names, LinearPrecision("bf16", "bf16", fmt))):
            updates = self._updates()
        return (
            np.array([float((updates[n] - self.base[n]).double().square().sum().sqrt()) for n in self.names])
            / self.whole
        )

    def change(self, precision: LinearPrecision) -> np.ndarray:
        """|u - u0|_F / U over all linears when one of them alone runs in a precision: [L]."""
        found = []
        for name in self.names:
            with precisions(self.parts, {name: precision}):
                updates = self._updates()
            squares = [(updates[other] - self.base[other]).double().square().sum() for other in self.names]
            found.append(float(torch.stack(squares).sum().sqrt()) / self.whole)
        return np.array(found)
