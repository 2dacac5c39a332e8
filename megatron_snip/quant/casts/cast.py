"""Defines casts: their forms, their operands, and ``reference``, the specification of every cast in plain torch.

For each block, amax is the largest finite magnitude, and the format's rule turns it into encode and scale (scales.py).
Then q = grid(x * encode), clamped to the element's largest value before rounding (grid.py), and x ~= scale * q.  A NaN
affects only its own element, infinities saturate, and the sign of zero is kept.  Kernels give the same bits.
Source: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import E4M3_SCALES, NAN_CODE, ROW, Element, Format, get_format
from megatron_snip.quant.casts.grid import decode, encode, round_nearest, round_stochastic
from megatron_snip.quant.casts.rounding import RoundingKey, random_bits
from megatron_snip.quant.casts.scales import block_scales, four_over_six, tensor_scale
from megatron_snip.quant.casts.swizzled import TILE_BYTES, TILE_ROWS, pack, scale_bytes, swizzle

Rounding = Literal["nearest", "stochastic"]

#: How a cast operand is stored.
#: "values": dequantised, in x's dtype.
#: "codes": one byte per element, the element's own code, with NaN as 0xff.
#: "operand": what Hopper's FP8 tensor cores read.  Each byte is a code of the element's carrier, and codes are
#: contiguous along the reduction dim.  Tile scales are contiguous along the other dim.  Square-block scales are
#: contiguous along the reduction dim and zero-padded there to a multiple of 4.
#: "swizzled": what Blackwell's tensor cores read.  Codes are the carrier's, or with E4M3 scales E2M1's, two to a byte.
#: They are contiguous along the reduction dim.  Scales are bytes in tiles (swizzled.py), laid out along the same dim.
Output = Literal["values", "codes", "operand", "swizzled"]

#: The outputs that tensor cores read.
OPERANDS: tuple[Output, ...] = ("operand", "swizzled")


@dataclass(frozen=True)
class Form:
    """How an operand [R, C] is quantised and stored for one GEMM.  One call of ``cast`` may make several forms.

    fmt: narrowed to the role (``Format.of``).  role: "input", "weight" or "grad_output"; it decides the block.
    dim: the GEMM's reduction dim, along which tiles run.  key: the random bits of stochastic rounding; None rounds to
    nearest.
    """

    fmt: Format
    role: str
    dim: int
    key: RoundingKey | None = None
    output: Output = "values"

    #: Rows and columns that share a scale.
    block: tuple[int, int] = field(init=False, repr=False, compare=False)
    #: Rows and columns that a kernel casts with one scale: a block, or a part of a row whose scale is an input.
    part: tuple[int, int] = field(init=False, repr=False, compare=False)
    #: Whether a scale covers a whole row; kernels then take scales as an input (``scales_of_rows``).
    by_rows: bool = field(init=False, repr=False, compare=False)
    #: Whether ``hadamard(x, fmt.hadamard, dim)`` is cast instead of x.
    transformed: bool = field(init=False, repr=False, compare=False)
    #: Whether a cast needs the amax of the whole tensor.
    scaled: bool = field(init=False, repr=False, compare=False)
    #: Everything a kernel needs to know except the key, such as "4 3 fn fp32 1x128 1 codes"; ``form_of`` parses it.
    #: Kernels look up their compile-time constants by it.  Custom operators take it because they cannot take objects.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fmt", self.fmt.of(self.role))
        block = self.fmt.block_shape(self.role, self.dim)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "part", part_of(block))
        object.__setattr__(self, "by_rows", ROW in block)
        object.__setattr__(self, "transformed", self.fmt.transforms(self.role, self.dim))
        object.__setattr__(self, "scaled", self.fmt.needs_tensor_amax)
        object.__setattr__(self, "text", _text(self.fmt, block, self.dim, self.output))

    def __hash__(self) -> int:  # fast, because cached casts are looked up by form
        return hash((self.fmt.name, self.role, self.dim, self.key, self.output))

    def with_key(self, key: RoundingKey) -> Form:
        """This form with a key.  It reuses the derived fields, which are most of the work."""
        made = object.__new__(Form)
        made.__dict__.update(self.__dict__, key=key)
        return made

    def held(self, output: Output) -> Form:
        """This form with another output."""
        return Form(self.fmt, self.role, self.dim, self.key, output)

    @property
    def element(self) -> Element:
        """The element whose grid values are rounded to; bf16 has none and is never cast."""
        assert self.fmt.element is not None, "bf16 is not cast"
        return self.fmt.element

    @property
    def stored(self) -> Element:
        """The element that codes are written in: the carrier for tensor cores, unless two codes share a byte."""
        if self.output not in OPERANDS or self.packed:
            return self.element
        assert self.element.carrier is not None, f"{self.element.name} has no carrier"
        return self.element.carrier

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte and swizzled scales are E4M3, not E8M0."""
        return self.output == "swizzled" and self.fmt.scale in E4M3_SCALES

    @property
    def each(self) -> int:
        """Elements along the reduction dim that share a swizzled scale; a block is a multiple of this."""
        return 16 if self.packed else 32


