"""Divergences, and what they predict for a plan, against numbers computed by hand."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.predict.divergence import Predictions, loss_divergence, weight_divergence
from tests.unit.snip.made_up import changed, statistics, without_updates

BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp4/fp8"))
UP = [LinearShape("layers.0.mlp.up_proj", 8, 4, 0, "up"), LinearShape("layers.1.mlp.up_proj", 4, 4, 1, "up")]


def two_linears() -> Statistics:
    """tokens/2 = 50; sum of update norms 4 + 12 = 16."""
    token, own = {"fp8": [1e-4, 0.0], "fp4": [4e-3, 2e-3]}, {"fp8": [0.1, 0.0], "fp4": [1.6, 3.2]}
    return statistics(UP, token, [4.0, 12.0], own)


def test_loss_divergence_by_hand():
    found = loss_divergence(two_linears(), [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.005, 0.2, 0.2], [0, 0, 0.1, 0.1]], rtol=1e-12, atol=0)


def test_weight_divergence_by_hand():
    found = weight_divergence(two_linears(), [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.1 / 16, 0.1, 0.1 / 16], [0, 0, 0.2, 0]], rtol=1e-12, atol=0)


def test_formula_on_small_tensors():
    """T/2 sum_t (sum_n G dY)^2 from tensors: the statistics' meaning, not only their arithmetic."""
    g, d_y = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([[0.1, 0.2], [0.4, -0.1]])
    per_token = (0.1 - 0.4, 0.2 - 0.3)
    token = {"fp4": [((g * d_y).sum(1) ** 2).sum()]}
    measured = statistics([LinearShape("a", 8, 4)], token, [1.0], {"fp4": [0.0]}, tokens=2)
    assert loss_divergence(measured, [FP4])[0, 0] == pytest.approx(2 / 2 * sum(s**2 for s in per_token))


def test_no_update_yet_has_no_weight_divergence():
    still = statistics(UP, {"fp4": [1.0, 1.0]}, [0.0, 0.0], {"fp4": [0.0, 0.0]})
    assert np.all(weight_divergence(still, [FP4]) == 0)


def test_formats_that_were_not_measured_are_named():
    other = LinearPrecision.uniform("e3m2")
    with pytest.raises(
        ValueError, match="have no own/e3m2; measured formats: fp8, fp4, with updates; probe with the options that"
    ):
        weight_divergence(two_linears(), [other])
    with pytest.raises(ValueError, match="have no token/e3m2; measured formats: fp8, fp4"):
        loss_divergence(two_linears(), [FP8, other])


@pytest.mark.parametrize(
    ("column", "value", "total"),
    [
        ("token/fp4", math.nan, 16.0),
        ("own/fp8", math.inf, 16.0),
        ("norm/G", math.nan, 16.0),
        ("update", math.nan, 12.0),
    ],
)
def test_a_linear_that_is_not_finite_is_nan_and_leaves_the_others_alone(column, value, total):
    """In every option; its update, where that is known, still counts in the whole update."""
    broken = changed(two_linears(), UP[0].name, column, value)
    loss, weight = loss_divergence(broken, [BF16, FP8, FP4]), weight_divergence(broken, [BF16, FP8, FP4])
    assert np.isnan(loss[0]).all() and np.isnan(weight[0]).all()
    assert loss[1] == pytest.approx([0, 0, 0.1]) and weight[1] == pytest.approx([0, 0, 3.2 / total])


NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "down")]
SHAPES = [LinearShape(name, 8, 4) for name in NAMES]


def four_linears(bad: tuple[str, ...] = ()) -> Statistics:
    token = {"fp4": [4.0, 5.0, 6.0, 7.0], "fp8": [0.5] * 4}
    own = {"fp4": [2.0] * 4, "fp8": [0.25, 1.25, 2.25, 3.25]}
    found = statistics(SHAPES, token, [1.0] * 4, own, loss=2.0, tokens=8)
    for name in bad:
        found = changed(found, name, "update", math.nan)
    return found


