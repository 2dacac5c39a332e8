"""Divergences and objectives against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.cost import LinearShape
from megatron_snip.snip.divergence import (
    OBJECTIVES,
    NonFiniteStatistics,
    ObjectiveInputs,
    base_option,
    finite_or_held,
    get_objective,
    loss_divergence,
    quality_loss,
    weight_divergence,
)
from megatron_snip.snip.stats import LinearStats, ProbeStats

BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp4/fp8"))
NAMES = ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]
SHAPES = [LinearShape(NAMES[0], 8, 4), LinearShape(NAMES[1], 4, 4)]


def stats(**linear) -> ProbeStats:
    """tokens/2 = 50; sum of update norms 4 + 12 = 16."""
    first = {
        "token_square_sum": {"fp8": 1e-4, "fp4": 4e-3},
        "update_norm_sq": 4.0,
        "own_sq": {"fp8": 0.1, "fp4": 1.6},
    }
    second = LinearStats({"fp8": 0.0, "fp4": 2e-3}, 12.0, {"fp8": 0.0, "fp4": 3.2})
    return ProbeStats(7, 5.0, 100, {NAMES[0]: LinearStats(**{**first, **linear}), NAMES[1]: second})


def test_loss_divergence_by_hand():
    found = loss_divergence(stats(), NAMES, [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.005, 0.2, 0.2], [0, 0, 0.1, 0.1]], rtol=1e-12, atol=0)


def test_weight_divergence_by_hand():
    found = weight_divergence(stats(), NAMES, [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.1 / 16, 0.1, 0.1 / 16], [0, 0, 0.2, 0]], rtol=1e-12, atol=0)
    # The norm is of all linears measured, also when only some are asked for.
    assert weight_divergence(stats(), NAMES[1:], [FP4])[0, 0] == pytest.approx(0.2)


def test_formula_on_small_tensors():
    """T/2 sum_t (sum_n G dY)^2 from tensors: the statistics' meaning, not only their arithmetic."""
    g, d_y = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([[0.1, 0.2], [0.4, -0.1]])
    per_token = (0.1 - 0.4, 0.2 - 0.3)
    measured = ProbeStats(0, 1.0, 2, {"a": LinearStats({"fp4": ((g * d_y).sum(1) ** 2).sum()}, 1.0, {"fp4": 0.0})})
    assert loss_divergence(measured, ["a"], [FP4])[0, 0] == pytest.approx(2 / 2 * sum(s**2 for s in per_token))


def test_snip_objective_and_base():
    options = [FP4, FP8, BF16]
    inputs = ObjectiveInputs(SHAPES, options, stats(), update_weight=2.0)
    first = [0.2 / 5 + 0.1, 0.005 / 5 + 0.1 / 16, 0.0]
    second = [0.1 / 5 + 0.2, 0.0, 0.0]
    expected = np.array([first, second])
    assert np.allclose(quality_loss("snip", inputs), expected - expected[:, [1]], rtol=1e-12, atol=0)
    loss_only = np.array([[0.2, 0.005, 0], [0.1, 0, 0]]) / 5
    assert np.allclose(quality_loss("snip_loss", inputs), loss_only - loss_only[:, [1]], rtol=1e-12, atol=0)
    assert base_option(options) == 1 and base_option([FP4, BF16]) == 0
    assert np.all(quality_loss("snip", ObjectiveInputs(SHAPES, [FP4, BF16], stats()))[:, 0] == 0)


def test_no_update_yet_has_no_weight_divergence():
    still = ProbeStats(0, 5.0, 100, {n: LinearStats({"fp4": 1.0}, 0.0, {"fp4": 0.0}) for n in NAMES})
    assert np.all(weight_divergence(still, NAMES, [FP4]) == 0)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="unknown objective 'snap'; known: snip, snip_loss, random"):
        get_objective("snap")
    with pytest.raises(ValueError, match="no such linears: \\['x'\\]"):
        loss_divergence(stats(), ["x"], [FP4])
    with pytest.raises(ValueError, match="lack a format of option e3m2"):
        weight_divergence(stats(), NAMES, [LinearPrecision.uniform("e3m2")])
    with pytest.raises(ValueError, match="needs statistics"):
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4]))
    with pytest.raises(ValueError, match="must be above 0"):
        broken = ProbeStats(1, math.nan, 100, stats().linears)
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], broken))


@pytest.mark.parametrize(
    "linear",
    [
        {"token_square_sum": {"fp8": 0.0, "fp4": math.nan}},
        {"own_sq": {"fp8": math.inf, "fp4": 0.0}},
        {"update_norm_sq": math.nan},
    ],
)
def test_non_finite_linears_are_named_and_held(linear):
    broken = stats(**linear)
    with pytest.raises(NonFiniteStatistics, match="not finite") as caught:
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], broken))
    assert caught.value.names == (NAMES[0],)
    quality, fixed, held = finite_or_held("snip", ObjectiveInputs(SHAPES, [FP4, FP8], broken))
    assert held == (NAMES[0],) and fixed.tolist() == [1, -1] and np.isfinite(quality).all()
    total = 12.0 if "update_norm_sq" in linear else 16.0
    assert quality[1, 0] == pytest.approx(0.1 / 5 + 3.2 / total / 2)
    quality, fixed, held = finite_or_held("snip", ObjectiveInputs(SHAPES, [FP8, FP4], stats()), np.array([-1, 1]))
    assert held == () and fixed.tolist() == [-1, 1]
    assert np.array_equal(quality, quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], stats())))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_keeps_its_promises(name):
    """Shape, finiteness, zero at the base, and FP4 never cheaper than FP8 on sane statistics."""
    options = [FP8, MIXED, FP4]
    given = stats() if get_objective(name).needs_stats else None
    found = quality_loss(name, ObjectiveInputs(SHAPES, options, given))
    assert found.shape == (2, 3) and np.isfinite(found).all() and np.all(found[:, 0] == 0)
    assert np.all(found[:, 2] > 0) and np.all(found[:, 1] <= found[:, 2])
    assert np.array_equal(found, quality_loss(name, ObjectiveInputs(SHAPES, options, given)))
