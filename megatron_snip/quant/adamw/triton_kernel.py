# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""A step of AdamW on BF16 weights as a Triton kernel: step.py's operations in the same order, with the same bits.

``two_sum`` rounds only the sum, as cpu_adamw.h explains.  The kernel is launched without fused multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.kernels.triton_steps import _philox as philox
from megatron_snip.quant.kernels.triton_steps import bits_of, float_of, to_bfloat16


@triton.jit
def two_sum(a, b):
    """a + b of BF16 numbers [...], all float32, as (rounded sum, what rounding lost)."""
    x = to_bfloat16(a + b)
    t = x - a
    return x, (a - (x - t)) + (b - t)


@triton.jit
def grow(high, low, a):
    """high + low + a [...] as an expansion."""
    s, e = two_sum(high, a)
    return two_sum(s, to_bfloat16(low + e))


@triton.jit
def decayed(high, low, c, c_low, a):
    """(high + low) (c + c_low) + a [...] as an expansion."""
    p = high * c
    x = to_bfloat16(p)
    s, f = two_sum(x, a)
    return two_sum(s, to_bfloat16(f + ((p - x) + (high * c_low + low * c))))


@triton.jit
def draws_of(start, cols, row0, col0, iteration, k0, k1, SIZE: tl.constexpr):
    """The 16-bit draws of rounding.py for SIZE elements, from ``start`` on, of a matrix of ``cols``: int32 [SIZE]."""
    inside = (start % cols).to(tl.int32) + tl.arange(0, SIZE)  # 32-bit, to keep the division cheap
    row = ((start // cols) + row0 + inside // cols).to(tl.uint64)
    col = (inside % cols).to(tl.int64) + col0
    now = tl.zeros_like(row) + iteration
    w0, w1, w2, w3 = philox(
        (col >> 3).to(tl.uint32), row.to(tl.uint32), (row >> 32).to(tl.uint32), now.to(tl.uint32),
        k0.to(tl.uint32), k1.to(tl.uint32),
    )  # fmt: skip
    place = (col >> 1) & 3
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return tl.where((col & 1) == 0, word & 0xFFFF, word >> 16).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["size", "cols", "row0", "col0", "iteration", "k0", "k1"])
def adamw_kernel(
    weight, m, v, weight_low, v_low, grad, size, cols, row0, col0, iteration, k0, k1,
    clip, beta1, rest1, beta2, rest2, beta2_high, beta2_low, rate, correction, eps, decay,
    STOCHASTIC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Update one program's part of a parameter of ``size`` elements; weight_low and v_low may be None."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = start + tl.arange(0, SIZE)
    there = at < size
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32) * clip
    old_m = tl.load(m + at, mask=there, other=0.0).to(tl.float32)
    old_v = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
    new_m = to_bfloat16(old_m * beta1 + g * rest1)
    square = (g * g) * rest2
    if v_low is None:
        new_v = to_bfloat16(old_v * beta2 + square)
    else:
        old_low = tl.load(v_low + at, mask=there, other=0.0).to(tl.float32)
        new_v, new_low = decayed(old_v, old_low, beta2_high, beta2_low, to_bfloat16(square))
        tl.store(v_low + at, new_low.to(tl.bfloat16), mask=there)
    tl.store(m + at, new_m.to(tl.bfloat16), mask=there)
    tl.store(v + at, new_v.to(tl.bfloat16), mask=there)
    u = to_bfloat16(tl.div_rn(new_m, tl.sqrt_rn(new_v) * correction + eps) * rate - w * decay)
    if weight_low is not None:
        old_low = tl.load(weight_low + at, mask=there, other=0.0).to(tl.float32)
        w, new_low = grow(w, old_low, u)
        tl.store(weight_low + at, new_low.to(tl.bfloat16), mask=there)
    elif STOCHASTIC:
        bits = bits_of(w + u)
        moved = bits + draws_of(start, cols, row0, col0, iteration, k0, k1, SIZE)
        w = float_of(tl.where((bits & 0x7F800000) == 0x7F800000, bits, moved) & -0x10000)
    else:
        w = w + u
    tl.store(weight + at, w.to(tl.bfloat16), mask=there)
