"""The specification of every cast, in plain torch; kernels give the same bits.

Per block: amax over finite elements, encode and scale by the format's rule (scales.py),
q = grid(x * encode) clamped to the element's largest value before rounding (grid.py), and x ~= scale * q.
NaN stays in its element, infinities saturate, the sign of zero is kept.  Source: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import NAN_CODE, SCALES, Element, Format, get_format
from megatron_snip.formats.element import Specials
from megatron_snip.quant.grid import decode, encode, round_nearest, round_stochastic
from megatron_snip.quant.hadamard import hadamard
from megatron_snip.quant.rounding import RoundingKey, random_bits
from megatron_snip.quant.scales import block_scales, tensor_scale
from megatron_snip.quant.swizzled import TILE_BYTES, TILE_ROWS, pack, scale_bytes, swizzle

Rounding = Literal["nearest", "stochastic"]

#: What a cast gives.  "values": dequantised, of x's dtype.  "codes": a byte an element as the element
#: stores it, NaN as 0xff.  "operand": a byte an element for FP8 tensor cores, that is codes of the
#: element's carrier, laid out as Hopper's want them: codes contiguous along the reduction dim, scales of tiles
#: along the other one, scales of square blocks along the reduction dim, with zeros up to a multiple of 4.
#: "swizzled": for Blackwell's.  Codes contiguous along the reduction dim, the carrier's, or under E4M3 scales E2M1's,
#: two a byte along that dim; scales a byte each in tiles (swizzled.py), whose rows are laid out as the codes'.
Output = Literal["values", "codes", "operand", "swizzled"]

_SPECIALS: tuple[Specials, ...] = get_args(Specials)
OUTPUTS: tuple[Output, ...] = get_args(Output)
#: What tensor cores read.
OPERANDS: tuple[Output, ...] = ("operand", "swizzled")


class Constants(NamedTuple):
    """A form and its output, but for the key, in integers: whatever a kernel is built or called for follows from them.

    C's struct (cpu.py), what Triton's kernels are compiled for (triton_launches.py) and the operators' integers (op.py)
    are made of them.  specials, scale and output: places in Specials, SCALES and Output.  block_rows, block_cols: of
    what shares a scale.  dim: the reduction dim.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: int
    scale: int
    block_rows: int
    block_cols: int
    dim: int
    output: int

    @property
    def element(self) -> Element:
        """The element onto whose grid values are rounded."""
        return Element(self.exponent_bits, self.mantissa_bits, _SPECIALS[self.specials])

    @property
    def stored(self) -> Element:
        """The element in which codes are written: the carrier's for tensor cores, but for what is packed."""
        element = self.element
        if OUTPUTS[self.output] not in OPERANDS or self.packed:
            return element
        assert element.carrier is not None, f"{element.name} has no carrier"
        return element.carrier

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte, and a scale is E4M3 and not E8M0 where it is swizzled."""
        return OUTPUTS[self.output] == "swizzled" and SCALES[self.scale] == "e4m3"

    @property
    def each(self) -> int:
        """Elements along the reduction dim that share a swizzled scale; a block is a multiple of them."""
        return 16 if self.packed else 32


@dataclass(frozen=True)
class Form:
    """How an operand [R, C] is quantised for one GEMM; an operand may be cast into several forms at once.

    role: "input", "weight" or "grad_output", which decides the block.  dim: the GEMM's reduction dim,
    along which tiles run.  key: the random bits of stochastic rounding; None rounds to nearest.
    """

    fmt: Format
    role: str
    dim: int
    key: RoundingKey | None = None

    #: Rows and columns that share a scale.
    block: tuple[int, int] = field(init=False, repr=False, compare=False)
    #: Whether what is cast is ``hadamard(x)``: wgrad's operands of some formats.
    transformed: bool = field(init=False, repr=False, compare=False)
    #: Whether a cast needs the amax of the whole tensor.
    scaled: bool = field(init=False, repr=False, compare=False)
    #: By output, what ``constants`` gives.
    _constants: Mapping[Output, Constants] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        transformed = self.fmt.hadamard > 0 and self.role != "weight" and self.dim == 0
        object.__setattr__(self, "block", self.fmt.block_shape(self.role, self.dim))
        object.__setattr__(self, "transformed", transformed)
        object.__setattr__(self, "scaled", self.fmt.needs_tensor_amax)
        object.__setattr__(self, "_constants", _constants(self.fmt, self.block, self.dim))

    def __hash__(self) -> int:
        return hash((self.fmt.name, self.role, self.dim, self.key))  # casts are looked up by forms: this is quick

    def with_key(self, key: RoundingKey) -> Form:
        """This form with a key; what follows from the rest, and is most of the work, is not made again."""
        made = object.__new__(Form)
        made.__dict__.update(self.__dict__, key=key)
        return made

    def without_transform(self) -> Form:
        """The form that casts ``hadamard(x)`` as this one casts x."""
        return replace(self, fmt=replace(self.fmt, hadamard=0))

    @property
    def element(self) -> Element:
        """The format's element; bf16 has none and is never cast."""
        assert self.fmt.element is not None, "bf16 is not cast"
        return self.fmt.element

    def constants(self, output: Output) -> Constants:
        """This form, its key and transform aside, and an output in integers."""
        return self._constants[output]

    @classmethod
    def of(cls, constants: Constants, key: RoundingKey | None) -> tuple[Form, Output]:
        """A form with these constants and this key, and the output."""
        rows, cols = constants.block_rows, constants.block_cols
        square = rows == cols
        fmt = Format(
            name="constants",
            element=constants.element,
            tile=max(rows, cols),
            weight_block=rows if square else None,
            scale=SCALES[constants.scale],
        )
        return cls(fmt, "weight" if square else "input", constants.dim, key), OUTPUTS[constants.output]