def part_of(block: tuple[int, int]) -> tuple[int, int]:
    """``Form.part`` for this block."""
    return (1, 128) if block[1] == ROW else (16, 1) if block[0] == ROW else block


@lru_cache(maxsize=1024)
def form_of(text: str) -> Form:
    """The form with this ``text``, without a key.  Its format is not registered, and it is not transformed."""
    exponent, mantissa, specials, scale, block, dim, output = text.split()
    rows, cols = map(int, block.split("x"))
    square = rows == cols
    element = Element(int(exponent), int(mantissa), specials)  # type: ignore[arg-type]
    fmt = Format(text, element, tile=max(rows, cols), weight_block=rows if square else None, scale=scale)
    return Form(fmt, "weight" if square else "input", int(dim), output=output)  # type: ignore[arg-type]


def _text(fmt: Format, block: tuple[int, int], dim: int, output: Output) -> str:
    if (element := fmt.element) is None:
        return ""  # bf16 is not cast
    bits = f"{element.exponent_bits} {element.mantissa_bits} {element.specials}"
    return f"{bits} {fmt.scale} {block[0]}x{block[1]} {dim} {output}"


class Operand(NamedTuple):
    """An operand [R, C] of a GEMM, cast to one form.

    data: [R, C] values, codes or bytes, according to the form's output; if form is None, the tensor itself.
    scales: for codes and bytes, float32 [row blocks, column blocks] or bytes in tiles.  tensor_scale: float32 scalar
    that multiplies all scales, for formats with ``needs_tensor_amax``.  saturated: int64 scalar, the number of elements
    that are infinite or beyond ``Element.saturation``, if they were counted.
    """

    form: Form | None
    data: Tensor
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    saturated: Tensor | None = None


class Quantized(NamedTuple):
    """A quantised operand [R, C].

    codes: uint8 [R, C], the element's sign, exponent and mantissa bits, NaN as 0xff; for an unquantised format, the
    operand itself.  scales: float32 [row blocks, column blocks].
    block: rows and columns that share a scale, ROW for all of them; the last block of a side may be shorter.
    tensor_scale: float32 scalar that multiplies all scales, for formats with ``needs_tensor_amax``.
    saturated: int64 scalar, the number of elements that were beyond the largest value and did not round to it.
    """

    codes: Tensor
    scales: Tensor
    fmt: Format
    block: tuple[int, int]
    tensor_scale: Tensor | None = None
    saturated: Tensor | None = None

    @property
    def text(self) -> str:
        """``Form.text`` of the codes.  Square blocks do not imply a dim, and decoding does not need one."""
        return _text(self.fmt, self.block, int(self.block[0] == 1), "codes")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale * q, computed in float32 and rounded to ``dtype``: [R, C]."""
        if self.fmt.element is None:
            return self.codes.to(dtype)
        scales = self.scales if self.tensor_scale is None else self.scales * self.tensor_scale
        values = decode(self.codes, self.fmt.element)
        return (values * _expand(scales, self.block, values.shape)).to(dtype)


def resolve(
    x: Tensor, fmt: Format | str, *, role: str, dim: int, rounding: str | None, key: RoundingKey | None
) -> Form:
    """Check the arguments of a cast of x [R, C], and return the form they describe.

    rounding: None uses the format's rule for the role.  Raises UserError for an unknown format, role, dim or rounding,
    a tensor that is not 2-D or not bfloat16 or float32, and stochastic rounding without a key.
    """
    if not isinstance(fmt, Format):
        fmt = get_format(fmt)
    fmt.block_shape(role, dim)
    if x.ndim != 2:
        raise UserError(f"{fmt.name}: x has shape {list(x.shape)}; flatten it to 2-D, tokens by channels")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"{fmt.name}: x is {x.dtype}; convert it to bfloat16 or float32")
    if rounding not in (None, "nearest", "stochastic"):
        raise UserError(f"{fmt.name}: rounding={rounding!r}; choose nearest, stochastic or None")
    stochastic = rounding == "stochastic" or (rounding is None and fmt.stochastic(role, dim))
    if stochastic and key is None and fmt.quantised:
        raise UserError(f"{fmt.name}: {role} rounds stochastically, key is None; give a RoundingKey")
    return Form(fmt, role, dim, key if stochastic else None)


def finite_amax(x: Tensor) -> Tensor:
    """Largest finite magnitude of x [...], or 0 if there is none: float32 scalar."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.where(x.isfinite(), x.abs(), 0.0).amax().float()


