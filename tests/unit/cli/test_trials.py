"""Trials outside a run: which plan of a share is written, by what was measured of a made-up model."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.cli.shares import plan_and_try, planner_of
from megatron_snip.cli.trials import best_for
from megatron_snip.config import Config
from megatron_snip.quant import PLAIN, LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.trial import TrialFailed, Trials, Tried
from tests.unit.snip.made_up import statistics
from tests.unit.train.recorded import MODEL, NAMES, SHAPES

LINEARS, COUNT = NAMES[:7], 7
FP4 = LinearPrecision.uniform("fp4")
COSTS = [0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01]


def batch(costs=COSTS):
    token = {"fp8": [0.0] * COUNT, "fp4": [2 * cost for cost in costs]}  # dL = tokens / 2 * column
    return statistics(SHAPES[:COUNT], token, [1.0] * COUNT, dict.fromkeys(token, [1.0] * COUNT), tokens=1)


def config(**more) -> Config:
    snip = {"snip_options": "fp8,fp4", "precision": "snip", "snip_granularity": "linear"}
    return Config().replace(**{**MODEL, "num_layers": 1, **snip, **more})


def trials(lone_mesh, together=(), costs=COSTS) -> Trials:
    """Of 64 tokens; together: (linears, nats) that some cost beyond the sum if all are in FP4."""
    linears = {name: SimpleNamespace(precision=FP4) for name in LINEARS}

    def run(context=PLAIN):
        now = [context.precision or linear.precision for linear in linears.values()]
        fp4 = {i for i, precision in enumerate(now) if precision == FP4}
        there = () if context.precision else together
        loss = sum(costs[i] for i in fp4) + sum(nats for rows, nats in there if set(rows) <= fp4)
        return torch.full((64,), 2.0 + loss)

    return Trials(run, linears, lone_mesh, torch.device("cpu"))


def fp4_of(plan: Plan) -> list[int]:
    return [i for i, name in enumerate(LINEARS) if plan.linears[name] == FP4]


def test_plans_measure_what_sums_predict(lone_mesh):
    planned = plan_and_try(config(snip_trials=9), [batch(), batch()], (0.4, 0.7), trials(lone_mesh))
    assert [fp4_of(plan) for plan in planned.plans.values()] == [[4, 5, 6], [2, 3, 4, 5, 6]]
    increases = [plan.trial.increase for plan in planned.plans.values()]
    assert increases == pytest.approx([0.06, 0.15], abs=1e-5) and planned.tokens == 64
    assert 5 <= len(planned.tried) <= 8, "nine passes, with BF16's"
    heads, rows = planned.table()
    assert heads == ["plan", "in FP4", "predicted (nats)", "regret", "measured (nats)", "linears without FP4"]
    assert rows[0] == ["plan_40", "42.9%", "6.00e-02", "0.0e+00", f"6.00e-02 +- {planned.tried[0].error:.0e}", "4"]
    (section,) = planned.curve()
    assert section.text == (
        "The curve does not break: each plan costs what was predicted or less, and no step more than all before. "
        "Measured on 64 tokens that the probe did not read."
    )
    assert [trace["name"] for trace in section.figures[0]["data"]] == ["measured", "predicted"]


def test_a_plan_that_saves_more_and_measures_better_is_taken(lone_mesh):
    """Two linears cost a nat together, unless all are in FP4."""
    found = trials(lone_mesh, together=[((5, 6), 1.0), (range(COUNT), -1.0)])
    planned = plan_and_try(config(snip_trials=5), [batch()], (0.2, 0.4), found)
    less, more = planned.plans.values()
    assert fp4_of(less) == fp4_of(more) == list(range(COUNT)) and (less.target, more.target) == (0.2, 0.4)
    assert more.trial.name == "target 100%" and more.trial.increase == pytest.approx(0.28, abs=1e-5)
    assert [one.name for one in more.trial.tried] == ["target 20%", "target 40%", "target 100%", "target 0%"]
    assert planned.curve()[0].text.startswith("The curve breaks at 28.6%, where 1.03 +- 0 nats measured")


@pytest.mark.parametrize(("error", "name"), [(0.001, "b"), (0.03, "a")])
def test_luck_replaces_no_plan(error, name):
    """.2 nats are better than .3 with errors of .001, and within the noise with .03."""
    planner = planner_of(config(snip_target=0.4), batch())
    own = planner.solve("snip")
    other = dataclasses.replace(own, linears=dict.fromkeys(LINEARS, FP4))
    tried = [Tried("a", own, 0.3, error, True, True), Tried("b", other, 0.2, error, True, True)]
    found = best_for(own, planner, tried, 64)
    assert found.trial.name == name and found.linears == {"a": own, "b": other}[name].linears
    assert found.trial.tried == [one.record for one in tried] and found.target == 0.4


def test_as_far_as_the_passes_last(lone_mesh):
    planned = plan_and_try(config(snip_trials=2), [batch()], (0.4, 0.7), trials(lone_mesh))
    tried, other = planned.plans.values()
    assert tried.trial is not None and other.trial is None and fp4_of(other) == [2, 3, 4, 5, 6]
    assert len(planned.tried) == 1


def test_a_plan_whose_loss_is_not_finite_gives_way_to_one_that_saves_more(lone_mesh):
    found = trials(lone_mesh, together=[((4, 5, 6), math.nan)])
    planned = plan_and_try(config(snip_trials=4), [batch()], (0.2, 0.4), found)
    less, more = planned.plans.values()
    assert fp4_of(less) == [5, 6] and less.trial.name == "target 20%"
    assert fp4_of(more) == [4, 5, 6] and more.trial is None, "none that saves as much has a finite loss"
    assert "the loss is not finite" in planned.curve()[0].text


def test_a_loss_in_place_of_shares(lone_mesh):
    planned = plan_and_try(config(snip_max_loss=0.11), [batch(), batch()], (), trials(lone_mesh))
    assert list(planned.plans) == ["plan"] and fp4_of(planned.plans["plan"]) == [3, 4, 5, 6]
    assert planned.regrets == {"plan": 0.0} and planned.plans["plan"].trial.name.startswith("target ")
    nothing = plan_and_try(config(snip_max_loss=0.005), [batch()], (), trials(lone_mesh))
    assert fp4_of(nothing.plans["plan"]) == [] and nothing.plans["plan"].trial.name == "target 0%"
    with pytest.raises(TrialFailed, match="no plan has a finite loss"):
        plan_and_try(config(snip_max_loss=0.1), [batch()], (), trials(lone_mesh, [((), math.nan)]))


def test_formats_that_save_nothing(lone_mesh):
    """The default target would be out of reach."""
    planned = plan_and_try(config(snip_options="fp8"), [batch()], (0.0,), trials(lone_mesh))
    assert fp4_of(planned.plans["plan_0"]) == [] and len(planned.tried) == 1
