# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The steps of a cast on tiles in registers, for triton_kernels.py: reading x, grids, scales and random bits.

They give the bits of grid.py, scales.py and rounding.py in quant/casts.  Three rules ensure this: divisions are
``tl.div_rn`` (``/`` is approximate on a GPU), products and sums are not fused (kernels are launched with
``enable_fp_fusion=False``), and magnitudes are compared by their bit patterns, which also order NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


class FormSpec(NamedTuple):
    """A cast.Form as the plain constants that a kernel is compiled for.

    block_rows, block_cols: powers of two.  by_rows: blocks are parts of whole rows, whose scales are inputs.
    mantissa .. sign_code: of the element.  code_*: of the element in which codes are written, which is the carrier for
    operands.  saturates: as in Format.  sixth: 1 / largest in float32.  carry: what makes a mantissa above largest's
    carry into the exponent, for scales that are rounded up, else 0.
    hardware: "e4m3" or "e5m2" if the device has an instruction that converts to codes, "e2m1" if it has one that
    converts to pairs of codes, else "".
    clamps: the instruction also clamps to the largest value.  direct: it also rounds.  transposed: codes are stored
    column-major.  twins: codes and scales are stored along the other dim, too.  packed, each: as in Form.
    phase: col0 & 7 of the random bits, -1 to round to nearest.
    """

    block_rows: int
    block_cols: int
    by_rows: bool
    scale: str
    mantissa: int
    emin: int
    emax: int
    largest: float
    saturation: float
    saturates: bool
    sixth: float
    carry: int
    output: str
    transposed: bool
    twins: bool
    packed: bool
    each: int
    code_mantissa: int
    code_emin: int
    sign_code: int
    hardware: str
    clamps: bool
    direct: bool
    phase: int


class How(NamedTuple):
    """How x is read.

    even: tiles cover it exactly.  rounded: to bfloat16 first.  kept: the number of rows that a program's threads read
    at once, 16 elements each; one thread has every kept-th row of its columns in a chunk.  alike: both forms have the
    same random bits.
    """

    even: bool
    rounded: bool
    kept: int
    alike: bool


MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # of float32, as are the next two; 23 below is its mantissa bits, 127 its bias
INFINITY = tl.constexpr(0x7F800000)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
FLOAT32_TINY = tl.constexpr(1.1754943508222875e-38)
_MULTIPLIER0, _MULTIPLIER1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)  # of Philox, as are the next two
_WEYL0, _WEYL1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def bits_of(x):
    """The bit pattern of float32 [...]: int32 [...]."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 [...] of a bit pattern int32 [...]."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile(start, row, col, row_stride, col_stride, ROWS: tl.constexpr, COLS: tl.constexpr, EVERY: tl.constexpr = 1):
    """Pointers [ROWS, COLS] into a matrix at ``start``, from (row, col), of every EVERY-th row."""
    corner = start + row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    return corner + tl.arange(0, ROWS)[:, None] * EVERY * row_stride + tl.arange(0, COLS)[None, :] * col_stride


@triton.jit
def within(row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements from (row, col) on are inside [rows, cols]: bool [ROWS, COLS]."""
    return (tl.arange(0, ROWS) < rows - row)[:, None] & (tl.arange(0, COLS) < cols - col)[None, :]


@triton.jit
def to_bfloat16(x):
    """float32 [...] rounded to bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def exponential(x):
    """exp(x) of float32 [...] as torch's kernels compute it; ``tl.exp`` is less exact."""
    return libdevice.exp(x)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) of bfloat16 numbers, rounded to bfloat16: float32 [...]."""
    return to_bfloat16(tl.div_rn(x, 1.0 + exponential(-x)))


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up of bfloat16 numbers, each rounded to bfloat16: float32 [...]."""
    return to_bfloat16(silu(gate) * up)


@triton.jit
def read(source, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, HOW: tl.constexpr):
    """Read a chunk [ROWS, COLS] of what is cast, from (row, col): float32, 0 outside.

    source: x [rows, cols] and its row stride, and the same for ``up``, which multiplies silu(x), or None.
    """
    x, x_stride, up, up_stride = source
    mask = None if HOW.even else within(row, col, rows, cols, ROWS, COLS)
    chunk = tl.load(tile(x, row, col, x_stride, 1, ROWS, COLS), mask=mask, other=None if HOW.even else 0.0)
    if HOW.rounded:
        chunk = chunk.to(tl.bfloat16)
    chunk = chunk.to(tl.float32)
    if up is not None:
        factor = tl.load(tile(up, row, col, up_stride, 1, ROWS, COLS), mask=mask, other=None if HOW.even else 0.0)
        chunk = swiglu(chunk, factor.to(tl.float32))
    return chunk


@triton.jit
def divide(numerator, denominator):
    """A float32 division that rounds once, clamped to the largest finite value: [...] and [...] -> [...]."""
    return tl.minimum(tl.div_rn(numerator, denominator), FLOAT32_MAX)


