# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""The Triton kernels: casts, dequantisation, the largest magnitude, the Hadamard transform, and SwiGLU's backward.

A cast writes one form or two from one read.  triton_steps.py has the arithmetic.  triton_cast.py launches the kernels
and says what has been run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.kernels.triton_four_over_six import four_over_six
from megatron_snip.quant.kernels.triton_steps import (
    INFINITY,
    MAGNITUDE,
    bits_of,
    block_amax,
    block_scales,
    exponential,
    float_of,
    given_scales,
    magnitudes,
    no_sizes,
    now_of,
    read,
    rounded,
    silu,
    sizes_of,
    swiglu,
    tensor_scales,
    tile,
    to_bfloat16,
    within,
)
from megatron_snip.quant.kernels.triton_stores import codes_of, count_saturated, store_codes, store_scales


@triton.jit
def _dealt(blocks, NR: tl.constexpr, NC: tl.constexpr):
    """The same [NR, 1, NC, 1] in another layout, so that a block's threads need not compute it themselves."""
    return tl.reshape(tl.gather(tl.reshape(blocks, (NR * NC,)), tl.arange(0, NR * NC), 0), (NR, 1, NC, 1))


@triton.jit
def _scale_blocks(
    x, amax, has_nan, row, col, rows, cols, tensor, place, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Compute and store the scales of the blocks of [ROWS, COLS] elements from (row, col); return encode and decode.

    x: the elements if the rule needs them, or None.  amax: int32 bits [row blocks, 1, column blocks, 1] of finite
    elements.  has_nan: of that shape.  tensor: from ``tensor_scales``.
    """
    # Every thread with an element of a column would divide for it.  Dealt out, each thread divides for a few columns.
    DEALT: tl.constexpr = F.block_rows > F.block_cols and (
        F.scale == "e4m3" or F.scale == "fp32" or F.scale == "fp32_pow2"
    )
    if DEALT:
        amax = _dealt(amax, ROWS // F.block_rows, COLS // F.block_cols)
    if F.scale == "e4m3_4over6":
        encode, scale, decode = four_over_six(x, amax, tensor, F, ROWS, COLS)
    else:
        encode, scale, decode = block_scales(amax, tensor, F)
    if F.output != "values":
        store_scales(scale, has_nan, place, row, col, rows, cols, F, ROWS, COLS)
    if DEALT:
        encode = _dealt(encode, ROWS // F.block_rows, COLS // F.block_cols)
        decode = _dealt(decode, ROWS // F.block_rows, COLS // F.block_cols)
    return encode, decode


@triton.jit
def _cast_chunk(
    x,
    encode,
    decode,
    broken,
    row,
    col,
    rows,
    cols,
    place,
    words,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HOW: tl.constexpr,
):
    """Quantise x float32 [ROWS, COLS] at (row, col) of [rows, cols] and write it.

    encode, decode: float32 [row blocks, 1, column blocks, 1], one block for all rows if blocks are taller.
    broken: whether there may be NaN or infinities.  place: pointers to the codes or values, the scales, the count of
    saturated elements and the tensor's scale (or None), strides of the scales, and all of these for a twin; with
    row-wise scales, decode and encode of rows replace both scales.  words: as in ``increments_of``.
    """
    out, _, saturated, _, _, _, _ = place
    NR: tl.constexpr = ROWS // min(F.block_rows, ROWS)
    NC: tl.constexpr = COLS // F.block_cols
    SHAPE: tl.constexpr = (NR, ROWS // NR, NC, F.block_cols)
    y = tl.reshape(tl.reshape(x, SHAPE) * encode, (ROWS, COLS))
    size = tl.abs(y)
    if not F.clamps:
        size = tl.minimum(size, F.largest, propagate_nan=tl.PropagateNan.ALL)
    q = rounded(size, row, col, words, F, ROWS, COLS)
    negative = bits_of(y) & -2147483648
    inside = None if HOW.even else within(row, col, rows, cols, ROWS, COLS)
    if F.output == "values":
        q = float_of(bits_of(q) | negative)
        values = tl.reshape(tl.reshape(q, SHAPE) * decode, (ROWS, COLS))
        tl.store(tile(out, row, col, cols, 1, ROWS, COLS), values.to(out.dtype.element_ty), mask=inside)
    else:
        codes = codes_of(y, q, size, negative, F)
        store_codes(codes, inside, place, row, col, rows, cols, F, ROWS, COLS)
        if broken:  # a second store, because a select would be computed for every chunk
            tl.debug_barrier()
            wrong = y != y if HOW.even else inside & (y != y)
            if F.packed:  # codes are stored in pairs; -6 has all bits set, like NaN
                codes = tl.where(wrong, -6.0 if F.hardware == "e2m1" else 15, codes).to(codes.dtype)
                store_codes(codes, inside, place, row, col, rows, cols, F, ROWS, COLS)
            else:
                codes = tl.full((ROWS, COLS), 0xFF, tl.uint8)
                store_codes(codes, wrong, place, row, col, rows, cols, F, ROWS, COLS)
        if saturated is None:
            pass
        elif F.saturates or broken:
            count_saturated(y, saturated, F.saturation)


@triton.jit
def _cast_short(
    x,
    row,
    col,
    rows,
    cols,
    tensor,
    place,
    words,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HOW: tl.constexpr,
):
    """Cast a chunk x [ROWS, COLS] to a form whose blocks are no taller; arguments as in ``_cast_chunk``."""
    amax = block_amax(magnitudes(x, False), F, ROWS, COLS)
    broken, has_nan = tl.max(amax) >= INFINITY, amax > INFINITY
    if broken:
        amax = block_amax(magnitudes(x, True), F, ROWS, COLS)
    if F.by_rows:
        encode, decode = given_scales(place[3], place[1], row, col, rows, cols, F, ROWS, COLS)
    else:
        encode, decode = _scale_blocks(x, amax, has_nan, row, col, rows, cols, tensor, place, F, ROWS, COLS)
    _cast_chunk(x, encode, decode, broken, row, col, rows, cols, place, words, F, ROWS, COLS, HOW)


@triton.jit
def _tall_scales(
    sizes,
    source,
    row,
    col,
    rows,
    cols,
    tensor,
    place,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CHUNK: tl.constexpr,
    HOW: tl.constexpr,
):
    """``_scale_blocks`` for a form whose blocks are ROWS high, and whether there are NaN or infinities.

    sizes: the largest ``sizes_of`` of all chunks of x [rows, cols], which were just read and are in the cache.
    """
    amax = block_amax(sizes, F, HOW.kept, COLS) if F.block_cols == 1 else sizes
    broken, has_nan = tl.max(amax) >= INFINITY, amax > INFINITY
    if broken:
        amax = tl.zeros_like(amax)
        for part in range(0, ROWS, CHUNK):
            chunk = read(source, row + part, col, rows, cols, CHUNK, COLS, HOW)
            amax = tl.maximum(amax, block_amax(magnitudes(chunk, True), F, CHUNK, COLS))
    encode, decode = _scale_blocks(None, amax, has_nan, row, col, rows, cols, tensor, place, F, ROWS, COLS)
    return encode, decode, broken


@triton.jit
def _store_whole(whole, tensor, pid, F: tl.constexpr):
    """Write the tensor's scale in the first program, unless ``whole`` is None or encodes rows."""
    if whole is not None and not F.by_rows:
        tl.store(whole, tensor[1], mask=pid == 0)


# fmt: off
@triton.jit(do_not_specialize=[
    "key0_a", "key1_a", "group0_a", "iteration_a", "row0_a", "pieces_a",
    "key0_b", "key1_b", "group0_b", "iteration_b", "row0_b", "pieces_b",
])
def cast_kernel(
    x, x_stride, up, up_stride, rows, cols, tensor_amax,
    out_a, scales_a, saturated_a, whole_a, scale_row_a, scale_col_a,
    key0_a, key1_a, group0_a, iteration_a, row0_a, pieces_a,
    out_b, scales_b, saturated_b, whole_b, scale_row_b, scale_col_b,
    key0_b, key1_b, group0_b, iteration_b, row0_b, pieces_b,
    A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, HOW: tl.constexpr,
):
    """Cast a tile [ROWS, COLS] of x [rows, cols], bf16 or float32 with its own row stride, into A and B (or None).

    up: of x's shape, with its own row stride, or None.  If given, silu(x) * up is cast, both bf16.
    The tile goes through registers in chunks of CHUNK rows.  Blocks are at most CHUNK or exactly ROWS high.  Blocks of
    ROWS need two passes: one finds their amax, the other casts.
    iteration, row0: pointers to an int64 each.  pieces: to int64 [4], rounding.py's Rows; None if consecutive.
    """
    source = (x, x_stride, up, up_stride)
    place_b = (out_b, scales_b, saturated_b, whole_b, scale_row_b, scale_col_b, None)
    place_a = (out_a, scales_a, saturated_a, whole_a, scale_row_a, scale_col_a, place_b)
    words_a = (key0_a, key1_a, group0_a, now_of(iteration_a, row0_a, A), pieces_a)  # for ``increments_of``
    words_b = words_a if HOW.alike else (key0_b, key1_b, group0_b, now_of(iteration_b, row0_b, B), pieces_b)
    tiles = tl.cdiv(cols, COLS)
    pid = tl.program_id(0)
    row, col = pid // tiles * ROWS, pid % tiles * COLS
    tensor_a, tensor_b = tensor_scales(tensor_amax, A), tensor_scales(tensor_amax, A if B is None else B)
    _store_whole(whole_a, tensor_a, pid, A)
    _store_whole(whole_b, tensor_b, pid, A if B is None else B)
    TALL_A: tl.constexpr = A.block_rows > CHUNK
    TALL_B: tl.constexpr = B is not None and B.block_rows > CHUNK
    if TALL_A:
        sizes_a = no_sizes(A, COLS, HOW)
    if TALL_B:
        sizes_b = no_sizes(B, COLS, HOW)
    if TALL_A or TALL_B:
        for part in range(0, ROWS, CHUNK):
            chunk = read(source, row + part, col, rows, cols, CHUNK, COLS, HOW)
            if TALL_A:
                sizes_a = tl.maximum(sizes_a, sizes_of(chunk, A, CHUNK, COLS, HOW))
            if TALL_B:
                sizes_b = tl.maximum(sizes_b, sizes_of(chunk, B, CHUNK, COLS, HOW))
    if TALL_A:
        encode_a, decode_a, broken_a = _tall_scales(
            sizes_a, source, row, col, rows, cols, tensor_a, place_a, A, ROWS, COLS, CHUNK, HOW
        )
    if TALL_B:
        encode_b, decode_b, broken_b = _tall_scales(
            sizes_b, source, row, col, rows, cols, tensor_b, place_b, B, ROWS, COLS, CHUNK, HOW
        )
    for part in range(0, ROWS, CHUNK):
        at = row + part
        chunk = read(source, at, col, rows, cols, CHUNK, COLS, HOW)
        if TALL_A:
            _cast_chunk(chunk, encode_a, decode_a, broken_a, at, col, rows, cols, place_a, words_a, A, CHUNK, COLS, HOW)
        else:
            _cast_short(chunk, at, col, rows, cols, tensor_a, place_a, words_a, A, CHUNK, COLS, HOW)
        if TALL_B:
            _cast_chunk(chunk, encode_b, decode_b, broken_b, at, col, rows, cols, place_b, words_b, B, CHUNK, COLS, HOW)
        elif B is not None:
            _cast_short(chunk, at, col, rows, cols, tensor_b, place_b, words_b, B, CHUNK, COLS, HOW)


@triton.jit
def dequantize_kernel(
    codes, code_row, code_col, scales, scale_row, scale_col, tensor_scale, out, rows, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr, SIGN_CODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Write a tile [ROWS, COLS] of out [rows, cols]: codes, with any strides, times the scale of their block.

    tensor_scale: pointer to the float32 that multiplies all scales, or None.
    """
    NR: tl.constexpr = ROWS // BLOCK_ROWS
    NC: tl.constexpr = COLS // BLOCK_COLS
    tiles = tl.cdiv(cols, COLS)
    pid = tl.program_id(0)
    row, col = pid // tiles * ROWS, pid % tiles * COLS
    inside = within(row, col, rows, cols, ROWS, COLS)
    code = tl.load(tile(codes, row, col, code_row, code_col, ROWS, COLS), mask=inside, other=0).to(tl.int32)
    magnitude = code & (SIGN_CODE - 1)
    # Read as float32 bits, the code's fields are 2**(BIAS - 127) times its value, even if it is subnormal.
    size = float_of(magnitude << (23 - MANTISSA)) * float_of(tl.full((), (254 - BIAS) << 23, tl.int32))
    q = float_of(bits_of(size) | tl.where((code & SIGN_CODE) != 0, -2147483648, 0))  # -size would lose the sign of 0
    q = tl.where((magnitude > MAX_CODE) | (code >= 2 * SIGN_CODE), float("nan"), q)
    block_row, block_col = row // BLOCK_ROWS, col // BLOCK_COLS
    exists = within(block_row, block_col, tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(cols, BLOCK_COLS), NR, NC)
    scale = tl.load(tile(scales, block_row, block_col, scale_row, scale_col, NR, NC), mask=exists, other=0.0)
    if tensor_scale is not None:
        scale = scale * tl.load(tensor_scale)
    scale = tl.reshape(scale, (NR, 1, NC, 1))
    values = tl.reshape(tl.reshape(q, (NR, BLOCK_ROWS, NC, BLOCK_COLS)) * scale, (ROWS, COLS))
    tl.store(tile(out, row, col, cols, 1, ROWS, COLS), values.to(out.dtype.element_ty), mask=inside)
# fmt: on


@triton.jit
def _store_largest(out, state, sizes):
    """Merge a program's largest magnitude, of int32 [...], into state; the last program writes the result to out."""
    tl.atomic_max(state, tl.max(sizes))
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(out, float_of(tl.atomic_xchg(state, 0)))
        tl.atomic_xchg(state + 1, 0)


@triton.jit
def amax_kernel(x, up, out, state, count, SIZE: tl.constexpr, ROUNDED: tl.constexpr):
    """Write the largest finite magnitude of x [count] to out.  A program reads SIZE elements.

    ROUNDED: x is rounded to bfloat16 first.  up: [count] or None; if given, silu(x) * up is read, both bf16.  state:
    int32 [2], 0 before and after: the bits of the largest so far, and the number of programs that have added theirs.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, mask=at < count, other=0.0)
    values = (values.to(tl.bfloat16) if ROUNDED else values).to(tl.float32)
    if up is not None:
        values = swiglu(values, tl.load(up + at, mask=at < count, other=0.0).to(tl.float32))
    sizes = bits_of(values) & MAGNITUDE
    _store_largest(out, state, tl.where(sizes < INFINITY, sizes, 0))


@triton.jit
def _sums_and_differences(y, HALF: tl.constexpr):
    """Replace each pair of the 16 tensors y that is ``HALF`` apart with its sum and its difference."""
    out = ()
    for place in tl.static_range(16):
        if place & HALF == 0:
            out += (y[place] + y[place + HALF],)
        else:
            out += (y[place - HALF] - y[place],)
    return out


@triton.jit
def _sums_and_differences_of_rows(y, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Replace each pair of rows of y [ROWS, COLS] that is ``HALF`` apart with its sum and its difference."""
    pairs = tl.permute(tl.reshape(y, (ROWS // HALF // 2, 2, HALF, COLS)), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (ROWS, COLS))


# fmt: off
@triton.jit
def hadamard_kernel(
    x, x_row, x_col, out, out_row, out_col, largest, state, rows, cols,
    SIGNS: tl.constexpr, PARTS: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write hadamard.py's transform of a tile [16 ROWS, COLS] of x [rows, cols] along its rows to out.

    The largest finite magnitude of all of out goes to ``largest``; state is as in ``amax_kernel``.
    x and out have strides of their own.  PARTS: how many times 16 elements a group has.  SIGNS: bit i is set if element
    i of a group changes its sign.  FACTOR: what sums are multiplied by.  EVEN: tiles cover x exactly.
    Elements i, i + 16, ... of groups are the rows of a tensor [ROWS, COLS].  A thread has the same part of all 16
    tensors, so threads exchange nothing for groups of 16.
    """
    # fmt: on
    tiles = tl.cdiv(cols, COLS)
    pid = tl.program_id(0)
    row, col = pid // tiles * ROWS * 16, pid % tiles * COLS
    inside = None if EVEN else within(row // 16, col, rows // 16, cols, ROWS, COLS)
    signs = tl.full((ROWS, 1), SIGNS & 0xFFFF, tl.int32)  # of the 16 elements of each row's part
    for part in tl.static_range(1, PARTS):
        signs = tl.where(tl.arange(0, ROWS)[:, None] % PARTS == part, SIGNS >> 16 * part & 0xFFFF, signs)
    y = ()
    for place in tl.static_range(16):
        at = tile(x, row + place, col, x_row, x_col, ROWS, COLS, 16)
        some = tl.load(at, mask=inside, other=None if EVEN else 0.0).to(tl.float32)
        y += (float_of(bits_of(some) ^ (signs >> place << 31)),)  # -some would lose the sign of 0
    y = _sums_and_differences(y, 1)
    y = _sums_and_differences(y, 2)
    y = _sums_and_differences(y, 4)
    y = _sums_and_differences(y, 8)
    sizes = tl.zeros((ROWS, COLS), tl.int32)
    for place in tl.static_range(16):
        some = y[place]
        if PARTS > 1:
            some = _sums_and_differences_of_rows(some, 1, ROWS, COLS)
        if PARTS > 2:
            some = _sums_and_differences_of_rows(some, 2, ROWS, COLS)
            some = _sums_and_differences_of_rows(some, 4, ROWS, COLS)
        some = (some * FACTOR).to(out.dtype.element_ty)
        tl.store(tile(out, row + place, col, out_row, out_col, ROWS, COLS, 16), some, mask=inside)
        size = bits_of(some.to(tl.float32)) & MAGNITUDE
        sizes = tl.maximum(sizes, tl.where(size < INFINITY, size, 0))
    _store_largest(largest, state, sizes)


@triton.jit
def swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, count, SIZE: tl.constexpr):
    """Gradients of SIZE elements of gate and up [count] from the gradient of silu(gate) * up, all bf16.

    It rounds where torch's operators round, and fuses where torch's kernel does: in 1 + x (1 - s).
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.div_rn(tl.full((SIZE,), 1.0, tl.float32), 1.0 + exponential(-x))
    of_gate = to_bfloat16(g * other) * s * tl.fma(x, 1.0 - s, tl.full((SIZE,), 1.0, tl.float32))
    tl.store(grad_gate + at, of_gate.to(tl.bfloat16), mask=inside)
    tl.store(grad_up + at, (g * silu(x)).to(tl.bfloat16), mask=inside)
