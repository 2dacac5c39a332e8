"""The specification of every cast, in plain torch; kernels give the same bits.

Per block: encode = element max / amax in float32, q = grid(x * encode), scale = 1 / encode, and
x ~= scale * q.  amax is over finite elements; encode is clamped to the largest float32; a block
whose amax is 0 has scale 0 and so gives zeros.  NaN stays in its element, infinities saturate, the
sign of zero is kept.  Source: docs/numerics.md; the grid is OCP OFP8's and MX v1.0's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_snip.formats import NAN_CODE, Element, Format, get_format
from megatron_snip.quant.rounding import RANDOM_BITS, RoundingKey, random_bits

Rounding = Literal["nearest", "stochastic"]

FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_MANTISSA, _FLOAT32_BIAS = 23, 127


@dataclass(frozen=True)
class Quantized:
    """A quantised operand [R, C].

    codes: uint8 [R, C], sign, exponent and mantissa bits as in the element's storage, NaN as 0xff;
    for an unquantised format the operand itself.  scales: float32 [row blocks, column blocks].
    block: rows and columns that share a scale; the last block of a side may be shorter.
    """

    codes: Tensor
    scales: Tensor
    fmt: Format
    block: tuple[int, int]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale * q, computed in float32 and rounded to ``dtype``: [R, C]."""
        if self.fmt.element is None:
            return self.codes.to(dtype)
        values = decode(self.codes, self.fmt.element)
        return (values * _expand(self.scales, self.block, values.shape)).to(dtype)


def quantize_reference(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
) -> Quantized:
    """Codes and scales of ``x`` [R, C]; arguments and errors as ``fake_quantize_reference``."""
    fmt, stochastic = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if fmt.element is None:
        return unquantised(x, fmt)
    q, scales = _to_grid(x, fmt.element, fmt.block_shape(role, dim), key if stochastic else None)
    return Quantized(encode(q, fmt.element), scales, fmt, fmt.block_shape(role, dim))


def fake_quantize_reference(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
) -> Tensor:
    """``x`` [R, C] quantised and dequantised: float32 arithmetic, rounded to x.dtype, no gradient.

    role: "input", "weight" or "grad_output", which decides the block.  dim: the GEMM's reduction
    dim, along which tiles run.  rounding: None takes the format's rule for the role.  key: the
    random bits of stochastic rounding.  A format without element returns ``x`` itself.
    Raises ValueError for an unknown format, role, dim or rounding, a tensor that is not 2-D or not
    bfloat16 or float32, and stochastic rounding without a key.
    """
    fmt, stochastic = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if fmt.element is None:
        return x
    block = fmt.block_shape(role, dim)
    q, scales = _to_grid(x, fmt.element, block, key if stochastic else None)
    return (q * _expand(scales, block, q.shape)).to(x.dtype)


def resolve(
    x: Tensor, fmt: Format | str, *, role: str, dim: int, rounding: str | None, key: RoundingKey | None
) -> tuple[Format, bool]:
    """Check a cast's arguments, x [R, C] among them; return its format and whether it rounds stochastically.

    Raises ValueError as ``fake_quantize_reference`` says.
    """
    if not isinstance(fmt, Format):
        fmt = get_format(fmt)
    fmt.block_shape(role, dim)
    if x.ndim != 2:
        raise ValueError(f"{fmt.name}: x has shape {list(x.shape)}; flatten it to 2-D, tokens by channels")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{fmt.name}: x is {x.dtype}; convert it to bfloat16 or float32")
    if rounding not in (None, "nearest", "stochastic"):
        raise ValueError(f"{fmt.name}: rounding={rounding!r}; choose nearest, stochastic or None")
    stochastic = rounding == "stochastic" or (rounding is None and role in fmt.stochastic_roles)
    if stochastic and key is None and fmt.quantised:
        raise ValueError(f"{fmt.name}: {role} rounds stochastically, key is None; give a RoundingKey")
    return fmt, stochastic


