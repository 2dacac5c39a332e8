# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Stores a cast's results, for triton_kernels.py: codes, scales, and the count of saturated elements.

If a form has twins, its codes and scales are stored along the other dim, too.  cast.py defines the layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.casts.swizzled import TILE_BYTES, TILE_ROWS
from megatron_snip.quant.kernels.triton_steps import bits_of, encode_nearest, float_of, tile, within

_TILE_ROWS, _TILE_BYTES = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_BYTES)  # of swizzled scales
_E4M3_NAN = tl.constexpr(0x7F)
_CONVERT = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.%s.f32 low, $2, $1;
    cvt.rn.satfinite.%s.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
E4M3_OF_FLOATS, E5M2_OF_FLOATS = (tl.constexpr(_CONVERT % (name, name)) for name in ("e4m3x2", "e5m2x2"))


@triton.jit
def fp8_codes(x, CONVERT: tl.constexpr):
    """Codes of float32 [...] by ``_CONVERT`` for an element, to nearest even, saturating: uint8 [...]; NaN stays NaN.

    Triton's own cast has halves of registers in its PTX.  If codes are stored twice, ptxas of CUDA 12.8 (Triton 3.6)
    reads two of them before they are written, so columns 1 and 5 of every 16 come from the previous chunk.
    """
    return tl.inline_asm_elementwise(CONVERT, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def codes_of(y, q, size, negative, F: tl.constexpr):
    """Codes, with sign, of a rounded tile: uint8 [R, C], or float32 that ``store_codes`` converts to pairs of codes.

    NaN gives anything.  q [R, C]: the rounded magnitudes.
    """
    CARRIED: tl.constexpr = F.output == "operand" or (F.output == "swizzled" and not F.packed)
    if F.direct:
        rounded = y
    elif F.phase >= 0 or CARRIED or F.hardware != "":
        rounded = float_of(bits_of(q) | negative)
    if F.hardware == "e4m3":
        codes = fp8_codes(rounded, E4M3_OF_FLOATS)
    elif F.hardware == "e5m2":
        codes = fp8_codes(rounded, E5M2_OF_FLOATS)
    elif F.hardware == "e2m1":
        codes = rounded
    else:
        if F.phase >= 0 or CARRIED:
            size = q
        codes = encode_nearest(size, F.code_mantissa, F.code_emin)
        codes = tl.where(negative != 0, codes + F.sign_code, codes).to(tl.uint8)
    return codes


@triton.jit
def pairs_of_e2m1(low, high):
    """E2M1 codes of float32 [...] and [...] in the low and high halves of a byte, to nearest even, at most 6: uint8."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 one, two, three, four;
        cvt.rn.satfinite.e2m1x2.f32 one, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 two, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 three, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 four, $8, $4;
        mov.b32 $0, {one, two, three, four};
        }""",
        "=r,r,r,r,r,r,r,r,r",
        [low, high],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def store_codes(codes, which, place, row, col, rows, cols, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write the codes uint8 [ROWS, COLS] of a tile at (row, col) of [rows, cols]: those in ``which``, or all for None.

    Packed codes are written in pairs, all that are inside; they may be float32 that an instruction converts to pairs.
    """
    _store_along(codes, which, place[0], row, col, rows, cols, F.transposed, F.packed, ROWS, COLS)
    if F.twins:
        _store_along(codes, which, place[6][0], row, col, rows, cols, not F.transposed, F.packed, ROWS, COLS)


# fmt: off
@triton.jit
def _store_along(
    codes, which, out, row, col, rows, cols,
    TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """``store_codes`` by columns or by rows."""
    if TRANSPOSED:
        if which is not None:
            which = tl.trans(which)
        _store_rows(tl.trans(codes), which, out, col, row, cols, rows, PACKED, COLS, ROWS)
    else:
        _store_rows(codes, which, out, row, col, rows, cols, PACKED, ROWS, COLS)


@triton.jit
def _store_rows(
    codes, which, out, row, col, rows, cols, PACKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """``store_codes`` by rows."""
    if PACKED:
        low, high = tl.split(tl.reshape(codes, (ROWS, COLS // 2, 2)))
        codes, col = low | (high << 4) if codes.dtype == tl.uint8 else pairs_of_e2m1(low, high), col // 2
        if which is None:
            cols = cols // 2  # exact, since tiles cover x
        else:
            cols = tl.cdiv(cols, 2)
            which = within(row, col, rows, cols, ROWS, COLS // 2)
        tl.store(tile(out, row, col, cols, 1, ROWS, COLS // 2), codes, mask=which)
    else:
        tl.store(tile(out, row, col, cols, 1, ROWS, COLS), codes, mask=which)


@triton.jit
def count_saturated(y, saturated, SATURATION: tl.constexpr):
    """Add the number of elements of a tile [R, C] beyond ``SATURATION`` to an int64."""
    count = tl.sum((tl.abs(y) > SATURATION).to(tl.int32))
    tl.atomic_add(saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit
def store_scales(
    scale, has_nan, place, row, col, rows, cols, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Write scales float32 [row blocks, 1, column blocks, 1] of [ROWS, COLS] elements at (row, col) of [rows, cols].

    has_nan: whether a block contains a NaN, of the same shape.
    """
    _, scales, _, _, scale_row, scale_col, twin = place
    if F.output == "swizzled":
        if F.packed:
            bytes_ = tl.where(has_nan, _E4M3_NAN, encode_nearest(scale, 3, -6))
        else:
            bytes_ = bits_of(scale) >> 23  # 0 for 2**-127, which is subnormal, and for 0
        _store_swizzled(bytes_, scales, row, col, rows, cols, F.transposed, F, ROWS, COLS)
        if F.twins:
            _store_swizzled(bytes_, twin[1], row, col, rows, cols, not F.transposed, F, ROWS, COLS)
    else:
        NR: tl.constexpr = ROWS // F.block_rows
        NC: tl.constexpr = COLS // F.block_cols
        PADDED: tl.constexpr = (
            (0 if F.transposed else 1) if F.output == "operand" and F.block_rows == F.block_cols else -1
        )
        scale = tl.reshape(scale, (NR, NC))
        row, col = row // F.block_rows, col // F.block_cols
        rows, cols = tl.cdiv(rows, F.block_rows), tl.cdiv(cols, F.block_cols)
        _store_floats(scale, scales, row, col, rows, cols, scale_row, scale_col, PADDED, NR, NC)
        if F.twins:
            _store_floats(scale, twin[1], row, col, rows, cols, twin[4], twin[5], 1 - PADDED, NR, NC)


@triton.jit
def _store_floats(
    scale, scales, row, col, rows, cols, row_stride, col_stride,
    PADDED: tl.constexpr, NR: tl.constexpr, NC: tl.constexpr,
):
    """Write scales [NR, NC] at (row, col) of [rows, cols], all counted in blocks.

    PADDED: the dim along which zeros pad the blocks to a multiple of 4, or -1.
    """
    tl.store(tile(scales, row, col, row_stride, col_stride, NR, NC), scale, mask=within(row, col, rows, cols, NR, NC))
    if PADDED == 1:
        end = tl.where(col + NC >= cols, tl.cdiv(cols, 4) * 4, 0)
        rest = within(row, cols, rows, end, NR, 4)
        tl.store(tile(scales, row, cols, row_stride, col_stride, NR, 4), tl.zeros((NR, 4), tl.float32), mask=rest)
    elif PADDED == 0:
        end = tl.where(row + NR >= rows, tl.cdiv(rows, 4) * 4, 0)
        rest = within(rows, col, end, cols, 4, NC)
        tl.store(tile(scales, rows, col, row_stride, col_stride, 4, NC), tl.zeros((4, NC), tl.float32), mask=rest)


@triton.jit
def _store_swizzled(
    scale, tiles, row, col, rows, cols,
    TRANSPOSED: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Write one-byte scales, int32 [row blocks, 1, column blocks, 1], into swizzled.py's tiles.

    A scale is repeated if its block is larger than what shares a scale there.  Scales beyond the edges are 0: programs
    reach as far as tiles do, or further along the reduction dim.
    """
    DOWN: tl.constexpr = F.block_rows // (F.each if TRANSPOSED else 1)
    ALONG: tl.constexpr = F.block_cols // (1 if TRANSPOSED else F.each)
    NR: tl.constexpr = ROWS // F.block_rows
    NC: tl.constexpr = COLS // F.block_cols
    scale = tl.reshape(tl.broadcast_to(scale, (NR, DOWN, NC, ALONG)), (NR * DOWN, NC * ALONG))
    if TRANSPOSED:
        scale, row, col, rows, cols = tl.trans(scale), col, row, cols, rows
        outer = row + tl.arange(0, NC * ALONG)[:, None]
        k = col // F.each + tl.arange(0, NR * DOWN)[None, :]
    else:
        outer = row + tl.arange(0, NR * DOWN)[:, None]
        k = col // F.each + tl.arange(0, NC * ALONG)[None, :]
    scale = tl.where((outer < rows) & (k < tl.cdiv(cols, F.each)), scale, 0)
    across = tl.cdiv(cols, 4 * F.each)
    tile_of = (outer // _TILE_ROWS).to(tl.int64) * across + k // 4
    at = tile_of * _TILE_BYTES + outer % 32 * 16 + outer % _TILE_ROWS // 32 * 4 + k % 4
    tl.store(tiles + at, scale.to(tl.uint8), mask=k < 4 * across)
# fmt: on
