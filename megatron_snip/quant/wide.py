"""The linear of a float32 run's probe: products in float64, rounded to float32 once.

In float32 the sum of two parts is not, to the last bit, the sum of the whole, so an operand's last bit depends on how
tensor parallelism cuts the sums before it, and an element that stands near a tie then rounds to another code.  With
float64 products and float64 sums over processes (``StepContext.wide``) operands are the same on every layout.
Source: docs/numerics.md, "Reduction over the mesh".
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.quant.operands import REDUCTION_DIM, Casts, LinearCall, Operands


def wide_linear(x: Tensor, w: Tensor, call: LinearCall, dtype: torch.dtype) -> Tensor:
    """x [T,K] of float32 values in float32 or float64, w [N,K] float32 -> y [T,N] of ``dtype``, differentiable once.

    Operands are cast in float32, as the call's precision says.  Of y and of x's gradient, whose dtype is x's, that is
    float64 which is a part of a sum.
    """
    y: Tensor = _WideLinear.apply(x, w, call, dtype)
    return y


#: Output channels taken at a time, so that float64 copies of weights, and of logits, stay small.
_CHUNK = 128


def _product(operands: Operands, gemm: str, dtype: torch.dtype) -> Tensor:
    """A GEMM of operands cast in float32, summed in float64, rounded to ``dtype``."""
    a, b = (operands.quantized(gemm, role, getattr(operands.call.precision, gemm)) for role in REDUCTION_DIM[gemm])
    n = operands.w.shape[0]
    cuts = [slice(start, start + _CHUNK) for start in range(0, n, _CHUNK)]
    if gemm == "dgrad":
        total = a.new_zeros((len(a), b.shape[1]), dtype=torch.float64)
        for cut in cuts:
            total.addmm_(a[:, cut].double(), b[cut].double())
        return total.to(dtype)
    if gemm == "fprop":
        x, y = a.double(), a.new_empty((len(a), n), dtype=dtype)
        for cut in cuts:
            y[:, cut] = x @ b[cut].double().T
        return y
    x, grad_w = b.double(), a.new_empty((n, b.shape[1]), dtype=dtype)
    for cut in cuts:
        grad_w[cut] = a[:, cut].double().T @ x
    return grad_w


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, call: LinearCall, dtype: torch.dtype) -> Tensor:
        casts = call.input_casts if call.input_casts is not None else Casts()
        narrow = casts.get(x, [(None, "values")], torch.float32)[0].data  # made once for all linears that read x
        ctx.save_for_backward(narrow, w)
        ctx.call, ctx.dtype = call.for_backward(), x.dtype
        return _product(Operands(narrow, w, w, call), "fprop", dtype)  # there is no gradient yet

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), call = ctx.saved_tensors, ctx.call
        operands = Operands(x, w, grads[0].float(), call)
        grad_x = _product(operands, "dgrad", ctx.dtype)

        @cache
        def grad_w() -> Tensor:
            return _product(operands, "wgrad", torch.float32)

        if call.observer is not None:
            call.observer.backward(dataclasses.replace(operands, grad_input=grad_x.float(), grad_weight=grad_w))
        return grad_x, grad_w() if ctx.needs_input_grad[1] else None, None, None
