"""``cast`` turns a tensor into the forms that GEMMs read, with the kernel of its device.

    cast                     what callers use: linears, probes, quantize, fake_quantize
    kernels/op.run           the kernel of the device (KERNELS); compilers see a custom operator instead
    kernels/cpu.run, kernels/triton_cast.run, or cast.reference if no kernel takes the tensor

Kernels give the reference's bits, so the choice never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_snip.formats import Format, Hadamard
from megatron_snip.quant.casts.cast import (
    OPERANDS,
    Form,
    Operand,
    Quantized,
    Rounding,
    as_read,
    resolve,
    swiglu_product,
)
from megatron_snip.quant.casts.codes import Sent
from megatron_snip.quant.casts.hadamard import check_groups
from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.casts.swizzled import scales_of_bytes, unpack, unswizzle
from megatron_snip.quant.kernels import op, triton_cast
from megatron_snip.quant.kernels.op import dequantize as dequantize

#: Largest magnitudes of shards, float32 [...], which may be overwritten -> those of the whole tensors.  A collective:
#: every process in the group must call it the same way.
ReduceAmax = Callable[[Tensor], Tensor]


def cast(
    x: Tensor,
    wanted: Sequence[Form | None],
    reduce_amax: ReduceAmax | None = None,
    *,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: bool = False,
    up: Tensor | None = None,
) -> list[Operand]:
    """Cast ``x`` [R, C] to each wanted form, with one read of it if a kernel can; without a gradient.

    A form of None gives x itself.  amax: float32 scalar, the largest finite magnitude of the whole tensor; None takes
    x's own, and if x is a shard, ``reduce_amax`` makes it the whole tensor's.  Only ``scaled`` forms need it.
    Transformed forms (hadamard.py) are cast from the transformed tensor and use its amax.
    dtype: what x is rounded to first.  count: whether to count saturated elements.
    up: of x's shape and dtype; if given, SwiGLU's product silu(x) * up is cast, without storing it if a kernel can.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (up is not None and up.requires_grad)):
        with torch.no_grad():
            return cast(x, wanted, reduce_amax, amax=amax, dtype=dtype, count=count, up=up)
    forms: list[Form] = []
    transformed = False
    for form in wanted:
        if form is not None:
            forms.append(form)
            transformed = transformed or form.transformed
    if (len(forms) < len(wanted) or transformed) and (dtype is not None or up is not None):
        x, dtype, up = as_read(x, dtype, up), None, None  # a form reads this tensor itself, or its transform
    if not transformed:
        made = _run(x, forms, amax, reduce_amax, dtype, count, up) if forms else []
    else:
        made = _run_transformed(x, forms, amax, reduce_amax, count)
    if len(forms) == len(wanted):
        return made
    rest = iter(made)
    return [Operand(None, x) if form is None else next(rest) for form in wanted]


def _run_transformed(
    x: Tensor, forms: Sequence[Form], amax: Tensor | None, reduce_amax: ReduceAmax | None, count: bool
) -> list[Operand]:
    """Cast x [R, C] and its transforms, reading each once."""
    alike: dict[tuple[Hadamard, int] | None, list[Form]] = {}
    for form in forms:
        alike.setdefault(_transform(form), []).append(form)
    assert amax is None or len(alike) == 1, "x and its transforms have different amaxes"
    made = {}
    for transform, some in alike.items():
        y, largest = x, None
        if transform is not None:
            check_groups(x, *transform, some[0].role)
            y, largest = op.hadamard(x, *transform)
        made[transform] = iter(_run(y, some, amax, reduce_amax, None, count, None, largest))
    return [next(made[_transform(form)]) for form in forms]


def _transform(form: Form) -> tuple[Hadamard, int] | None:
    """The transform that a form is cast from, and its dim; None for x itself."""
    hadamard = form.fmt.hadamard
    return (hadamard, form.dim) if form.transformed and hadamard is not None else None


