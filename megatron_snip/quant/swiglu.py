"""SwiGLU's product, silu(gate) * up, by itself and as what a linear reads.

Kept for backward are gate and up, and what the linear's wgrad reads.  Autograd would keep silu(gate) besides: two bytes
an element of the widest activation there is, and one cheap launch to make it again.  The linear's cast makes the
product where it can, so that it is never stored.  Bits are autograd's own, forward and backward.
Source: arXiv 2002.05202.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_snip.quant.cast import swiglu_product
from megatron_snip.quant.kernels import op
from megatron_snip.quant.operands import LinearCall, Operand
from megatron_snip.quant.three_gemms import Backends, backward, differentiable_once, forward


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the dtype of both: gate and up [..., F] -> [..., F]."""
    made: Tensor = _SwiGLU.apply(gate, up)
    return made


def swiglu_linear(gate: Tensor, up: Tensor, w: Tensor, call: LinearCall, backends: Backends) -> Tensor:
    """A linear of SwiGLU's product: gate and up [..., K], w [N,K] of their dtype or float32 -> y [..., N].

    It is differentiable once.  No observer may look, since there may be no input to see.
    """
    assert call.observer is None and call.input_casts is None
    needs_wgrad = torch.is_grad_enabled() and w.requires_grad
    y: Tensor = _SwiGLULinear.apply(gate, up, w, call, backends, needs_wgrad)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return op.swiglu_gradients(grads[0], *ctx.saved_tensors, *ctx.needs_input_grad)


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, w: Tensor, call: LinearCall, backends: Backends, needs_wgrad: bool
    ) -> Tensor:
        rows = gate.flatten(0, -2)
        y, kept = forward(rows, w, call, backends, needs_wgrad=needs_wgrad, up=up.flatten(0, -2))
        tensors = (None, None, None) if kept is None else (kept.data, kept.scales, kept.tensor_scale)
        ctx.save_for_backward(gate, up, w, *tensors)
        ctx.form, ctx.output = (None, None) if kept is None else (kept.form, kept.output)
        ctx.call, ctx.backends = call, backends
        return y.view(*gate.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, w, data, scales, whole = ctx.saved_tensors
        needs_gate, needs_up, needs_w = ctx.needs_input_grad[:3]
        kept = Operand(ctx.form, ctx.output, data, scales, whole) if needs_w and data is not None else None
        grad, grad_w = backward(
            grads[0].flatten(0, -2), w, kept, None, ctx.call, ctx.backends, needs_dgrad=needs_gate or needs_up
        )
        grad_gate = grad_up = None
        if grad is not None:
            grad_gate, grad_up = op.swiglu_gradients(grad.view(gate.shape), gate, up, needs_gate, needs_up)
        return grad_gate, grad_up, grad_w, None, None, None