@lru_cache(maxsize=1024)
def _constants(fmt: Format, block: tuple[int, int], dim: int) -> Mapping[Output, Constants]:
    if (element := fmt.element) is None:
        return {}  # bf16 is not cast
    numbers = element.exponent_bits, element.mantissa_bits, _SPECIALS.index(element.specials), SCALES.index(fmt.scale)
    return {output: Constants(*numbers, *block, dim, place) for place, output in enumerate(OUTPUTS)}


class Cast(NamedTuple):
    """One form of an operand [R, C].

    values: as the Output says, logically [R, C].  For codes and operands, scales: float32 [row blocks,
    column blocks], or bytes in tiles, and where they are counted, saturated: int64 scalar, the elements beyond
    ``Element.saturation`` or infinite; for formats with ``needs_tensor_amax`` tensor_scale: float32 scalar that
    multiplies all scales.
    """

    values: Tensor
    scales: Tensor | None
    saturated: Tensor | None
    tensor_scale: Tensor | None = None


class Quantized(NamedTuple):
    """A quantised operand [R, C].

    codes: uint8 [R, C], sign, exponent and mantissa bits as in the element's storage, NaN as 0xff;
    for an unquantised format the operand itself.  scales: float32 [row blocks, column blocks].
    block: rows and columns that share a scale; the last block of a side may be shorter.
    tensor_scale: float32 scalar that multiplies all scales, for formats with ``needs_tensor_amax``.
    saturated: int64 scalar, how many elements were beyond the largest value and not rounded to it.
    """

    codes: Tensor
    scales: Tensor
    fmt: Format
    block: tuple[int, int]
    tensor_scale: Tensor | None = None
    saturated: Tensor | None = None

    @property
    def constants(self) -> Constants:
        """The constants of the codes; those in square blocks do not tell their dim, and decoding does not ask."""
        return _constants(self.fmt, self.block, int(self.block[0] == 1))["codes"]

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
    """Check a cast's arguments, x [R, C] among them, and return the form they ask for.

    rounding None takes the format's rule for the role.  Raises UserError for an unknown format, role, dim
    or rounding, a tensor that is not 2-D or not bfloat16 or float32, and stochastic rounding without a key.
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
    stochastic = rounding == "stochastic" or (rounding is None and role in fmt.stochastic_roles)
    if stochastic and key is None and fmt.quantised:
        raise UserError(f"{fmt.name}: {role} rounds stochastically, key is None; give a RoundingKey")
    return Form(fmt, role, dim, key if stochastic else None)


def finite_amax(x: Tensor) -> Tensor:
    """Largest finite magnitude of x [...], 0 where there is none: float32 scalar."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.where(x.isfinite(), x.abs(), 0.0).amax().float()


