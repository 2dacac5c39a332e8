# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""Triton kernels that pack a weight's codes before a gather, and lay them out after it (casts/codes.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.kernels.triton_steps import float_of, tile, within

NAN_CODE = tl.constexpr(0xFF)
NAN_BITS = tl.constexpr(0x7FC00000)


# fmt: off
@triton.jit
def send_kernel(
    codes, scales, out, out_scales, rows, cols, half, scale_rows, scale_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Write a tile [ROWS, COLS] of codes [rows, cols] as pairs [rows, half], and its scales: NaN if a block has one."""
    # fmt: on
    NR: tl.constexpr = ROWS // BLOCK_ROWS
    NC: tl.constexpr = COLS // BLOCK_COLS
    tiles = tl.cdiv(cols, COLS)
    pid = tl.program_id(0)
    row, col = pid // tiles * ROWS, pid % tiles * COLS
    inside = within(row, col, rows, cols, ROWS, COLS)
    some = tl.load(tile(codes, row, col, cols, 1, ROWS, COLS), mask=inside, other=0)
    first, second = tl.split(tl.reshape(some, (ROWS, COLS // 2, 2)))
    pairs = within(row, col // 2, rows, half, ROWS, COLS // 2)
    tl.store(tile(out, row, col // 2, half, 1, ROWS, COLS // 2), first & 15 | second << 4, mask=pairs)
    broken = tl.reshape((some == NAN_CODE).to(tl.int32), (NR, BLOCK_ROWS, NC, BLOCK_COLS))
    broken = tl.max(tl.max(broken, axis=3), axis=1)
    row, col = row // BLOCK_ROWS, col // BLOCK_COLS
    inside = within(row, col, scale_rows, scale_cols, NR, NC)
    scale = tl.load(tile(scales, row, col, scale_cols, 1, NR, NC), mask=inside, other=0.0)
    nan = float_of(tl.full((NR, NC), NAN_BITS, tl.int32))
    tl.store(tile(out_scales, row, col, scale_cols, 1, NR, NC), tl.where(broken > 0, nan, scale), mask=inside)


# fmt: off
@triton.jit
def lay_out_kernel(
    data, table, out, out_row, out_col, rows, cols,
    PAIRS: tl.constexpr, RECODES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Write a tile [ROWS, COLS] of codes [rows, cols], which travelled as pairs or bytes, to out, of any strides.

    table: code -> the code to write, [256], if it RECODES.
    """
    # fmt: on
    tiles = tl.cdiv(cols, COLS)
    pid = tl.program_id(0)
    row, col = pid // tiles * ROWS, pid % tiles * COLS
    if PAIRS:
        pairs = within(row, col // 2, rows, cols // 2, ROWS, COLS // 2)
        both = tl.load(tile(data, row, col // 2, cols // 2, 1, ROWS, COLS // 2), mask=pairs, other=0)
        codes = tl.interleave(both & 15, both >> 4)
    else:
        inside = within(row, col, rows, cols, ROWS, COLS)
        codes = tl.load(tile(data, row, col, cols, 1, ROWS, COLS), mask=inside, other=0)
    if RECODES:
        codes = tl.load(table + codes.to(tl.int32))
    inside = within(row, col, rows, cols, ROWS, COLS)
    tl.store(tile(out, row, col, out_row, out_col, ROWS, COLS), codes, mask=inside)
