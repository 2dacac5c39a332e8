"""--snip-max-loss: the largest share whose measured increase stays below so many nats."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.snip.max_loss import check_max_loss, judgement, proposals
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import TriedRecord, build_plan
from megatron_snip.snip.trial import Trials, judged, stays_below, with_record
from tests.unit.snip.test_trial import COSTS, NAMES, OPTIONS, SHAPES, Model, fp4_of, request


def build_plan_of(asked):
    return build_plan(asked.solve(), SHAPES, OPTIONS, iteration=7, objective="snip", target=asked.target)


def predicted(plan):
    """The sum of the single linears' costs, as a probe would predict it."""
    return float(sum(COSTS[row] for row in fp4_of(plan)))


def found(model, nats, lone_mesh, passes=16, asked=None, predict=None):
    """The plan that is taken, and what was tried."""
    asked = request(COSTS, 1.0) if asked is None else asked
    trials = Trials(model, model.linears, lone_mesh, torch.device("cpu"))
    pending = Pending(7, 7, tuple(map(str, OPTIONS)), "snip", asked, "fp4", nats)
    propose = proposals(pending, build_plan_of(asked), SHAPES, "nominal", None)
    tried = judged(trials.run(propose, passes, predict, to_the_end=True), nats)
    return with_record(tried, trials.tokens), tried


@pytest.mark.parametrize(
    ("nats", "fp4"),
    [(0.2, [0, 1, 2, 3, 4, 5]), (0.15, [1, 2, 3, 4, 5]), (0.07, [2, 3, 4, 5]), (0.006, [5]), (1e-9, [])],
)
def test_the_largest_share_below(nats, fp4, lone_mesh):
    """Costs add up to .005, .015, .035, .065, .105 and .155 from the cheapest on; .15 is below all of them."""
    plan, tried = found(Model(COSTS), nats, lone_mesh)
    assert fp4_of(plan) == fp4
    assert [one.plan.linears for one in tried if one.taken] == [plan.linears]
    assert plan.target >= len(fp4) / 6 - 0.17 and plan.achieved == pytest.approx(len(fp4) / 6)
    assert plan.trial.name == f"target {100 * plan.target:.4g}%"
    assert len({str(one.plan.linears) for one in tried}) == len(tried), "nothing is run twice"
    assert len(tried) <= 7, "six linears of one size have no more plans"


def test_first_no_saving_and_the_most_then_halves(lone_mesh):
    _, tried = found(Model(COSTS), 0.05, lone_mesh)
    assert [one.name for one in tried] == [f"target {at}%" for at in ("0", "100", "50", "75", "62.5")]


def test_all_in_low_precision_is_taken_where_it_measures_better_than_less(lone_mesh):
    """Bisection alone would stop below the plans of a nat."""
    model = Model(COSTS, together=[(NAMES[3:5], 1.0), (NAMES, -1.0)])
    plan, tried = found(model, 0.2, lone_mesh)
    assert fp4_of(plan) == [0, 1, 2, 3, 4, 5] and len(tried) == 2


def test_what_measures_too_much_is_not_taken_whatever_is_predicted(lone_mesh):
    plan, _ = found(Model(COSTS, together=[((NAMES[4], NAMES[5]), 1.0)]), 0.2, lone_mesh)
    assert fp4_of(plan) == [5]


def test_noise_counts_against_a_plan(lone_mesh):
    """.035 nats are below .036, but not beyond doubt with an error of .002."""
    assert fp4_of(found(Model(COSTS), 0.036, lone_mesh)[0]) == [3, 4, 5]
    plan, tried = found(Model(COSTS, noise=0.1), 0.036, lone_mesh)
    assert fp4_of(plan) == [4, 5] and tried[2].error == pytest.approx(0.1 / 64, rel=0.2)


@pytest.mark.parametrize(("passes", "tried"), [(2, ["target 0%"]), (3, ["target 0%", "target 100%"])])
def test_within_the_passes(passes, tried, lone_mesh):
    plan, found_ = found(Model(COSTS), 0.05, lone_mesh, passes)
    assert [one.name for one in found_] == tried and fp4_of(plan) == []


def test_no_plan_below_is_that_of_no_saving(lone_mesh):
    """Whatever it measures itself, and unless its loss is not finite."""
    plan, tried = found(Model([-0.01, *COSTS[1:]]), -1.0, lone_mesh)
    assert fp4_of(plan) == [] and plan.trial.increase == 0.0
    broken = [dataclasses.replace(one, increase=math.nan) for one in tried]
    assert with_record(judged(broken, 1.0), 8) is None and judged([], 1.0) == []
    assert judgement(tried, -1.0) == "taken, as no plan stays below -1 nats"
    assert judgement(tried, 0.5) == "the largest below 0.5 nats" and judgement(tried, None) == "best"


def test_luck_does_not_make_a_plan_cheap(lone_mesh):
    """All in FP4 measures a nat below BF16, and is predicted to cost .155: too much, whatever it measures."""
    model = Model(COSTS, together=[(NAMES, -1.0)])
    assert fp4_of(found(model, 0.1, lone_mesh)[0]) == [0, 1, 2, 3, 4, 5]
    assert fp4_of(found(model, 0.1, lone_mesh, predict=predicted)[0]) == [2, 3, 4, 5]


def test_a_loss_that_is_not_finite_is_not_below(lone_mesh):
    plan, tried = found(Model(COSTS, together=[(NAMES[:1], math.nan)]), 1.0, lone_mesh)
    assert fp4_of(plan) == [1, 2, 3, 4, 5] and not stays_below(tried[1], math.inf)
    assert tried[1].record == TriedRecord("target 100%", None, None, None)


def test_fixed_linears_and_stages_hold(lone_mesh):
    """The most that can be reached is less than all, and each stage saves its share."""
    fixed, stage = np.array([-1, 0, -1, -1, -1, -1]), np.array([0, 0, 0, 1, 1, 1])
    asked = request(COSTS, fixed=fixed, stage=stage)
    asked = dataclasses.replace(asked, target=asked.most())
    assert asked.target == pytest.approx(2 / 3)
    plan, tried = found(Model(COSTS), 0.05, lone_mesh, asked=asked)
    assert all(1 not in fp4_of(one.plan) for one in tried)
    assert tried[1].name == "target 66.67%" and fp4_of(plan) == [2, 5] and plan.target == pytest.approx(1 / 3)
    nothing = request(COSTS, fixed=np.zeros(6, np.int64))
    assert nothing.most() == 0.0
    plan, tried = found(Model(COSTS), 0.1, lone_mesh, asked=dataclasses.replace(nothing, target=0.0))
    assert fp4_of(plan) == [] and len(tried) == 1


@pytest.mark.parametrize("trials", [0, 2])
def test_something_must_measure_it(trials):
    check_max_loss(SnipConfig(snip_trials=trials))
    check_max_loss(SnipConfig(snip_max_loss=0.1, snip_trials=3))
    with pytest.raises(UserError) as error:
        check_max_loss(SnipConfig(snip_max_loss=0.1, snip_trials=trials))
    assert str(error.value) == (
        f"--snip-max-loss 0.1 needs trials, and --snip-trials is {trials}; give 3 or more, or "
        "--snip-target instead of --snip-max-loss"
    )
