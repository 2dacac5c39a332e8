# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""Chooses between a block's two scales under "e4m3_4over6", for triton_kernels.py: scales.py's ``four_over_six``.

Sums keep the specification's order.  For that, a tensor is split into its columns, which moves nothing where a thread
has whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.kernels.triton_steps import divide, float_of, magnitudes, round_nearest


@triton.jit
def _split(parts, COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The even and the odd columns of COUNT tensors [A, B, C]: 2 COUNT tensors [A, B, C / 2]."""
    out = ()
    for part in tl.static_range(COUNT):
        out += tl.split(tl.reshape(parts[part], (A, B, C // 2, 2)))
    return out


@triton.jit
def _in_order(x, A: tl.constexpr, B: tl.constexpr):
    """Add 16 columns one after another: [A, B, 16] -> [A, B, 1]."""
    parts = _split((x,), 1, A, B, 16)
    parts = _split(parts, 2, A, B, 8)
    parts = _split(parts, 4, A, B, 4)
    parts = _split(parts, 8, A, B, 2)
    total = parts[0]
    for column in tl.static_range(1, 16):  # parts are in bit-reversed order of their columns
        total += parts[(column & 1) * 8 + (column & 2) * 2 + (column & 4) // 2 + column // 8]
    return total


@triton.jit
def _half(x, A: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr):
    """The first half of the rows plus the second: [A, ROWS, B] -> [A, ROWS / 2, B]."""
    one, other = tl.split(tl.permute(tl.reshape(x, (A, 2, ROWS // 2, B)), (0, 2, 3, 1)))
    return one + other


@triton.jit
def _sum_of_blocks(x, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of each block of x [ROWS, COLS]: [row blocks, 1, column blocks, 1]."""
    NR: tl.constexpr = ROWS // F.block_rows
    NC: tl.constexpr = COLS // F.block_cols
    if F.block_cols == 1:
        total = _in_order(tl.permute(tl.reshape(x, (NR, 16, NC)), (0, 2, 1)), NR, NC)
    else:
        total = tl.reshape(_in_order(tl.reshape(x, (ROWS, NC, 16)), ROWS, NC), (NR, F.block_rows, NC))
        if F.block_rows == 16:
            total = _half(_half(_half(_half(total, NR, 16, NC), NR, 8, NC), NR, 4, NC), NR, 2, NC)
    return tl.reshape(total, (NR, 1, NC, 1))


@triton.jit
def _candidate(sizes, units, wanted, tensor_scale, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Encode, scale and squared error of each block, [row blocks, 1, column blocks, 1], for the scale ``wanted``."""
    scale = round_nearest(tl.minimum(wanted, 448.0), 3, -6)
    encode = divide(tl.full(scale.shape, 1.0, tl.float32), scale * tensor_scale)
    q = round_nearest(tl.minimum(sizes * encode, F.largest), F.mantissa, F.emin)
    error = tl.reshape(q * scale - units, (ROWS, COLS))
    return encode, scale, _sum_of_blocks(error * error, F, ROWS, COLS)


@triton.jit
def four_over_six(x, amax, tensor, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``block_scales`` of triton_steps.py for blocks of x [ROWS, COLS] whose sides are 1 or 16."""
    tensor_encode, tensor_scale = tensor
    NR: tl.constexpr = ROWS // F.block_rows
    NC: tl.constexpr = COLS // F.block_cols
    sizes = tl.reshape(float_of(magnitudes(x, True)), (NR, F.block_rows, NC, F.block_cols))
    units = sizes * tensor_encode
    wanted = tl.div_rn(float_of(amax), tl.full(amax.shape, F.largest, tl.float32)) * tensor_encode
    encode, scale, error = _candidate(sizes, units, wanted, tensor_scale, F, ROWS, COLS)
    other, other_scale, other_error = _candidate(sizes, units, wanted * 1.5, tensor_scale, F, ROWS, COLS)
    take = other_error < error
    scale = tl.where(take, other_scale, scale)
    return tl.where(take, other, encode), scale, scale * tensor_scale