@triton.jit
def _last_bit(size, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """The bits of the power of two whose last bit is worth the grid step at |x|: float32 [...] -> int32 [...]."""
    SHIFT: tl.constexpr = (23 - MANTISSA) << 23
    return tl.maximum((bits_of(size) & INFINITY) + SHIFT, ((EMIN + 127) << 23) + SHIFT)  # one instruction for both


@triton.jit
def round_nearest(size, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Round |x|, at most the element's largest, to its grid, ties to even: float32 [...]; NaN stays."""
    c = float_of(_last_bit(size, MANTISSA, EMIN))
    return (size + c) - c


@triton.jit
def encode_nearest(size, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Codes of |x| rounded to nearest, without sign: float32 [...] -> int32 [...]; NaN gives anything."""
    c = _last_bit(size, MANTISSA, EMIN)
    steps = bits_of(size + float_of(c)) - c
    return steps + ((c - ((EMIN + 150 - MANTISSA) << 23)) >> (23 - MANTISSA))


@triton.jit
def round_stochastic(size, increments, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Round |x| to a neighbour on an element's grid, continued beyond its largest: float32 [...]; NaN gives anything.

    increments: from ``increments_of``.  |x| rounds up if adding them carries into a grid step; the bits below are
    dropped.  Below 2**EMIN all steps are equal, so 2**EMIN is added first, rounded up to keep |x| above its draw.
    """
    TINY: tl.constexpr = 2.0**EMIN
    low = tl.where(size < TINY, TINY, 0.0)
    bits = bits_of(libdevice.add_ru(size, low)) + increments
    return float_of(bits & -(1 << (23 - MANTISSA))) - low


@triton.jit
def magnitudes(x, FINITE: tl.constexpr):
    """The bits of |x|; with FINITE, NaN and infinities become 0: int32 [...]."""
    sizes = bits_of(x) & MAGNITUDE
    return tl.where(sizes < INFINITY, sizes, 0) if FINITE else sizes


@triton.jit
def block_amax(sizes, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The largest magnitude of each block of [ROWS, COLS], or of all rows if blocks are taller.

    int32 bits [row blocks, 1, column blocks, 1].
    """
    NR: tl.constexpr = ROWS // min(F.block_rows, ROWS)
    sizes = tl.reshape(sizes, (NR, ROWS // NR, COLS // F.block_cols, F.block_cols))
    if F.block_cols > 1:
        sizes = tl.max(sizes, axis=3, keep_dims=True)
    if F.block_rows > 1:
        sizes = tl.max(sizes, axis=1, keep_dims=True)
    return sizes


@triton.jit
def no_sizes(F: tl.constexpr, COLS: tl.constexpr, HOW: tl.constexpr):
    """Zeros in the shape of ``sizes_of``."""
    KEPT: tl.constexpr = HOW.kept
    if F.block_cols == 1:
        sizes = tl.zeros((KEPT, COLS), tl.int32)
    else:
        sizes = tl.zeros((1, 1, COLS // F.block_cols, 1), tl.int32)
    return sizes


@triton.jit
def sizes_of(x, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, HOW: tl.constexpr):
    """Largest magnitudes of a chunk x [ROWS, COLS] of taller blocks: int32 bits in the shape of ``block_amax``.

    For blocks of one column, it is [HOW.kept, COLS], since threads have not compared their rows yet.
    """
    KEPT: tl.constexpr = HOW.kept
    sizes = magnitudes(x, False)
    if F.block_cols == 1:
        sizes = tl.max(tl.reshape(sizes, (ROWS // KEPT, KEPT, COLS)), axis=0)
    else:
        sizes = block_amax(sizes, F, ROWS, COLS)
    return sizes


@triton.jit
def tensor_scales(amax, F: tl.constexpr):
    """Encode and decode of the whole tensor under E4M3 scales, else 1.  amax: pointer to its largest magnitude."""
    encode = tl.full((), 1.0, tl.float32)
    decode = encode
    if F.scale == "e4m3" or F.scale == "e4m3_4over6":
        LARGEST: tl.constexpr = 448.0 if F.scale == "e4m3" else 256.0
        encode = divide(tl.full((), LARGEST * F.largest, tl.float32), tl.load(amax))
        decode = divide(tl.full((), 1.0, tl.float32), encode)
    return encode, decode


@triton.jit
def block_scales(amax, tensor, F: tl.constexpr):
    """Encode, the scale to store, and decode of each block: int32 bits [...] -> float32 [...] x 3.

    tensor: from ``tensor_scales``.
    """
    if F.scale == "e8m0" or F.scale == "e8m0_ceil":
        exponent = tl.minimum(tl.maximum(((amax + F.carry) >> 23) - F.emax, 0), 253)
        # 2**-127 is subnormal
        scale = float_of(tl.where(exponent > 0, exponent << 23, 0x00400000))
        return float_of((254 - exponent) << 23), scale, scale
    elif F.scale == "e4m3":
        tensor_encode, tensor_scale = tensor
        scale = tl.minimum(float_of(amax) * (tensor_encode * F.sixth), 448.0)
        scale = round_nearest(scale, 3, -6)
        decode = scale * tensor_scale
        return divide(tl.full(decode.shape, 1.0, tl.float32), decode), scale, decode
    else:
        encode = divide(tl.full(amax.shape, F.largest, tl.float32), float_of(amax))
        if F.scale == "fp32_pow2":
            # the mask would turn a subnormal number, which only E2M5 reaches, into 0
            encode = float_of(bits_of(tl.maximum(encode, FLOAT32_TINY)) & INFINITY)
        scale = divide(tl.full(amax.shape, 1.0, tl.float32), encode)
        scale = tl.where(amax > 0, scale, 0.0)
        return encode, scale, scale


@triton.jit
def given_scales(encode, decode, row, col, rows, cols, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Encode and decode of [ROWS, COLS] elements at (row, col), from pointers to those of all rows or columns.

    float32 [ROWS, 1, 1, 1], or [1, 1, COLS, 1] if parts have one column.
    """
    if F.block_cols == 1:
        at = tl.reshape(col + tl.arange(0, COLS), (1, 1, COLS, 1))
        inside = at < cols
    else:
        at = tl.reshape(row + tl.arange(0, ROWS), (ROWS, 1, 1, 1))
        inside = at < rows
    return tl.load(encode + at, mask=inside, other=0.0), tl.load(decode + at, mask=inside, other=0.0)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox-4x32-7: uint32 counters, broadcast against each other, and scalar keys -> four uint32 [...]."""
    for _ in tl.static_range(7):
        product0, product1 = c0.to(tl.uint64) * _MULTIPLIER0, c2.to(tl.uint64) * _MULTIPLIER1  # one instruction each
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
        k0, k1 = k0 + _WEYL0, k1 + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def now_of(iteration, row0, F: tl.constexpr):
    """The halves of row0 and the iteration, read from memory; zeros for a form that rounds to nearest."""
    low = 0
    high = 0
    now = 0
    DRAWS: tl.constexpr = F is not None and F.phase >= 0
    if DRAWS:
        first = tl.load(row0)
        low, high, now = first.to(tl.int32), (first >> 32).to(tl.int32), tl.load(iteration).to(tl.int32)
    return low, high, now


@triton.jit
def increments_of(row, col, words, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What to add to the bits of |x| so that they carry into the next grid step if |x| rounds up: int32 [ROWS, COLS].

    |x| rounds up if draw + 1/2 is less than 2**16 times its distance from the lower grid value.  Draws are 16-bit
    integers, for the elements of x from (row, col) on.  words: the two words of the key, col0 >> 3 (F.phase is the
    rest) and ``now_of``, all as int32 bit patterns, and a pointer to rounding.py's Rows, or None.
    """
    key0, key1, group0, now, pieces = words
    row0_low, row0_high, iteration = now
    if pieces is not None:  # no tile crosses a piece
        number = row // tl.load(pieces)
        begin = tl.load(pieces + 2 + number % 2)
        row = number // 2 * tl.load(pieces + 1) + begin + row % tl.load(pieces)
    SHIFT: tl.constexpr = 7 - F.mantissa  # a draw's last bit is worth 2**-16 grid steps
    k0, k1, c3 = key0.to(tl.uint32), key1.to(tl.uint32), iteration.to(tl.uint32)
    start = row0_low.to(tl.uint32)
    low = start + (row + tl.arange(0, ROWS)[:, None]).to(tl.uint32)
    high = row0_high.to(tl.uint32) + (low < start).to(tl.uint32)
    if F.phase == 0:  # eight columns share a counter
        group = group0.to(tl.uint32) + (col // 8 + tl.arange(0, COLS // 8)[None, :]).to(tl.uint32)
        w0, w1, w2, w3 = _philox(group, low, high, c3, k0, k1)
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        bits = tl.reshape(tl.join(word << SHIFT, word >> (16 - SHIFT)), (ROWS, COLS))
    else:
        at = F.phase + col + tl.arange(0, COLS)[None, :]
        w0, w1, w2, w3 = _philox(group0.to(tl.uint32) + (at >> 3).to(tl.uint32), low, high, c3, k0, k1)
        place = (at >> 1) & 3
        word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
        bits = tl.where((at & 1) == 0, word << SHIFT, word >> (16 - SHIFT))
    # the draw's complement, and half a step less one, so that |x| at its draw does not carry
    DRAW: tl.constexpr = 0xFFFF << SHIFT
    return (((bits & DRAW) ^ DRAW) | ((1 << (SHIFT - 1)) - 1)).to(tl.int32, bitcast=True)


@triton.jit
def rounded(size, row, col, words, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """|x| at (row, col) rounded to the element's grid by the form's rule: float32 [ROWS, COLS].

    NaN stays if the output is values, else it may become anything.  words: as in ``increments_of``.
    """
    if F.phase >= 0:
        q = round_stochastic(size, increments_of(row, col, words, F, ROWS, COLS), F.mantissa, F.emin)
        if F.output == "values":
            q = tl.where(size != size, size, q)
    else:
        q = round_nearest(size, F.mantissa, F.emin)
    return q