def swiglu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the dtype of both: gate and up [...] -> [...].  Source: arXiv 2002.05202."""
    return F.silu(gate) * up


@torch.no_grad()
def cast_reference(
    x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], amax: Tensor | None = None, count: bool = True
) -> list[Cast]:
    """``x`` [R, C] in each of the forms.

    amax: of the whole tensor, where a form needs it; for a transformed form, of the transformed tensor.
    count: whether to count what saturates.
    """
    return [_cast(x, form, output, amax, count) for form, output in zip(forms, outputs, strict=True)]


#: Sizes of codes and of scales, each with the dim along which they lie in memory.
Layout = tuple[Sequence[int], int, Sequence[int], int]


def layout(shape: Sequence[int], form: Form, output: Output) -> Layout:
    """How codes and scales of an x [R, C] of this shape lie, of any output but values."""
    (rows, cols), (block_rows, block_cols), dim = shape, form.block, form.dim
    blocks = [-(-rows // block_rows), -(-cols // block_cols)]
    if output == "codes":
        return (rows, cols), 1, blocks, 1  # allocations take torch's own sizes more slowly
    if output == "operand":
        square = block_rows == block_cols
        if square:
            blocks[dim] += -blocks[dim] % 4
        return shape, dim, blocks, dim if square else 1 - dim
    constants, codes, scales = form.constants(output), [rows, cols], [0, 0]
    assert form.fmt.scale != "fp32", "E8M0 has powers of two alone"
    assert form.block[dim] % constants.each == 0 and form.element.bits <= (4 if constants.packed else 8)
    if constants.packed:
        codes[dim] = -(-codes[dim] // 2)
    scales[dim] = -(-shape[dim] // (4 * constants.each)) * TILE_BYTES
    scales[1 - dim] = -(-shape[1 - dim] // TILE_ROWS)
    return codes, dim, scales, dim


def allocate(x: Tensor, form: Form, output: Output, *, dtype: torch.dtype | None = None, count: bool = True) -> Cast:
    """Room for a cast of x [R, C], laid out as the Output says; values are of x's dtype or ``dtype``."""
    if output == "values":
        return Cast(torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), None, None)
    codes, codes_along, scales, scales_along = layout(x.shape, form, output)
    return Cast(
        _contiguous_along(codes_along, x, codes, torch.uint8),
        _contiguous_along(scales_along, x, scales, torch.uint8 if output == "swizzled" else torch.float32),
        x.new_empty((), dtype=torch.int64) if count else None,
        x.new_empty((), dtype=torch.float32) if form.scaled else None,
    )


def _contiguous_along(dim: int, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room [R, C] beside x [...], contiguous along a dim."""
    return x.new_empty(shape, dtype=dtype) if dim == 1 else x.new_empty(shape[::-1], dtype=dtype).T


def _cast(x: Tensor, form: Form, output: Output, tensor_amax: Tensor | None, count: bool) -> Cast:
    element, block = form.element, form.block
    x = hadamard(x) if form.transformed else x
    encoding, scales = block_scales(_block_amax(x.float(), block), form.fmt, tensor_amax)
    y = x.float() * _expand(encoding, block, x.shape)
    size = y.abs().clamp(max=element.max)
    if form.key is None:
        q = round_nearest(size, element)
    else:
        q = round_stochastic(size, element, random_bits(form.key, x.shape[0], x.shape[1], x.device))
    q = torch.copysign(q, y)
    if output == "values":
        if form.fmt.needs_tensor_amax:
            assert tensor_amax is not None
            scales = scales * tensor_scale(tensor_amax, element)
        return Cast((q * _expand(scales, block, q.shape)).to(x.dtype), None, None)
    made = allocate(x, form, output, count=count)
    assert made.scales is not None
    codes = encode(q, form.constants(output).stored)
    if output == "swizzled":
        _swizzle(codes, scales, form, made)
    else:
        made.values.copy_(codes)
        made.scales.zero_()[: scales.shape[0], : scales.shape[1]] = scales
    if made.tensor_scale is not None:
        assert tensor_amax is not None
        made.tensor_scale.copy_(tensor_scale(tensor_amax, element))
    if made.saturated is not None:
        made.saturated.copy_((y.abs() > element.saturation).sum())
    return made


def _swizzle(codes: Tensor, scales: Tensor, form: Form, made: Cast) -> None:
    """Write codes [R, C] and scales [row blocks, column blocks] into room for swizzled ones.

    E2M1 has no NaN, so the scale of a block that holds one is NaN, which reaches the same rows of the product.
    """
    constants, block, (values, tiles) = form.constants("swizzled"), form.block, made[:2]
    assert tiles is not None
    if constants.packed:
        scales = torch.where(_block_largest(codes, block) == NAN_CODE, torch.nan, scales)
    if form.dim == 0:
        codes, scales, block, values, tiles = codes.T, scales.T, block[::-1], values.T, tiles.T
    values.copy_(pack(codes) if constants.packed else codes)
    size = (codes.shape[0], codes.shape[1])
    tiles.copy_(swizzle(scale_bytes(scales, block, size, each=constants.each, e4m3=constants.packed)))


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest finite magnitude of each block, 0 where there is none: [row blocks, column blocks]."""
    return _block_largest(torch.where(x.isfinite(), x.abs(), 0.0), block)


def _block_largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest element, of those not negative, of each block of x [R, C]: [row blocks, column blocks]."""
    rows, cols = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    pad = (0, cols * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0])
    return F.pad(x, pad).view(rows, block[0], cols, block[1]).amax(dim=(1, 3))


def _expand(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value per block to one per element: [R, C]."""
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]
