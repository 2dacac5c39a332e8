"""What a probe needs of the residual stream: its size where a norm reads it, and its gradient there.

RMSNorm gives y = h / rms(h) * a, so an error E [T, H] in y's gradient is about E * a / rms(h) in the residual
stream's, token by token.  Source: docs/numerics.md, "prop".
T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.parallel.tensor import Region


class ResidualProbe:
    """The observer of one place of one block: the residual stream before attention, or before the SwiGLU."""

    def __init__(self, region: Region) -> None:
        self.region = region
        # rms(h) [T,1] and a [H], by the global row of a microbatch's first token: several may be in flight
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._squares: list[Tensor] = []

    def residual(self, x: Tensor, weight: Tensor, epsilon: float, row0: int) -> None:
        """x [B, S/tp or S, H] before the norm with ``weight`` [H]; called in forward."""
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing runs the forward again: it has been seen
        with torch.no_grad():
            rms = (x.float().square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
            rms = self.region.enter(rms).float()  # under sequence parallelism a process holds a part of the tokens
            self._norms[row0] = rms.flatten(0, 1), weight.detach().float().clone()
        if x.requires_grad:
            x.register_hook(lambda grad: self._squares.append(grad.float().square().sum()))

    def residual_square(self, grad: Tensor, row0: int) -> Tensor:
        """Squared norm in the residual stream of a gradient [T, H] of what the norm gave: float64 scalar.

        Up to the norm's own projection, which takes one of H directions away.
        """
        rms, weight = self._norms[row0]
        by_token = torch.linalg.vector_norm(grad * weight.to(grad.dtype), dim=1, keepdim=True, dtype=torch.float32)
        return (by_token / rms).double().square().sum()

    def take_gradient_square(self) -> float:
        """Sum of squares of the gradients seen since the last call, this process's share along tp."""
        total = float(torch.stack(self._squares).double().sum()) if self._squares else 0.0
        self._squares.clear()
        return total if self.region.sequence_parallel or self.region.axis.is_first else 0.0

    def forget(self) -> None:
        """Drop what one pass left."""
        self._norms.clear()
        self._squares.clear()
