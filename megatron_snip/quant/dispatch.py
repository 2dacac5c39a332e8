"""Casts by the fastest implementation there is: the kernel of the tensor's device, else the specification.

All give the same bits (cast.py), so this choice never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quant.cast import (
    Cast,
    Form,
    Output,
    Quantized,
    Rounding,
    cast_reference,
    finite_amax,
    resolve,
)
from megatron_snip.quant.kernels import cpu
from megatron_snip.quant.rounding import RoundingKey
from megatron_snip.quant.scales import tensor_scale


def cast(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], amax: Tensor | None = None) -> list[Cast]:
    """``x`` [R, C] in each of the forms, from one read of it where a kernel can.

    amax: float32 scalar, the largest finite magnitude of the whole tensor of which x is a shard; None takes
    x's own.  Only formats with ``needs_tensor_amax`` look at it.
    """
    if amax is None and any(form.fmt.needs_tensor_amax for form in forms):
        amax = finite_amax(x)
    if cpu.takes(x, forms, outputs):
        return cpu.cast(x, forms, outputs, amax)
    return cast_reference(x, forms, outputs, amax)


def quantize(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
    amax: Tensor | None = None,
) -> Quantized:
    """Codes and scales of ``x`` [R, C].  Arguments and errors as ``fake_quantize``."""
    form = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if not form.fmt.quantised:
        return _unquantised(x, form.fmt)
    return quantized_form(x, form, amax)


def quantized_form(x: Tensor, form: Form, amax: Tensor | None = None) -> Quantized:
    """Codes and scales of ``x`` [R, C] in a form; amax as in ``cast``."""
    if amax is None and form.fmt.needs_tensor_amax:
        amax = finite_amax(x)
    codes, scales, saturated = cast(x, [form], ["codes"], amax)[0]
    assert scales is not None
    whole = tensor_scale(amax, form.element) if form.fmt.needs_tensor_amax and amax is not None else None
    return Quantized(codes, scales, form.fmt, form.block, whole, saturated)


def fake_quantize(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """``x`` [R, C] quantised and dequantised: float32 arithmetic, rounded to x.dtype, no gradient.

    role: "input", "weight" or "grad_output", which decides the block.  dim: the GEMM's reduction
    dim, along which tiles run.  rounding: "nearest", "stochastic", or None for the format's rule for
    the role.  key: the random bits of stochastic rounding.  amax: float32 scalar, the largest finite
    magnitude of the whole tensor where x is a shard of it (nvfp4).  bf16 returns ``x`` itself.
    Raises ValueError for an unknown format, role, dim or rounding, a tensor that is not 2-D or not
    bfloat16 or float32, and stochastic rounding without a key.
    """
    form = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if not form.fmt.quantised:
        return x
    return cast(x, [form], ["values"], amax)[0].values


def _unquantised(x: Tensor, fmt: Format) -> Quantized:
    """An operand [R, C] that stays as it is, with one scale of 1 over the whole of it."""
    return Quantized(x, torch.ones((1, 1), device=x.device), fmt, (max(x.shape[0], 1), max(x.shape[1], 1)))
