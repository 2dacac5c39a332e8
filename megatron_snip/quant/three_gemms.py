"""A linear's forward and backward as three GEMMs on cast operands, for implementations that work GEMM by GEMM.

What differs between such implementations is in ``Gemms``: how operands are laid out, and who multiplies
them.  The input is cast once, in forward, into its two forms, for fprop and wgrad; backward keeps the
second and never sees the unquantised input again, unless wgrad is in bf16 or an observer looks.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.quant.cast import Output
from megatron_snip.quant.operands import Casts, LinearCall, Operand, Operands, cast_operands


class Gemms(Protocol):
    """One way to hold and to multiply quantised operands."""

    def output(self, role: str, *, kept: bool) -> Output:
        """How an operand of a role is held; ``kept`` until backward or longer, so memory counts."""
        ...

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """The product of a GEMM, of a dtype; a and b as docs in operands.py: fprop (X [T,K], W [N,K]),
        dgrad (G [T,N], W [N,K]), wgrad (G [T,N], X [T,K]).
        """
        ...


def three_gemms(x: Tensor, w: Tensor, call: LinearCall, gemms: Gemms) -> Tensor:
    """x [T,K], w [N,K] of x.dtype or float32 -> y [T,N] of x.dtype, differentiable once."""
    # inside the Function gradients are off, and what it says of its inputs ignores no_grad outside
    needs_wgrad = torch.is_grad_enabled() and w.requires_grad
    y: Tensor = _ThreeGemms.apply(x, w, call, gemms, needs_wgrad)
    return y


def plain_product(gemm: str, a: Tensor, b: Tensor) -> Tensor:
    """The GEMM of two operands [R, C] as they are: fprop a @ b.T, dgrad a @ b, wgrad a.T @ b."""
    if gemm == "fprop":
        return a @ b.T
    return a @ b if gemm == "dgrad" else a.T @ b


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, call: LinearCall, gemms: Gemms, needs_wgrad: bool) -> Tensor:
        wanted = [(call.form("fprop", "input"), gemms.output("input", kept=False))]
        if needs_wgrad:
            wanted.append((call.form("wgrad", "input"), gemms.output("input", kept=True)))
        casts = call.input_casts if call.input_casts is not None else Casts()
        made = casts.get(x, wanted, x.dtype, call.reduce_amax.get("input"))
        y = gemms.multiply("fprop", made[0], _weight(w, "fprop", call, gemms, x.dtype, needs_wgrad), x.dtype)
        kept = made[1] if needs_wgrad else None
        data, scales = (None, None) if kept is None else (kept.data, kept.scales)
        ctx.save_for_backward(data, scales, w, x if call.observer is not None else None)
        ctx.form, ctx.output = (None, "values") if kept is None else (kept.form, kept.output)
        # what linears share of the input is for their forward alone: holding it would hold the input itself
        ctx.call, ctx.gemms, ctx.dtype = dataclasses.replace(call, input_casts=None), gemms, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        data, scales, w, x = ctx.saved_tensors
        call, gemms, dtype = ctx.call, ctx.gemms, ctx.dtype
        g = grads[0]
        needed = [gemm for gemm, need in zip(("dgrad", "wgrad"), ctx.needs_input_grad, strict=False) if need]
        output = gemms.output("grad_output", kept=False)
        wanted = [(call.form(gemm, "grad_output"), output) for gemm in needed]
        cast = dict(zip(needed, cast_operands(g, wanted, call.reduce_amax.get("grad_output")), strict=True))
        grad_x = grad_w = None
        if "dgrad" in cast:
            grad_x = gemms.multiply("dgrad", cast.pop("dgrad"), _weight(w, "dgrad", call, gemms, dtype), dtype)

        @cache
        def wgrad() -> Tensor:
            operand = Operand(ctx.form, ctx.output, data, scales)
            return gemms.multiply("wgrad", cast.pop("wgrad"), operand, dtype).to(w.dtype)

        if call.observer is not None:
            call.observer.backward(Operands(x, w.to(dtype), g, call, grad_x, wgrad if "wgrad" in cast else None))
        if "wgrad" in needed:
            grad_w = wgrad()
        return grad_x, grad_w, None, None, None


def _weight(
    w: Tensor, gemm: str, call: LinearCall, gemms: Gemms, dtype: torch.dtype, training: bool = False
) -> Operand:
    """The weight [N,K] for a GEMM, from the casts that are kept if there are any.

    Tensor-core bytes that are kept are made for dgrad with those for fprop: one read serves both.
    """
    kept = call.weight_casts is not None
    casts = call.weight_casts if call.weight_casts is not None else Casts()
    output = gemms.output("weight", kept=kept)
    wanted = [(call.form(gemm, "weight"), output)]
    if training and kept and output == "operand":
        wanted.append((call.form("dgrad", "weight"), output))
    return casts.get(w, wanted, dtype, call.reduce_amax.get("weight"), for_now=True)[0]
