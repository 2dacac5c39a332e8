"""SwiGLU's product, which keeps what it reads and nothing else for backward.

Autograd would keep silu(gate) besides: two bytes an element of the widest activation there is, and one cheap launch to
make it again.  Bits are autograd's own, forward and backward.  Source: arXiv 2002.05202.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the dtype of both: gate and up [..., F] -> [..., F]."""
    made: Tensor = _SwiGLU.apply(gate, up)
    return made


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        needs_gate, needs_up = ctx.needs_input_grad
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if needs_gate else None
        return grad_gate, grad * F.silu(gate) if needs_up else None
