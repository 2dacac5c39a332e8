"""Casts by the fastest implementation there is: the kernel of the tensor's device, else the specification.

All give the same bits (cast.py), so this choice never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quant.cast import (
    Cast,
    Form,
    Output,
    Quantized,
    Rounding,
    resolve,
    swiglu_product,
)
from megatron_snip.quant.kernels import op, triton_cast
from megatron_snip.quant.kernels.op import dequantize as dequantize
from megatron_snip.quant.rounding import RoundingKey

#: Largest magnitudes of shards, float32 [...], which may be overwritten -> those of the whole tensors.  A collective:
#: every process of the group calls it alike.
ReduceAmax = Callable[[Tensor], Tensor]


def cast(
    x: Tensor,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    amax: Tensor | None = None,
    reduce_amax: ReduceAmax | None = None,
    *,
    dtype: torch.dtype | None = None,
    count: bool = False,
    up: Tensor | None = None,
) -> list[Cast]:
    """``x`` [R, C] in each of the forms, from one read of it where a kernel can.

    amax: float32 scalar, the largest finite magnitude of the whole tensor of which x is a shard; None takes
    x's own, which ``reduce_amax`` makes the whole tensor's.  Only formats with ``needs_tensor_amax`` look.
    Transformed forms (hadamard.py) are cast from the transformed tensor, and its own amax counts for them.
    dtype: what x is rounded to first, on the way where a kernel can.  count: whether to count what saturates.
    up: of x's shape and dtype; SwiGLU's product silu(x) * up is cast, and where a kernel can it is never stored.
    """
    transformed = scaled = False
    for form in forms:
        transformed, scaled = transformed or form.transformed, scaled or form.scaled
    if not transformed and not scaled:
        return op.cast(x, forms, outputs, None, dtype=dtype, count=count, up=up)
    if up is not None and (transformed or not triton_cast.takes_product(x, up)):
        x, up = swiglu_product(x, up), None
    if dtype is not None and (transformed or not op.rounds(x)):
        x, dtype = x.to(dtype), None
    if transformed:
        return _cast_with_transform(x, forms, outputs, amax, reduce_amax, count)
    if amax is not None:
        amax = amax.to(x.device, torch.float32)
    if amax is None and scaled:
        amax = op.finite_amax(x, dtype, up)
        amax = amax if reduce_amax is None else reduce_amax(amax)
    return op.cast(x, forms, outputs, amax, dtype=dtype, count=count, up=up)


def _cast_with_transform(
    x: Tensor,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    amax: Tensor | None,
    reduce_amax: ReduceAmax | None,
    count: bool,
) -> list[Cast]:
    """``cast`` where some forms are of ``hadamard(x)``: one call for x, one for the transformed tensor."""
    assert amax is None or all(form.transformed for form in forms), "x and hadamard(x) have different amaxes"
    casts: dict[int, Cast] = {}
    for transformed in (False, True):
        chosen = [index for index, form in enumerate(forms) if form.transformed == transformed]
        if not chosen:
            continue
        plain = [forms[index].without_transform() if transformed else forms[index] for index in chosen]
        source, largest = op.hadamard(x) if transformed else (x, None)
        if amax is not None:
            largest = amax
        elif largest is not None and reduce_amax is not None and any(form.scaled for form in plain):
            largest = reduce_amax(largest)
        made = cast(source, plain, [outputs[index] for index in chosen], largest, reduce_amax, count=count)
        casts.update(zip(chosen, made, strict=True))
    return [casts[index] for index in range(len(forms))]


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
    made = cast(x, [form], ["codes"], amax, count=True)[0]
    assert made.scales is not None
    return Quantized(made.values, made.scales, form.fmt, form.block, made.tensor_scale, made.saturated)


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
    Raises UserError for an unknown format, role, dim or rounding, a tensor that is not 2-D or not
    bfloat16 or float32, stochastic rounding without a key, and a form that ``hadamard`` cannot transform.
    A form with that transform (Form.transformed) gives, and takes the amax of, the transformed tensor.
    """
    form = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if not form.fmt.quantised:
        return x
    return cast(x, [form], ["values"], amax)[0].values


def _unquantised(x: Tensor, fmt: Format) -> Quantized:
    """An operand [R, C] that stays as it is, with one scale of 1 over the whole of it."""
    return Quantized(x, torch.ones((1, 1), device=x.device), fmt, (max(x.shape[0], 1), max(x.shape[1], 1)))
