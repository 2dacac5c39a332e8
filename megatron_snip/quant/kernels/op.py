"""Casts by the fastest implementation of the tensor's device, and the same as torch custom operators.

Direct calls go straight to a kernel or to the specification (cast.py).  Compilers and fake tensors cannot look into
kernels: they see ``torch.ops.megatron_snip.cast``, ``dequantize`` and ``finite_amax``, whose forms are lists of
integers, ``_FIELDS`` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_snip.formats import ROLES, Element, Format
from megatron_snip.formats.element import Specials
from megatron_snip.quant import cast as specification
from megatron_snip.quant.cast import Cast, Form, Output, Quantized, cast_reference
from megatron_snip.quant.kernels import cpu, triton_cast
from megatron_snip.quant.rounding import RoundingKey

_SPECIALS, _OUTPUTS = get_args(Specials), get_args(Output)
_SCALES = ("fp32", "fp32_pow2", "e8m0", "e4m3")
_FIELDS = 16
_MASK32 = 0xFFFFFFFF


def cast(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], amax: Tensor | None) -> list[Cast]:
    """``x`` [R, C] in each of the forms, none of them transformed; amax as ``cast_reference``."""
    if not _traced(x):
        return _cast_now(x, forms, outputs, amax)
    numbers = [number for form, output in zip(forms, outputs, strict=True) for number in _numbers(form, output)]
    made = list(torch.ops.megatron_snip.cast(x.detach(), amax, numbers))
    casts = []
    for output in outputs:
        casts.append(Cast(made.pop(0), None, None) if output == "values" else Cast(*(made.pop(0) for _ in range(3))))
    return casts


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """``quantized.dequantize(dtype)`` [R, C]: bfloat16 and float32 by a kernel where there is one."""
    element = quantized.fmt.element
    if element is None or dtype not in (torch.bfloat16, torch.float32):
        return quantized.dequantize(dtype)
    if not _traced(quantized.codes):
        return _dequantize_now(quantized, dtype)
    numbers = [*_element_numbers(element), *quantized.block]
    return torch.ops.megatron_snip.dequantize(quantized.codes, quantized.scales, quantized.tensor_scale, numbers, dtype)


def finite_amax(x: Tensor) -> Tensor:
    """``cast.finite_amax`` of x [R, C]: float32 scalar."""
    return torch.ops.megatron_snip.finite_amax(x.detach()) if _traced(x) else _finite_amax_now(x)


def _traced(x: Tensor) -> bool:
    """Whether a compiler watches, or x [...] has a shape only."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def _cast_now(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], amax: Tensor | None) -> list[Cast]:
    if cpu.takes(x, forms, outputs):
        return cpu.cast(x, forms, outputs, amax)
    if triton_cast.takes(x, forms, outputs):
        return triton_cast.cast(x, forms, outputs, amax)
    return cast_reference(x, forms, outputs, amax)


def _dequantize_now(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    if cpu.reads(quantized.codes):
        return cpu.dequantize(quantized, dtype)
    if triton_cast.takes_codes(quantized):
        return triton_cast.dequantize(quantized, dtype)
    return quantized.dequantize(dtype)


def _finite_amax_now(x: Tensor) -> Tensor:
    if cpu.reads(x):
        return cpu.finite_amax(x)
    if triton_cast.takes_amax(x):
        return triton_cast.finite_amax(x)
    return specification.finite_amax(x)


# --- Forms as integers


def _element_numbers(element: Element) -> list[int]:
    return [element.exponent_bits, element.mantissa_bits, _SPECIALS.index(element.specials)]


def _numbers(form: Form, output: Output) -> list[int]:
    """A form as _FIELDS integers of 64 bits; a key's seed and stream in halves, which together are as good."""
    fmt, key = form.fmt, form.key
    numbers = [*_element_numbers(form.element), fmt.tile, fmt.weight_block or 0, _SCALES.index(fmt.scale)]
    numbers += [ROLES.index(form.role), form.dim, _OUTPUTS.index(output)]
    if key is None:
        return [*numbers, -1, 0, 0, 0, 0, 0, 0]
    halves = [key.seed & _MASK32, key.seed >> 32 & _MASK32, key.stream & _MASK32, key.stream >> 32 & _MASK32]
    return [*numbers, key.iteration, *halves, key.row0, key.col0]


def _forms(numbers: Sequence[int]) -> tuple[list[Form], list[Output]]:
    """What _numbers made into integers."""
    forms, outputs = [], []
    for first in range(0, len(numbers), _FIELDS):
        fmt, role, dim, output = _shape(*numbers[first : first + 9])
        iteration, seed_low, seed_high, stream_low, stream_high, row0, col0 = numbers[first + 9 : first + _FIELDS]
        key = None
        if iteration >= 0:
            seed, stream = seed_low | seed_high << 32, stream_low | stream_high << 32
            key = RoundingKey(seed, iteration, stream, row0, col0)
        forms.append(Form(fmt, role, dim, key))
        outputs.append(output)
    return forms, outputs


@cache
def _shape(
    exponent_bits: int,
    mantissa_bits: int,
    specials: int,
    tile: int,
    weight_block: int,
    scale: int,
    role: int,
    dim: int,
    output: int,
) -> tuple[Format, str, int, Output]:
    """A form but for its key."""
    element = Element(exponent_bits, mantissa_bits, _SPECIALS[specials])
    fmt = Format(name="op", element=element, tile=tile, weight_block=weight_block or None, scale=_SCALES[scale])
    return fmt, ROLES[role], dim, _OUTPUTS[output]


# --- The operators


@torch.library.custom_op("megatron_snip::cast", mutates_args=())
def _cast_op(x: Tensor, amax: Tensor | None, forms: Sequence[int]) -> list[Tensor]:
    casts = _cast_now(x.contiguous(), *_forms(forms), amax)
    return [tensor for made in casts for tensor in made[:3] if tensor is not None]


@_cast_op.register_fake
def _(x: Tensor, amax: Tensor | None, forms: Sequence[int]) -> list[Tensor]:
    made: list[Tensor] = []
    rows, cols = x.shape
    for form, output in zip(*_forms(forms), strict=True):
        if output == "values":
            made.append(torch.empty_like(x, memory_format=torch.contiguous_format))
            continue
        blocks = [-(-side // block) for side, block in zip(x.shape, form.block, strict=True)]
        turned = output == "operand", form.dim
        codes = x.new_empty((cols, rows), dtype=torch.uint8).T if turned == (True, 0) else None
        scales = x.new_empty(blocks[::-1], dtype=torch.float32).T if turned == (True, 1) else None
        made.append(x.new_empty((rows, cols), dtype=torch.uint8) if codes is None else codes)
        made.append(x.new_empty(blocks, dtype=torch.float32) if scales is None else scales)
        made.append(x.new_empty((), dtype=torch.int64))
    return made


@torch.library.custom_op("megatron_snip::dequantize", mutates_args=())
def _dequantize_op(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: Sequence[int], dtype: torch.dtype
) -> Tensor:
    exponent_bits, mantissa_bits, specials, block_rows, block_cols = form
    fmt = Format(name="op", element=Element(exponent_bits, mantissa_bits, _SPECIALS[specials]))
    return _dequantize_now(Quantized(codes, scales, fmt, (block_rows, block_cols), tensor_scale), dtype)


@_dequantize_op.register_fake
def _(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: Sequence[int], dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.custom_op("megatron_snip::finite_amax", mutates_args=())
def _finite_amax_op(x: Tensor) -> Tensor:
    return _finite_amax_now(x)


@_finite_amax_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)
