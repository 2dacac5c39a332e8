"""What statistics predict for a plan: by hand, what is not known, and what the coordinator tells of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.divergence import loss_divergence, weight_divergence
from megatron_snip.snip.predictions import Predictions
from tests.unit.snip.made_up import linear_stats, probe_stats
from tests.unit.snip.test_coordinator import make, run

__all__ = ["make"]  # a fixture
NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "down")]
BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp8/bf16"))


def stats(bad: str = ""):
    linears = {
        name: linear_stats(
            {"fp4": 4.0 + i, "fp8": 0.5},
            1.0,
            {"fp4": 2.0, "fp8": 0.25 + i},
            dgrad_error_sq={"fp4": 3.0, "fp8": 0.5},
            noise_update_sq=0.5,
            fprop_update_sq={"fp4": 0.125 * (1 + i)},
        )
        for i, name in enumerate(NAMES)
    }
    if bad:
        linears[bad] = replace(linears[bad], update_norm_sq=math.nan)
    return probe_stats(7, 2.0, 8, linears)


def test_it_is_what_the_divergences_say():
    """For options whose GEMMs differ too."""
    options = [BF16, FP8, FP4, MIXED, LinearPrecision.parse("fp8/fp4/fp4")]
    predictions = Predictions.of(stats())
    loss, weight = loss_divergence(stats(), NAMES, options), weight_divergence(stats(), NAMES, options)
    assert loss[1, 2] == 8 / 2 * 5.0 and weight[2, 3] > 0, "prop alone"
    for row, name in enumerate(NAMES):
        for column, option in enumerate(options):
            assert predictions.loss_divergence(name, option) == loss[row, column]
            assert predictions.weight_divergence(name, option) == pytest.approx(weight[row, column], rel=1e-12)
    plan = dict(zip(NAMES, (BF16, FP8, FP4, MIXED), strict=True))
    assert predictions.total_loss_divergence(plan) == pytest.approx(4 * (0 + 0.5 + 6.0 + 7.0))
    assert predictions.total_weight_divergence(plan) == pytest.approx(sum(weight[i, i] for i in range(4)))


def test_what_was_not_measured_is_none():
    predictions, other = Predictions.of(stats()), LinearPrecision.parse("mxfp4/fp4/fp4")
    assert predictions.loss_divergence(NAMES[0], other) is None
    assert predictions.weight_divergence(NAMES[0], other) is None
    assert predictions.loss_divergence(NAMES[0], LinearPrecision.parse("fp4/mxfp4/mxfp4")) == 16.0
    assert predictions.loss_divergence("layers.9.mlp.up_proj", BF16) is None
    plan = dict.fromkeys(NAMES, FP4)
    assert predictions.total_loss_divergence({**plan, NAMES[0]: other}) is None
    quiet = Predictions.of(replace(stats(), noise_sq={}))
    assert quiet.total_weight_divergence(plan) is None and quiet.total_loss_divergence(plan) is not None


def test_a_linear_that_is_not_finite_is_left_out():
    predictions, plan = Predictions.of(stats(bad=NAMES[3])), dict.fromkeys(NAMES, FP4)
    assert predictions.loss_divergence(NAMES[3], FP4) is None
    assert predictions.total_loss_divergence(plan) == pytest.approx(4 * (4.0 + 5.0 + 6.0))
    everything = probe_stats(
        7, 2.0, 8, {name: replace(s, update_norm_sq=math.nan) for name, s in stats().linears.items()}
    )
    assert Predictions.of(everything).total_loss_divergence(plan) is None


def test_without_formats_only_bf16_is_known():
    plain = linear_stats({}, 1.0, {})
    predictions = Predictions.of(probe_stats(1, 2.0, 8, {NAMES[0]: plain}))
    assert predictions.total_loss_divergence({NAMES[0]: BF16}) == 0.0
    assert predictions.total_loss_divergence({NAMES[0]: FP8}) is None


def test_a_checkpoint_keeps_it():
    predictions = Predictions.of(stats())
    assert Predictions.from_dict(json.loads(json.dumps(predictions.to_dict()))) == predictions


def test_what_is_predicted_for_the_precisions_in_force(make):
    one = make(snip_warmup_precision="fp8")
    seen = run(one, range(1, 5))
    assert not any("predicted" in key for i in (1, 2) for key in seen[i]), "nothing was measured yet"
    assert one.predicted_metrics() == {key: seen[4][key] for key in seen[4] if "predicted" in key}
    assert seen[4]["snip/predicted_loss_divergence"] == pytest.approx(8 / 2 * (0.04 + 0.03 + 2.0 + 1.0))
    assert seen[4]["snip/predicted_weight_divergence"] == pytest.approx((0.004 + 0.003 + 0.2 + 0.1) / 4)
    assert seen[4]["snip/bound"] <= seen[4]["snip/objective"]
    other = make()
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.predicted_metrics() == one.predicted_metrics(), "a resumed run logs the same"
    before = make(snip_warmup_precision="fp8")
    run(before, [3])
    assert before.predicted_metrics()["snip/predicted_loss_divergence"] == pytest.approx(4 * 0.1), "no plan: warm-up"


def test_predictions_are_left_out_where_nothing_was_measured(make):
    one = make(snip_objective="layer_id")
    assert not any("predicted" in key for key in run(one, range(1, 5))[4])
    state = one.state()
    del state["predictions"]  # a checkpoint of before there were any
    other = make()
    other.load_state(state)
    assert other.predicted_metrics() == {} and other.plan == one.plan