def swiglu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the dtype of both: gate and up [...] -> [...].  Source: arXiv 2002.05202."""
    return F.silu(gate) * up


def as_read(x: Tensor, dtype: torch.dtype | None, up: Tensor | None) -> Tensor:
    """What a cast of x [R, C] reads: x, or SwiGLU's product of x and ``up`` if given, rounded to ``dtype``."""
    x = x if up is None else swiglu_product(x, up)
    return x if dtype is None else x.to(dtype)


@torch.no_grad()
def reference(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: bool = True,
    up: Tensor | None = None,
) -> list[Operand]:
    """Cast ``as_read(x, dtype, up)`` [R, C] to each form; for transformed forms, x is ``hadamard``'s output.

    amax: the largest finite magnitude of the whole tensor, if a form needs it.  count: whether to count saturated
    elements.
    """
    x = as_read(x, dtype, up)
    return [_quantise(x, form, amax, count) for form in forms]


def layout(shape: Sequence[int], form: Form) -> tuple[Sequence[int], int, Sequence[int], int]:
    """Shape of the codes, the dim they are contiguous along, and the same for scales, of x [R, C]; not for values."""
    (rows, cols), (block_rows, block_cols), dim = shape, form.block, form.dim
    blocks = [-(-rows // block_rows), -(-cols // block_cols)]
    if form.output == "codes":
        return (rows, cols), 1, blocks, 1  # a tuple, because allocating from a torch.Size is slower
    if form.output == "operand":
        square = block_rows == block_cols
        if square:
            blocks[dim] += -blocks[dim] % 4
        return shape, dim, blocks, dim if square else 1 - dim
    codes, scales = [rows, cols], [0, 0]
    assert form.fmt.scale != "fp32", "E8M0 has powers of two alone"
    assert form.block[dim] % form.each == 0 and form.element.bits <= (4 if form.packed else 8)
    if form.packed:
        codes[dim] = -(-codes[dim] // 2)
    scales[dim] = -(-shape[dim] // (4 * form.each)) * TILE_BYTES
    scales[1 - dim] = -(-shape[1 - dim] // TILE_ROWS)
    return codes, dim, scales, dim


def allocate(x: Tensor, form: Form, *, dtype: torch.dtype | None = None, count: bool = True) -> Operand:
    """Allocate a cast of x [R, C] in the layout of the form's output; values have ``dtype``, by default x's."""
    if form.output == "values":
        return Operand(form, torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format))
    codes, codes_along, scales, scales_along = layout(x.shape, form)
    return Operand(
        form,
        _contiguous_along(codes_along, x, codes, torch.uint8),
        _contiguous_along(scales_along, x, scales, torch.uint8 if form.output == "swizzled" else torch.float32),
        x.new_empty((), dtype=torch.float32) if form.scaled else None,
        x.new_empty((), dtype=torch.int64) if count else None,
    )


def _contiguous_along(dim: int, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate [R, C] on the device of x [...], contiguous along ``dim``."""
    rows, cols = shape
    strides = (cols, 1) if dim == 1 else (1, rows)
    return torch.empty_strided((rows, cols), strides, dtype=dtype, device=x.device)  # less host time than new_empty


def _quantise(x: Tensor, form: Form, tensor_amax: Tensor | None, count: bool) -> Operand:
    element, block = form.element, form.block
    if form.fmt.scale == "e4m3_4over6":
        assert tensor_amax is not None
        encoding, scales = four_over_six(_finite(x, block).float(), form.fmt, tensor_amax)
    else:
        encoding, scales = block_scales(_finite(x, block).amax(dim=(1, 3)).float(), form.fmt, tensor_amax)
    y = x.float() * _expand(encoding, block, x.shape)
    size = y.abs().clamp(max=element.max)
    if form.key is None:
        q = round_nearest(size, element)
    else:
        q = round_stochastic(size, element, random_bits(form.key, x.shape[0], x.shape[1], x.device))
    q = torch.copysign(q, y)
    if form.output == "values":
        if form.scaled:
            assert tensor_amax is not None
            scales = scales * tensor_scale(tensor_amax, form.fmt)
        return Operand(form, (q * _expand(scales, block, q.shape)).to(x.dtype))
    made = allocate(x, form, count=count)
    store(encode(q, form.stored), scales, made)
    if made.tensor_scale is not None:
        assert tensor_amax is not None
        made.tensor_scale.copy_(tensor_scale(tensor_amax, form.fmt))
    if made.saturated is not None:
        made.saturated.copy_((y.abs() > element.saturation).sum())
    return made


def store(codes: Tensor, scales: Tensor, made: Operand) -> None:
    """Write codes [R, C] of ``form.stored`` and scales, float32 [row blocks, column blocks], into an operand."""
    assert made.form is not None and made.scales is not None
    if made.form.output == "swizzled":
        _swizzle(codes, scales, made.form, made)
    else:
        made.data.copy_(codes)
        made.scales.zero_()[: scales.shape[0], : scales.shape[1]] = scales


def _swizzle(codes: Tensor, scales: Tensor, form: Form, made: Operand) -> None:
    """Write codes [R, C] and scales [row blocks, column blocks] into swizzled memory.

    E2M1 has no NaN, so a block that contains one gets a NaN scale, which reaches the same rows of the product.
    """
    block, data, tiles = form.block, made.data, made.scales
    assert tiles is not None
    if form.packed:
        scales = torch.where(has_nan(codes, block), torch.nan, scales)
    if form.dim == 0:
        codes, scales, block, data, tiles = codes.T, scales.T, block[::-1], data.T, tiles.T
    data.copy_(pack(codes) if form.packed else codes)
    size = (codes.shape[0], codes.shape[1])
    tiles.copy_(swizzle(scale_bytes(scales, block, size, each=form.each, e4m3=form.packed)))


def scales_of_rows(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Encode and scale of each row of x [R, C], or of each column for a form along dim 0: float32 [R, 1] or [1, C]."""
    return block_scales(_finite(x, form.block).amax(dim=(1, 3)).float(), form.fmt)


def has_nan(codes: Tensor, block: tuple[int, int]) -> Tensor:
    """Whether each block of codes [R, C] contains a NaN: bool [row blocks, column blocks]."""
    return _in_blocks(codes, block).amax(dim=(1, 3)) == NAN_CODE


def _finite(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Magnitudes of x [R, C] in the shape of ``_in_blocks``, 0 where an element is not finite."""
    return _in_blocks(torch.where(x.isfinite(), x.abs(), 0.0), block)


def _in_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [R, C] as [row blocks, rows per block, column blocks, columns per block], zero-padded at the edges."""
    block = _within(block, x.shape)
    rows, cols = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    pad = (0, cols * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0])
    return F.pad(x, pad).view(rows, block[0], cols, block[1])


def _expand(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Expand one value per block to one per element: [R, C]."""
    block = _within(block, shape)
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def _within(block: tuple[int, int], shape: Sequence[int]) -> tuple[int, int]:
    """The sides of a block in a tensor of this shape; ROW becomes the tensor's own size."""
    rows, cols = (max(size, 1) if side == ROW else side for side, size in zip(block, shape, strict=True))
    return rows, cols
