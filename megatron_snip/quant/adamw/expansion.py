"""Expansions: numbers held as an unevaluated sum of two BF16 numbers, ``high + low``, with |low| <= ulp(high) / 2.

    two_sum(a, b)    x = a + b, e = (a - (x - t)) + (b - t) with t = x - a     x + e = a + b exactly   Knuth, Moller
    two_prod(a, b)   p = a b in float32, x = p, e = p - x                      x + e = a b exactly
    grow((x, y), a)  s, e = two_sum(x, a), then two_sum(s, y + e)              adds a BF16 number
    decay((x, y), c, a)   (x + y) (c + c') + a, for a constant's expansion c + c' and a BF16 number a:
                     p, e = two_prod(x, c), s, f = two_sum(p, a), then two_sum(s, f + (e + (x c' + y c)))

A float32 operation on BF16 numbers, rounded to BF16, gives the bits of a BF16 operation, since 24 >= 2 * 8 + 2.
All tensors here are float32 [...] with BF16 values.  Sums are exact unless they overflow, products unless they are
below 2^-133, where float32 has no bits left.
Fast2Sum would save three operations but is exact only for |a| >= |b|, which an update of a weight near 0 can violate.
Source: Knuth, The Art of Computer Programming 2, 4.2.2; Collage, arXiv 2405.03637.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Suffix of a low part's name in checkpoints.
LOW = ".low"


def rounded(x: Tensor) -> Tensor:
    """float32 x [...] rounded to BF16, to nearest even, as float32."""
    return x.to(torch.bfloat16).float()


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b [...] as (rounded sum, what rounding lost)."""
    x = rounded(a + b)
    t = rounded(x - a)
    return x, rounded(rounded(a - rounded(x - t)) + rounded(b - t))


def two_prod(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """a b [...] as (rounded product, what rounding lost)."""
    p = a * b
    x = rounded(p)
    return x, p - x


def grow(high: Tensor, low: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """high + low + a [...], an expansion and a BF16 number, as an expansion."""
    s, e = two_sum(high, a)
    return two_sum(s, rounded(low + e))


def decay(high: Tensor, low: Tensor, c: tuple[float, float], a: Tensor) -> tuple[Tensor, Tensor]:
    """(high + low) c + a [...], for a constant's expansion c and a BF16 number a, as an expansion."""
    p, e = two_prod(high, c[0])
    s, f = two_sum(p, a)
    return two_sum(s, rounded(f + (e + (high * c[1] + low * c[0]))))


def constant(value: float) -> tuple[float, float]:
    """A number's expansion: .999 is (1, -.000999), .95 is (.949219, .000782)."""
    high = _bf16(value)
    return high, _bf16(value - high)


def _bf16(value: float) -> float:
    bits = int(np.float32(value).view(np.uint32))  # without torch, which a dry run would count
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 or float64 value [...] into an expansion of two BF16 tensors, at most 2^-16 of it away.

    high is the value rounded to BF16, and also high + low rounded, so an update of 0 changes neither.
    """
    high = value.to(torch.bfloat16)
    low = (value - high.to(value.dtype)).to(torch.bfloat16)
    # if a remainder just below half an ulp has become half an ulp, the sum would round to the other neighbour
    other = (high.float() + low.float()).to(torch.bfloat16) != high
    return high, (low.view(torch.int16) - other.to(torch.int16)).view(torch.bfloat16)
