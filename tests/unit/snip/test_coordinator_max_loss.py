"""The coordinator under --snip-max-loss: what it asks for, tries, takes and keeps in a checkpoint."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from megatron_snip.quant import PLAIN, LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from tests.unit.snip.test_coordinator import FakeProbe, make, nothing, precisions, run, with_plan_in_force

__all__ = ["make"]
FP4 = LinearPrecision.uniform("fp4")
COSTS = (0.4, 0.3, 0.2, 0.1)


def probe(each=1.0):
    """Predicts less than what the runner measures: .016, .012, .008 and .004 nats, times a factor."""
    return FakeProbe([each * worth / 1000 for worth in (4.0, 3.0, 2.0, 1.0)])


def runner(one, costs=COSTS):
    """Losses of 64 tokens that each linear in FP4 adds to, by the coordinator's own linears."""

    def losses(context=PLAIN):
        now = [context.precision or linear.precision for linear in one.linears.values()]
        return torch.full((64,), 2.0 + sum(cost for cost, precision in zip(costs, now) if precision == FP4))

    return lambda ahead: losses


def applied(one, costs=COSTS, iterations=(3, 4)):
    trials = None if costs is None else runner(one, costs)
    return {i: one.before_step(i, nothing, nothing, trials) for i in iterations}


@pytest.mark.parametrize(
    ("nats", "fp4"), [(1.01, "1111"), (0.65, "0111"), (0.35, "0011"), (0.15, "0001"), (0.05, "0000")]
)
def test_the_largest_share_below_takes_effect(nats, fp4, make, tmp_path):
    one = make(probe(), snip_max_loss=nats)
    seen = applied(one)
    assert precisions(one) == ["fp4" if low == "1" else "fp8" for low in fp4]
    assert seen[4]["snip/achieved"] == fp4.count("1") / 4 and seen[4]["snip/solve_failed"] == 0
    plan = Plan.load(tmp_path / "plans/iter_0000004.json")
    assert plan.hash == seen[4]["snip/plan_hash"] and plan.iteration == 4
    assert plan.target == seen[4]["snip/target"] <= plan.achieved + 1e-9
    assert plan.trial.increase == seen[4]["snip/trial_increase"] == pytest.approx(sum(COSTS[4 - fp4.count("1") :]))
    assert [one.name for one in plan.trial.tried][:2] == ["target 0%", "target 100%"]


def test_what_is_predicted_to_cost_too_much_is_not_taken(make):
    """Whatever it measures; and rules need no prediction."""
    one = make(probe(each=30), snip_max_loss=0.42)
    applied(one)
    assert precisions(one) == ["fp8", "fp8", "fp4", "fp4"], "0111 measures .6; 0011 is predicted to cost .37"
    lucky = make(probe(each=30), snip_max_loss=0.42)
    applied(lucky, [0.0] * 4)
    assert precisions(lucky) == ["fp8", "fp8", "fp4", "fp4"], "0111 is predicted to cost .72"
    rule = make(snip_objective="layer_id", snip_max_loss=0.45)
    seen = applied(rule)
    assert rule.probe.asked == [] and seen[4]["snip/trial_passes"] > 3 and "fp4" in precisions(rule)


def test_an_unreachable_default_target_does_not_matter(make):
    """Two of four linears are fixed to FP8; three quarters would be out of reach."""
    one = make(probe(), snip_fix="layers.0.*=fp8", snip_target=0.75, snip_max_loss=9.0)
    applied(one)
    assert precisions(one) == ["fp8", "fp8", "fp4", "fp4"]


def test_what_happened_is_told(make, caplog):
    with caplog.at_level(logging.INFO, "megatron_snip"):
        applied(make(probe(), snip_max_loss=0.35))
    (line,) = [line for line in caplog.messages if "of 4 plans tried on 64 tokens" in line]
    assert line.startswith("iteration 4: taken of") and "target 50% 0.3 +- 0 (predicted 0.01228)" in line
    assert "iteration 4: 'target 50%' is the largest below 0.35 nats" in caplog.messages
    (curve,) = [line for line in caplog.messages if "The curve" in line]
    assert "0.3 +- 0 nats measured are more than the 0.0123 predicted" in curve


def test_a_trial_that_fails_keeps_the_plan_in_force(make, tmp_path):
    one = with_plan_in_force(make(probe(), snip_max_loss=0.35))
    seen = applied(one, [math.nan, 0.0, 0.0, 0.0])
    assert precisions(one) == ["fp8", "fp4", "fp4", "fp4"] and seen[4]["snip/solve_failed"] == 0, "no FP4, no NaN"
    other = with_plan_in_force(make(probe(), snip_max_loss=0.35))
    seen = {i: other.before_step(i, nothing, nothing, lambda ahead: lambda *_: torch.zeros(0)) for i in (3, 4)}
    assert seen[4]["snip/solve_error"] == "the trial failed: no token of its sequences counts in the loss"
    assert precisions(other) == ["fp8"] * 4


def test_a_solve_under_way_keeps_what_was_asked(make):
    """Whatever the options say when the run continues."""
    one = make(probe(), snip_max_loss=0.35)
    run(one, [3])
    saved = json.loads(json.dumps(one.state()))
    assert saved["pending"]["max_loss"] == 0.35 and saved["pending"]["request"]["target"] == 1.0
    later = make(snip_target=0.25)
    later.load_state(saved)
    applied(later, iterations=[4])
    assert precisions(later) == ["fp8", "fp8", "fp4", "fp4"]
    untried = with_plan_in_force(make(snip_target=0.25, snip_trials=0))
    untried.load_state({**untried.state(), "pending": saved["pending"]})
    seen = applied(untried, None, [4])
    assert seen[4]["snip/solve_error"] == "the trial failed: --snip-max-loss 0.35, and --snip-trials is 0"
    assert precisions(untried) == ["fp8"] * 4
