"""AdamW's update u as a function of the gradient, and its change when the gradient changes.

u is elementwise in the clipped gradient and uses the optimiser's own moments.  Source: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's constants and the clipping norm, which its update depends on."""

    beta1: float
    beta2: float
    eps: float
    clip_grad: float


class OptimizerView(Protocol):
    """What a probe reads from the optimiser, by parameter name; tensors are local shards."""

    steps: int

    def moments(self, name: str) -> tuple[Tensor, ...]:
        """Adam's m, and the parts of which v is the sum, [...] of any dtype; they may lie on the host."""
        ...

    def gradient(self, name: str) -> Tensor:
        """The gradient, [...]."""
        ...


def square(x: Tensor) -> Tensor:
    """Squared Frobenius norm of x [...], float64 scalar.  Rows are summed in float32; longer CPU sums lose accuracy."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).double().square().sum()


def adam_update(grad: Tensor, m: Tensor, v: Tensor, step: int, adam: AdamSettings) -> Tensor:
    """AdamW's update without learning rate and weight decay: u(grad), all [...] float32.

    step: number of the next update, counted from 1.
    """
    bias1, bias2 = 1.0 - adam.beta1**step, 1.0 - adam.beta2**step
    scale = bias1 * bias1 / bias2  # both corrections at once saves two passes over memory
    size = (v * (adam.beta2 * scale)).addcmul_(grad, grad, value=(1.0 - adam.beta2) * scale)
    return torch.lerp(m, grad, 1.0 - adam.beta1).div_(size.sqrt_().add_(adam.eps * bias1))


#: Elements per chunk of updates; a few chunks fit a CPU's cache.
_CHUNK = {"cpu": 1 << 17}
_LARGE_CHUNK = 1 << 26


def _slices(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matching chunks of tensors of equal size [...], flattened."""
    size = _CHUNK.get(tensors[0].device.type, _LARGE_CHUNK)
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), size):
        yield [tensor[start : start + size] for tensor in flat]


@dataclass(frozen=True)
class Updates:
    """The updates that an optimiser would make from the current gradients."""

    optimizer: OptimizerView
    adam: AdamSettings

    @torch.no_grad()
    def changes(self, name: str, errors: Sequence[Tensor], clip: float, rows: slice = slice(None)) -> list[Tensor]:
        """|u(g)|^2, and |u(g + e) - u(g)|^2 for each error [R, K], before clipping; float64 scalars.

        rows: selects R rows of the local shard of the weight ``name`` [N, K].
        """
        step, weight = self.optimizer.steps + 1, f"{name}.weight"
        tensors = [self.optimizer.gradient(weight), *self.optimizer.moments(weight)]
        parts = len(tensors) - 2  # of v
        squares = [torch.zeros((), dtype=torch.float64, device=tensors[0].device) for _ in range(1 + len(errors))]
        for g, m, *rest in _slices([*(tensor[rows] for tensor in tensors), *errors]):
            m, *halves = (part.to(g.device).float() for part in (m, *rest[:parts]))
            g, v, noise = g.float() * clip, reduce(torch.add, halves), rest[parts:]
            update = adam_update(g, m, v, step, self.adam)
            squares[0] += square(update)
            for total, e in zip(squares[1:], noise, strict=True):
                noisy = adam_update(torch.add(g, e, alpha=clip), m, v, step, self.adam)
                total += square(noisy.sub_(update))
        return squares
