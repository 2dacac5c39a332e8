"""Four over six: which scale a block takes, against a search in float64, and what follows for errors and draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_snip.formats import Format, get_format
from megatron_snip.formats.element import E2M1
from megatron_snip.quant import RoundingKey, fake_quantize, quantize
from megatron_snip.quant.casts.cast import finite_amax
from megatron_snip.quant.casts.grid import round_nearest
from megatron_snip.quant.casts.scales import tensor_scale
from tests.unit.quant.specification import quantize_reference

NVFP4, OURS = get_format("nvfp4_plain"), get_format("nvfp4_4over6")
TILES = replace(NVFP4, name="tiles", scale=OURS.scale)


def squared_errors(x: torch.Tensor, fmt: Format, how: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block, in float64: what was chosen, and the better of both candidates.  x [16 R, 16 C]."""
    made = quantize_reference(x, fmt, **how)
    rows, cols = made.block
    whole = tensor_scale(finite_amax(x), fmt).double()

    def error(scales: torch.Tensor) -> torch.Tensor:
        spread = (scales.double() * whole).repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        q = round_nearest((x.double().abs() / spread).clamp(max=6).float(), E2M1).double()
        error = torch.where(spread > 0, q * spread, 0) - x.double().abs()
        return error.square().view(len(x) // rows, rows, -1, cols).sum(dim=(1, 3))

    ideal = x.abs().view(len(x) // rows, rows, -1, cols).amax(dim=(1, 3)).double() / 6 / whole
    candidates = [(ideal * factor).float().to(torch.float8_e4m3fn).float() for factor in (1.0, 1.5)]
    assert ((made.scales == candidates[0]) | (made.scales == candidates[1])).all()
    return error(made.scales), torch.minimum(*map(error, candidates))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fmt", "role", "dim"), [(TILES, "input", 1), (TILES, "input", 0), (OURS, "weight", 1)])
def test_a_block_takes_the_scale_with_the_smaller_squared_error(fmt, role, dim, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 128, generator=random) * torch.randn(64, 128, generator=random).exp() ** seed
    taken, best = squared_errors(x, fmt, {"role": role, "dim": dim})
    assert (taken <= best * (1 + 1e-5)).all() and taken.sum() > 0


def test_a_block_that_fits_four_takes_four_and_one_that_fits_six_takes_six():
    """4 and 3 in a block are E2M1 numbers under a scale for 4; under one for 6 they would be 6 and 4.5."""
    blocks = torch.tensor([[4.0, 3.0] * 8, [6.0, 4.0] * 8, [0.0] * 16])
    q = quantize(torch.cat([blocks, torch.tensor([[256 * 6.0] + [0.0] * 15])]), TILES, role="input", dim=1)
    assert q.dequantize()[:3].equal(blocks)
    assert q.scales[:, 0].tolist() == [1.0, 1.0, 0.0, 256.0], "1 = 1.5 * 4 / 6; the largest block takes 256"
    assert q.codes[:2].tolist() == [[6, 5] * 8, [7, 6] * 8]


def test_square_blocks_take_one_scale_along_both_dims():
    x = torch.randn(96, 64)
    along = [quantize(x, OURS, role="weight", dim=dim) for dim in (0, 1)]
    assert along[0].scales.equal(along[1].scales) and along[0].codes.equal(along[1].codes)
    rows = quantize(x, TILES, role="input", dim=1)
    cols = quantize(x.T.contiguous(), TILES, role="input", dim=0)
    assert rows.scales.equal(cols.scales.T) and rows.codes.equal(cols.codes.T)


@pytest.mark.parametrize(("outliers", "most"), [("none", 0.86), ("channels", 0.98), ("lognormal", 0.87)])
def test_squared_errors_fall(outliers, most):
    """docs/numerics.md has the figures of more distributions."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(256, 512, generator=random)
    if outliers == "channels":
        x[:, torch.rand(512, generator=random) < 0.02] *= 30
    elif outliers == "lognormal":
        x = x * torch.randn(256, 512, generator=random).exp() ** 2
    before, after = ((fake_quantize(x, f, role="input", dim=1) - x).square().sum() for f in (NVFP4, TILES))
    assert most - 0.12 < after / before < most


def test_stochastic_rounding_takes_the_scale_of_rounding_to_nearest():
    """So the choice is no function of the draws, and the mean over draws is x but for what is clamped."""
    x = torch.randn(64, 64)
    how = {"role": "grad_output", "dim": 1}
    nearest = quantize(x, TILES, rounding="nearest", **how)
    mean = torch.zeros_like(x)
    for iteration in range(400):
        key = RoundingKey(1, iteration, 3).for_operand("grad_output", 0, 0)
        drawn = quantize(x, TILES, key=key, **how)
        assert drawn.scales.equal(nearest.scales)
        mean += drawn.dequantize() / 400
    slope = (mean * x).sum() / x.square().sum()
    assert abs(slope - 0.998) < 0.002


def test_a_nan_changes_no_other_element():
    x = torch.randn(32, 64)
    dirty = x.clone()
    dirty[::4, 5], dirty[1::4, 20] = torch.nan, torch.inf
    expected = quantize(dirty.nan_to_num(nan=0.0, posinf=0.0), TILES, role="input", dim=1, amax=x.abs().max())
    q = quantize(dirty, TILES, role="input", dim=1, amax=x.abs().max())
    finite = dirty.isfinite()
    assert q.scales.equal(expected.scales) and q.codes[finite].equal(expected.codes[finite])