def unquantised(x: Tensor, fmt: Format) -> Quantized:
    """An operand [R, C] that stays as it is, with one scale of 1 over the whole of it."""
    return Quantized(x, torch.ones((1, 1), device=x.device), fmt, (max(x.shape[0], 1), max(x.shape[1], 1)))


@torch.no_grad()
def _to_grid(x: Tensor, element: Element, block: tuple[int, int], key: RoundingKey | None) -> tuple[Tensor, Tensor]:
    """Grid values q, float32 [R, C], and scales, float32 [row blocks, column blocks].

    A key asks for stochastic rounding.
    """
    x = x.float()
    amax = _block_amax(x, block)
    # torch.div of two tensors: Tensor.__rtruediv__ multiplies by a reciprocal, which rounds twice.
    encoding = torch.div(torch.full_like(amax, element.max), amax).clamp(max=FLOAT32_MAX)
    scales = torch.where(amax > 0, torch.div(torch.ones_like(amax), encoding), 0.0)
    y = x * _expand(encoding, block, x.shape)
    size = y.abs().clamp(max=element.max)
    if key is None:
        q = _round_nearest(size, element)
    else:
        q = _round_stochastic(size, element, random_bits(key, x.shape[0], x.shape[1], x.device))
    return torch.copysign(q, y), scales


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest finite magnitude of each block, 0 where there is none: [row blocks, column blocks]."""
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    rows, cols = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    pad = (0, cols * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0])
    blocks = torch.nn.functional.pad(size, pad).view(rows, block[0], cols, block[1])
    return blocks.amax(dim=(1, 3))


def _expand(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value per block to one per element: [R, C]."""
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def _binade(size: Tensor, element: Element) -> Tensor:
    """Exponent of |x| as float32 has it, at least the element's emin: int32."""
    exponent = (size.view(torch.int32) >> _FLOAT32_MANTISSA) - _FLOAT32_BIAS
    return exponent.clamp(min=element.emin)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent from its bit pattern, for exponents of normal float32 numbers."""
    return ((exponent + _FLOAT32_BIAS) << _FLOAT32_MANTISSA).view(torch.float32)


def _round_nearest(size: Tensor, element: Element) -> Tensor:
    """|x| to the nearest grid value, ties to the even code.

    Adding c, whose last bit is worth one grid step, lets float32's own rounding do the work.
    """
    c = _power_of_two(_binade(size, element) + _FLOAT32_MANTISSA - element.mantissa_bits)
    return torch.where(size.isnan(), size, (size + c) - c)


def _round_stochastic(size: Tensor, element: Element, draws: Tensor) -> Tensor:
    """|x| to the upper grid neighbour if draw * 2**-24 < its distance to the lower, in grid steps."""
    exponent = _binade(size, element) - element.mantissa_bits
    step, steps = _power_of_two(exponent), size * _power_of_two(-exponent)
    lower = steps.floor()
    up = draws.float() * 2.0**-RANDOM_BITS < steps - lower
    return torch.where(size.isnan(), size, (lower + up) * step)


def encode(q: Tensor, element: Element) -> Tensor:
    """Codes of grid values: float32 [R, C] -> uint8 [R, C], NaN to 0xff."""
    size = q.abs()
    exponent = _binade(size, element)
    steps = torch.nan_to_num(size * _power_of_two(element.mantissa_bits - exponent)).int()
    code = steps + ((exponent - element.emin) << element.mantissa_bits)
    code = torch.where(q.signbit(), code + element.sign_code, code)
    return torch.where(q.isnan(), NAN_CODE, code).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Grid values of codes, by table: uint8 [R, C] -> float32 [R, C]."""
    magnitudes = element.values()
    table = torch.full((256,), float("nan"))
    for sign, first in ((1.0, 0), (-1.0, element.sign_code)):
        table[first : first + len(magnitudes)] = sign * torch.tensor(magnitudes)
    return table.to(codes.device)[codes.int()]
