"""Decides how a cast is launched: which forms go together, what the kernel is compiled for, and the tiling.

All of this follows from the kinds of the forms, and is worked out once for each set of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_snip.formats import Element
from megatron_snip.formats.element import E2M1, E4M3, E5M2
from megatron_snip.quant.casts.cast import OPERANDS, Form, form_of
from megatron_snip.quant.casts.swizzled import TILE_ROWS

if TYPE_CHECKING:
    from megatron_snip.quant.kernels.triton_steps import FormSpec

MAX_BLOCK = 128

#: A program's columns: a whole block of MAX_BLOCK.
COLS = 128


class Tiling(NamedTuple):
    """How a program walks through its tile of x.

    chunk: the rows that it has in registers at once.  rows: all rows that it casts if no block is taller than a chunk;
    otherwise it casts one row of blocks.
    """

    chunk: int
    warps: int
    rows: int = 32

    def __str__(self) -> str:
        return f"{self.chunk}{f' of {self.rows}' if self.rows > 32 else ''} x {self.warps}"


#: Tilings by the longest side of a block.  The one for 128 was the fastest of eight on an H200, for codes along either
#: dim and for both (benchmarks/results/2026-11-26-gpu-h200.md).  The others were chosen without a GPU, by counts of the
#: compiled code: of the tilings that leave an SM 16 warps, one that issues few instructions per element.
TILINGS = {
    128: Tiling(32, 4),
    32: Tiling(32, 8),
    16: Tiling(16, 4, 64),  # with only 16 rows, a program would spend a fifth of its work finding its position
}
ANY = Tiling(32, 4)  # for other blocks
STOCHASTIC = Tiling(16, 4)  # for blocks of 128; random bits take registers
# For swizzled operands in blocks of 32, rounded to nearest.
SWIZZLED = Tiling(32, 4)
# For four over six, whose two candidates take registers.
FOUR_OVER_SIX = Tiling(16, 8)
# For SwiGLU's product in blocks of 128, rounded to nearest.
PRODUCT = Tiling(32, 8)

#: Elements that an instruction converts float32 to, from compute capability 8.9 and from 10.0.
FP8, FP8_AND_FP4 = (E4M3, E5M2), (E4M3, E5M2, E2M1)


class Kind(NamedTuple):
    """What a kernel needs to know about a form.  text: ``Form.text``.  phase: col0 & 7 of the random bits, or -1."""

    text: str
    phase: int

    @classmethod
    def of(cls, form: Form) -> Kind:
        """The kind of a form."""
        return cls(form.text, -1 if form.key is None else form.key.col0 & 7)

    @property
    def form(self) -> Form:
        """A form of this kind, without a key."""
        return form_of(self.text)


class Launch(NamedTuple):
    """One launch.

    forms: the cast's forms that it writes.  specs: what the kernel is compiled for.  twins: whether one cast is stored
    twice.  rows: per program.  covered: tensors whose rows are a multiple of this have no ragged edge, beyond which
    scales are 0.  registers: the most that a thread may have, or None.
    """

    forms: slice
    specs: tuple[FormSpec, FormSpec | None]
    twins: bool
    rows: int
    covered: int
    tiling: Tiling
    registers: int | None


@lru_cache(maxsize=1024)
def launches(kinds: tuple[Kind, ...], product: bool, converts: tuple[Element, ...]) -> list[Launch]:
    """The launches of a cast into forms of these kinds.

    A launch writes two forms, unless both have blocks taller than a chunk and of different heights.
    product: whether SwiGLU's product is cast.  converts: the elements that the device has instructions for.
    """
    made: list[Launch] = []
    first = 0
    while first < len(kinds):
        pair = kinds[first : first + 2]
        chunk = tiling(pair, product).chunk
        both = len({kind.form.part[0] for kind in pair if kind.form.part[0] > chunk}) < 2
        chosen = slice(first, first + 1 + both)
        made.append(_launch(chosen, kinds[chosen], product, converts))
        first = chosen.stop
    return made


def tiling(kinds: Sequence[Kind], product: bool = False) -> Tiling:
    """The tiling of a launch of these forms.  Blocks of up to 32 rows fit into a chunk and are read once.

    product: whether SwiGLU's product is cast.
    """
    blocks = [kind.form.part for kind in kinds]
    side, stochastic = max(map(max, blocks)), any(kind.phase >= 0 for kind in kinds)
    if product and side == MAX_BLOCK and not stochastic:
        return PRODUCT
    if _swizzled(kinds) and side == 32 and not stochastic:
        return SWIZZLED
    chosen = STOCHASTIC if side == MAX_BLOCK and stochastic else TILINGS.get(side, ANY)
    if any(kind.form.fmt.scale == "e4m3_4over6" for kind in kinds):
        chosen = FOUR_OVER_SIX
    high = any(chosen.chunk < rows <= ANY.chunk for rows, _ in blocks)
    return ANY if high else chosen


def _launch(forms: slice, kinds: Sequence[Kind], product: bool, converts: Sequence[Element]) -> Launch:
    twins, chosen = _twins(kinds), tiling(kinds, product)
    specs = [_spec(kind, converts, twins) for kind in kinds]
    tall = [kind.form.part[0] for kind in kinds if kind.form.part[0] > chosen.chunk]
    rows = max(tall, default=max(chosen.rows, chosen.chunk))
    two = len(kinds) == 2 and not twins
    covered = TILE_ROWS if _swizzled(kinds) else rows
    # otherwise random bits would take more and leave an SM too few warps
    registers = 128 if any(kind.phase >= 0 for kind in kinds) else None
    return Launch(forms, (specs[0], specs[1] if two else None), twins, rows, covered, chosen, registers)


def _swizzled(kinds: Sequence[Kind]) -> bool:
    return any(kind.form.output == "swizzled" for kind in kinds)


def _twins(kinds: Sequence[Kind]) -> bool:
    """Whether these are two operands with the same codes and scales, one along each dim."""
    if len(kinds) < 2 or any(kind.phase >= 0 for kind in kinds):
        return False
    one, other = (kind.form for kind in kinds)
    square = one.block[0] == one.block[1]
    return square and one.output in OPERANDS and one.dim != other.dim and replace(one, dim=other.dim).text == other.text


def _carry(element: Element) -> int:
    return 0x7FFFFF - int(np.float32(element.max).view(np.int32) & 0x7FFFFF)


def _spec(kind: Kind, converts: Sequence[Element], twins: bool) -> FormSpec:
    """What a kernel is compiled for."""
    from megatron_snip.quant.kernels.triton_steps import FormSpec

    form, phase = kind.form, kind.phase
    element, stored = form.element, form.stored
    by_instruction = form.output != "values" and stored in converts and (stored != E2M1 or form.packed)
    hardware = stored.name.lower() if by_instruction else ""
    return FormSpec(
        block_rows=form.part[0],
        block_cols=form.part[1],
        by_rows=form.by_rows,
        scale=form.fmt.scale,
        mantissa=element.mantissa_bits,
        emin=element.emin,
        emax=element.emax,
        largest=element.max,
        saturation=element.saturation,
        saturates=form.fmt.saturates,
        sixth=float(np.float32(1.0) / np.float32(element.max)),
        carry=_carry(element) if form.fmt.scale == "e8m0_ceil" else 0,
        output=form.output,
        transposed=form.output in OPERANDS and form.dim == 0,
        twins=twins,
        packed=form.packed,
        each=form.each,
        code_mantissa=stored.mantissa_bits,
        code_emin=stored.emin,
        sign_code=stored.sign_code,
        hardware=hardware,
        clamps=hardware != "" and stored == element,
        direct=hardware != "" and stored == element and phase < 0,
        phase=phase,
    )
