"""Rounding and codes of every element against gfloat and ml_dtypes, and the odds of stochastic rounding."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_snip.formats.element import E2M1, E4M3, E5M2, NAN_CODE, element_named
from megatron_snip.quant.casts.grid import decode, encode, round_nearest, round_stochastic
from tests.unit.quant.elements import ELEMENTS, NAMES, all_bf16, gfloat_format, intervals, ties_and_neighbours

ML_DTYPES = [
    (E2M1, ml_dtypes.float4_e2m1fn),
    (element_named(2, 3), ml_dtypes.float6_e2m3fn),
    (element_named(3, 2), ml_dtypes.float6_e3m2fn),
    (element_named(3, 4), ml_dtypes.float8_e3m4),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
]


def quantise(x, element):
    """x float32 [N] on the element's grid, and its codes."""
    q = torch.copysign(round_nearest(x.abs().clamp(max=element.max), element), x)
    return q, encode(q, element)


def same_bits(ours, theirs):
    """Equal values with equal signs, those of zero too."""
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_nearest_rounding_and_codes_are_those_of_gfloat(element):
    x = torch.cat([all_bf16(), ties_and_neighbours(element), torch.tensor([float("inf"), -float("inf")])])
    q, codes = quantise(x, element)
    peer = gfloat_format(element)
    theirs = gfloat.round_ndarray(peer, x.double().numpy(), sat=True)
    same_bits(q.double().numpy(), theirs)
    np.testing.assert_array_equal(codes.numpy(), gfloat.encode_ndarray(peer, theirs))
    assert torch.equal(decode(codes, element), q)


@pytest.mark.parametrize(("element", "dtype"), ML_DTYPES, ids=[element.name for element, _ in ML_DTYPES])
def test_nearest_rounding_and_codes_are_those_of_ml_dtypes(element, dtype):
    x = torch.cat([all_bf16(), ties_and_neighbours(element)])
    q, codes = quantise(x, element)
    theirs = x.clamp(-element.max, element.max).numpy().astype(dtype)
    same_bits(q.numpy(), theirs.astype(np.float32))
    np.testing.assert_array_equal(codes.numpy(), theirs.view(np.uint8))


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_nan_has_a_code_of_its_own(element):
    nan = torch.tensor([float("nan")])
    q, codes = quantise(nan, element)
    assert q.isnan().all() and codes.tolist() == [NAN_CODE] and decode(codes, element).isnan().all()
    assert round_stochastic(nan, element, torch.zeros(1, dtype=torch.int64)).isnan().all()


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_stochastic_rounding_is_unbiased_in_every_interval(element):
    """Each draw that there is once: their mean is the value but for half a draw.  The value's share varies."""
    every, draws = intervals(element), torch.arange(2**16)
    shares = torch.linspace(0.07, 0.93, len(every)).tolist()
    for (lower, upper), share in zip(every, shares, strict=True):
        value = float(torch.tensor(lower + share * (upper - lower)))
        q = round_stochastic(torch.tensor([value]), element, draws)
        assert bool(((q == lower) | (q == upper)).all())
        assert abs(float(q.double().mean()) - value) <= 2.0**-16 * (upper - lower), (lower, upper)


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_stochastic_rounding_leaves_grid_values_and_takes_the_neighbours(element):
    grid = torch.tensor(element.values())
    least, most = torch.zeros(grid.shape, dtype=torch.int64), torch.full(grid.shape, 2**16 - 1)
    for draws in (least, most):
        assert torch.equal(round_stochastic(grid, element, draws), grid)
    between = (grid[1:].double() + grid[:-1].double()).float() / 2
    assert torch.equal(round_stochastic(between, element, least[1:]), grid[1:])
    assert torch.equal(round_stochastic(between, element, most[1:]), grid[:-1])
    half = torch.full(between.shape, 2**15)  # (2**15 + 1/2) * 2**-16, above the middle
    assert torch.equal(round_stochastic(between, element, half), grid[:-1])
    assert torch.equal(round_stochastic(between, element, half - 1), grid[1:])