def transformed(x: Tensor, form: Form) -> Tensor:
    """What ``cast`` reads of x [R, C] for a form: x itself or its transform."""
    transform = _transform(form)
    if transform is None:
        return x
    check_groups(x, *transform, form.role)
    return op.hadamard(x, *transform)[0]


def _run(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None,
    reduce_amax: ReduceAmax | None,
    dtype: torch.dtype | None,
    count: bool,
    up: Tensor | None,
    largest: Tensor | None = None,
) -> list[Operand]:
    """Cast x [R, C] with the amax that the forms need.  largest: x's own amax, if known."""
    for form in forms:
        if form.scaled:
            break
    else:
        return op.run(x, forms, None, dtype, count, up)
    if up is not None and not triton_cast.takes_product(x, up):
        x, up = swiglu_product(x, up), None
    if dtype is not None and not triton_cast.on_nvidia(x):  # those kernels round as they read
        x, dtype = x.to(dtype), None
    if amax is not None:
        amax = amax.to(x.device, torch.float32)
    else:
        amax = op.finite_amax(x, dtype, up) if largest is None else largest
        amax = amax if reduce_amax is None else reduce_amax(amax)
    return op.run(x, forms, amax, dtype, count, up)


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
    """Codes and scales of ``x`` [R, C].  Arguments and errors are those of ``fake_quantize``."""
    form = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if not form.fmt.quantised:
        return Quantized(x, torch.ones((1, 1), device=x.device), form.fmt, (max(x.shape[0], 1), max(x.shape[1], 1)))
    return quantized(cast(x, [form.held("codes")], amax=amax, count=True)[0])


def values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """An operand dequantised to ``dtype``: [R, C].  Tensor-core operands must be along dim 1."""
    form = operand.form
    if form is None or form.output == "values":
        return operand.data
    return dequantize(quantized(operand), dtype)


def operand_of(sent: Sent, form: Form, codes: Form, dtype: torch.dtype) -> Operand:
    """What ``cast`` to ``form`` makes of a tensor [R, C] in ``dtype``, from its gathered cast to the form ``codes``."""
    if form.output != "values":
        return op.lay_out(sent, form)
    return Operand(form, values(op.lay_out(sent, codes), dtype))


def quantized(codes: Operand) -> Quantized:
    """An operand's codes [R, C] as users see them; for tensor-core operands, those of the carrier."""
    form, data, scales, tensor_scale, saturated = codes
    assert form is not None and scales is not None
    fmt, block = form.fmt, form.block
    if form.output in OPERANDS:
        assert form.dim == 1
        fmt = replace(fmt, element=form.stored)
        if form.output == "operand":  # without the padding
            scales = scales[: -(-data.shape[0] // block[0]), : -(-data.shape[1] // block[1])]
        else:
            cols, block = data.shape[1] * (2 if form.packed else 1), (1, form.each)
            scales = scales_of_bytes(unswizzle(scales, len(data), -(-cols // form.each)), e4m3=form.packed)
            data = unpack(data, cols) if form.packed else data
    return Quantized(data, scales, fmt, block, tensor_scale, saturated)


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
    """Quantise and dequantise ``x`` [R, C]: float32 arithmetic, rounded to x.dtype, no gradient.

    role: "input", "weight" or "grad_output", which decides the block.  dim: the GEMM's reduction dim, along which tiles
    run.  rounding: "nearest", "stochastic", or None for the format's rule for the role.  key: the random bits of
    stochastic rounding.  amax: float32 scalar, the largest finite magnitude of the whole tensor if x is a shard
    (nvfp4).  bf16 returns ``x`` itself.
    Raises UserError for an unknown format, role, dim or rounding, a tensor that is not 2-D or not bfloat16 or float32,
    stochastic rounding without a key, and a transform whose groups x does not divide into.
    With that transform (Form.transformed), the result and ``amax`` are those of the transformed tensor.
    """
    form = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if not form.fmt.quantised:
        return x
    return cast(x, [form], amax=amax)[0].data
