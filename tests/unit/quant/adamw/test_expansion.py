"""Sums and products of BF16 numbers lose nothing, and the parts of an expansion do not overlap."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from megatron_snip.quant.adamw.expansion import constant, decay, grow, rounded, split, two_prod, two_sum
from tests.unit.quant.adamw.numbers_of import expansion, wild


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(0)


def exact(*numbers: torch.Tensor) -> list[Fraction]:
    return [sum(map(Fraction, one)) for one in zip(*(number.tolist() for number in numbers), strict=True)]


@pytest.mark.parametrize("most", [10, 100])
def test_a_sum_and_its_error_are_exact_in_any_order(draw, most):
    a, b = (wild(draw, 20000, least=-30, most=most).float() for _ in range(2))
    x, e = two_sum(a, b)
    assert exact(x, e) == exact(a, b)
    assert torch.equal(x, rounded(a + b)) and torch.equal(e, two_sum(b, a)[1])
    assert e.any() and (a.abs() < b.abs()).any()


def test_fast2sum_would_not_be_exact_near_zero():
    """Why 2Sum: an update is larger than a weight near 0."""
    a, b = torch.tensor([0.0118408203125]), torch.tensor([1.515625])
    x = rounded(a + b)
    fast = rounded(b - rounded(x - a))
    assert exact(x, fast) != exact(a, b) == exact(*two_sum(a, b))


def test_a_product_and_its_error_are_exact(draw):
    a, b = (wild(draw, 20000).float() for _ in range(2))
    x, e = two_prod(a, b)
    assert [Fraction(one) * Fraction(other) for one, other in zip(a.tolist(), b.tolist(), strict=True)] == exact(x, e)
    assert torch.equal(x, rounded(a * b)) and e.any()


@pytest.mark.parametrize("value", [0.999, 0.95, 0.98, 0.9, 0.0])
def test_a_constant_has_16_bits(value):
    high, low = constant(value)
    assert abs(high + low - value) <= 2**-17 * value
    assert {0.999: (1.0, -0.00099945068359375), 0.95: (0.94921875, 0.000782)}.get(value, (high, low)) == (
        pytest.approx(high), pytest.approx(low, rel=1e-3)
    )  # fmt: skip


def test_an_expansion_grows_and_shrinks(draw):
    """Where the addend is not much larger, the error is that of the low part alone: at most 2^-16 of the sum."""
    high, low = (part.float() for part in expansion(draw, 20000))
    a = wild(draw, 20000).float()
    s, e = grow(high, low, a)
    true = high.double() + low.double() + a.double()
    # what y + v may lose is half an ulp of it: 2^-9 of two parts of at most 2^-8 of what they belong to
    assert ((s.double() + e - true).abs() <= 2.0**-16 * torch.maximum(high.abs(), (high + a).abs())).all()
    a = a.abs() * high.sign()
    p, q = decay(high, low, constant(0.999), a)
    true = 0.999 * (high.double() + low) + a
    assert ((p.double() + q - true).abs() <= 2.0**-15 * true.abs()).all()
    for x, y in ((s, e), (p, q)):
        assert torch.equal(rounded(x + y), x), "high is the rounded sum"


def test_v_decays_that_a_bf16_number_does_not():
    """Why plus: under b2 = .999, BF16 rounds each step back to where it was."""
    v = torch.tensor([0.5])
    assert torch.equal(rounded(v * 0.999), v)
    high, low = v, torch.zeros(1)
    for _ in range(100):
        high, low = decay(high, low, constant(0.999), torch.zeros(1))
    assert float(high + low) == pytest.approx(0.5 * 0.999**100, rel=1e-3)


def test_a_float32_number_keeps_16_bits_as_an_expansion(draw):
    value = torch.randn(20000, generator=draw)
    high, low = split(value)
    assert high.dtype == low.dtype == torch.bfloat16
    assert torch.equal(high, value.bfloat16())
    off = (high.double() + low.double() - value).abs() / value.abs()
    assert off.max() <= 2.0**-16 and (off > 2.0**-17).float().mean() < 0.002


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_of_zero_leaves_an_expansion(draw, dtype):
    """Also one whose remainder is just below half an ulp, or half an ulp, on either side of an odd number."""
    odd = torch.tensor([1.0 + 2.0**-7, -1.0 - 2.0**-7], dtype=dtype)
    values = [odd * (1 + side * (2.0**-8 - less)) for side in (1, -1) for less in (0, 2.0**-20, 2.0**-17)]
    high, low = (part.float() for part in split(torch.cat([*values, torch.randn(20000, generator=draw, dtype=dtype)])))
    assert torch.equal(rounded(high + low), high)
    for part, same in zip(grow(high, low, torch.zeros_like(low)), (high, low), strict=True):
        assert torch.equal(part, same)
