"""Trials along the frontier: which target comes next."""

from __future__ import annotations

import math

import pytest

from megatron_snip.snip.frontier import AlongFrontier, refined
from megatron_snip.snip.plan.plan_file import Plan, build_plan
from megatron_snip.snip.trial import Tried
from tests.unit.snip.test_trial import COSTS, OPTIONS, SHAPES, request


def tried(plan: Plan, increase: float) -> Tried:
    return Tried("", plan, increase, 0.0, True, True)


def curve(**increases: float) -> dict[float, Tried]:
    return {int(name[1:]) / 100: tried(Plan(0, {}), increase) for name, increase in increases.items()}


@pytest.mark.parametrize(
    ("found", "target"),
    [
        (curve(p0=0.0, p50=0.1, p100=1.0), 0.75),
        (curve(p0=0.0, p50=0.9, p100=1.0), 0.25),
        (curve(p0=0.0, p50=0.1, p75=1.0, p100=0.0), 0.875),
        (curve(p0=0.0, p50=0.3, p90=0.6, p100=2.0), 0.25),
        (curve(p0=0.0, p50=0.3, p90=0.6, p100=2.6), 0.95),
        (curve(p0=0.0, p60=0.0, p100=0.0), 0.3),
        (curve(p0=0.0, p98=math.nan, p100=9.0), 0.49),
        (curve(p0=0.0, p1=5.0), None),
        (curve(p0=0.0), None),
        ({}, None),
    ],
)
def test_the_curve_is_refined_where_share_and_loss_are_far_apart(found, target):
    assert refined(found) == (None if target is None else pytest.approx(target))


def test_targets_follow_each_other_and_no_plan_twice():
    """Six linears of one size: 0.52 and 0.6 have one plan, which is known of both when it is known of one."""

    def plan_of(solution):
        return build_plan(solution, SHAPES, OPTIONS, iteration=7, objective="snip", target=1.0)

    seen = []

    def following(found):
        seen.append(sorted(found))
        return None if 1.0 in found else 1.0

    propose = AlongFrontier(request(COSTS), plan_of, (0.52, 0.6, 0.0), following)
    names, done = [], []
    while (proposal := propose(done)) is not None:
        names.append((proposal.name, proposal.plan.target))
        done.append(tried(proposal.plan, 0.0))
    assert names == [("target 52%", 0.52), ("target 0%", 0.0), ("target 100%", 1.0)]
    assert seen == [[0.0, 0.52, 0.6], [0.0, 0.52, 0.6, 1.0]]