def test_predictions_are_what_the_divergences_say():
    """For options whose GEMMs differ too."""
    mixed = LinearPrecision.parse("fp4/fp8/bf16")
    options = [BF16, FP8, FP4, mixed, LinearPrecision.parse("fp8/fp4/fp4")]
    predictions = Predictions.of(four_linears())
    loss, weight = loss_divergence(four_linears(), options), weight_divergence(four_linears(), options)
    assert loss[1, 2] == 8 / 2 * 5.0 and weight[2, 4] == 2.0 / 4
    for row, name in enumerate(NAMES):
        for column, option in enumerate(options):
            assert predictions.loss_divergence(name, option) == loss[row, column]
            assert predictions.weight_divergence(name, option) == pytest.approx(weight[row, column], rel=1e-12)
    plan = dict(zip(NAMES, (BF16, FP8, FP4, mixed), strict=True))
    assert predictions.total_loss_divergence(plan) == pytest.approx(4 * (0 + 0.5 + 6.0 + 7.0))
    assert predictions.total_weight_divergence(plan) == pytest.approx(sum(weight[i, i] for i in range(4)))


def test_what_was_not_measured_is_none():
    predictions, other = Predictions.of(four_linears()), LinearPrecision.parse("mxfp4/fp4/fp4")
    assert predictions.loss_divergence(NAMES[0], other) is None
    assert predictions.weight_divergence(NAMES[0], LinearPrecision.parse("fp4/fp4/mxfp4")) is None
    assert predictions.loss_divergence(NAMES[0], LinearPrecision.parse("fp4/mxfp4/mxfp4")) == 16.0
    assert predictions.weight_divergence(NAMES[0], other) == 0.5, "by wgrad alone"
    assert predictions.loss_divergence("layers.9.mlp.up_proj", BF16) is None
    plan = dict.fromkeys(NAMES, FP4)
    assert predictions.total_loss_divergence({**plan, NAMES[0]: other}) is None
    assert predictions.total_weight_divergence({**plan, NAMES[0]: LinearPrecision.uniform("mxfp4")}) is None


def test_a_linear_that_is_not_finite_is_left_out():
    predictions, plan = Predictions.of(four_linears(bad=(NAMES[3],))), dict.fromkeys(NAMES, FP4)
    assert predictions.loss_divergence(NAMES[3], FP4) is None
    assert predictions.weight_divergence(NAMES[3], BF16) is None
    assert predictions.total_loss_divergence(plan) == pytest.approx(4 * (4.0 + 5.0 + 6.0))
    assert predictions.total_weight_divergence(plan) == pytest.approx(3 * 2.0 / 3)
    assert Predictions.of(four_linears(bad=tuple(NAMES))).total_loss_divergence(plan) is None


def test_without_formats_only_bf16_is_known():
    predictions = Predictions.of(statistics(SHAPES[:1], {}, [1.0], {}, iteration=1, loss=2.0, tokens=8))
    assert predictions.total_loss_divergence({NAMES[0]: BF16}) == 0.0
    assert predictions.total_weight_divergence({NAMES[0]: BF16}) == 0.0
    assert predictions.total_loss_divergence({NAMES[0]: FP8}) is None


def test_without_updates_only_the_loss_is_known():
    predictions, plan = Predictions.of(without_updates(four_linears())), dict.fromkeys(NAMES, FP4)
    assert predictions.total_weight_divergence(plan) is None
    assert predictions.weight_divergence(NAMES[0], BF16) is None
    assert predictions.total_loss_divergence(plan) == Predictions.of(four_linears()).total_loss_divergence(plan)


def test_a_checkpoint_keeps_predictions():
    predictions = Predictions.of(four_linears())
    again = Predictions(**json.loads(json.dumps(msgspec.to_builtins(predictions))))
    assert (again.loss, again.weight) == (predictions.loss, predictions.weight) and again.loss[NAMES[1]]["fp4"] == 20.0
    assert msgspec.structs.asdict(again).keys() == {"loss", "weight"}
