"""Trials: the plan that measures best is taken, beyond noise, whatever the probe predicts."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_snip.quant import PLAIN, LinearPrecision, LinearShape
from megatron_snip.snip.plan.plan_file import Plan, TriedRecord, build_plan
from megatron_snip.snip.plan.program import Limit
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.trial import Proposals, TrialFailed, Trials, first_plans, samples_of, try_plan, with_record

FP8, FP4, BF16 = (LinearPrecision.uniform(name) for name in ("fp8", "fp4", "bf16"))
OPTIONS = [FP8, FP4]
NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(3) for kind in ("gate", "down")]
SHAPES = [LinearShape(name, 128, 128, block=i // 2, kind=("gate", "down")[i % 2]) for i, name in enumerate(NAMES)]
TOKENS = 4096


class Model:
    """Losses of made-up tokens: what each FP4 linear costs, and more where some are in FP4 together."""

    def __init__(self, costs, together=(), noise=0.0, base=2.0) -> None:
        self.linears = {name: SimpleNamespace(precision=BF16) for name in NAMES}
        self.costs, self.together, self.noise, self.base = costs, together, noise, base
        self.draw = torch.Generator().manual_seed(5)
        self.tokens = torch.randn(TOKENS, generator=self.draw)  # the same in all plans, and far larger than costs

    def __call__(self, context=PLAIN):
        precisions = [context.precision or linear.precision for linear in self.linears.values()]
        fp4 = {name for name, precision in zip(NAMES, precisions) if precision == FP4}
        loss = sum(cost for name, cost in zip(NAMES, self.costs) if name in fp4)
        loss += sum(cost for names, cost in self.together if set(names) <= fp4)
        own = self.noise * torch.randn(TOKENS, generator=self.draw) if fp4 else 0.0
        return self.base + self.tokens + loss + own


def request(predicted, target=0.5, **more) -> SolveRequest:
    quality = np.stack([np.zeros(len(NAMES)), np.array(predicted)], axis=1)
    saved = np.tile([0.0, 1.0 / len(NAMES)], (len(NAMES), 1))
    return SolveRequest(quality, saved, target, **more)


def plan_of(solution) -> Plan:
    return build_plan(solution, SHAPES, OPTIONS, iteration=7, objective="snip", target=0.5)


def try_plans(model, asked, lone_mesh, passes=16, in_force=None, predict=None):
    solved = plan_of(asked.solve())
    trials = Trials(model, model.linears, lone_mesh, torch.device("cpu"))
    proposals = Proposals(
        lambda: first_plans(solved, asked, SHAPES, OPTIONS, plan_of, in_force), asked, SHAPES, OPTIONS, plan_of
    )
    tried = trials.run(proposals, passes, predict)
    return trials, tried, with_record(tried, trials.tokens)


def fp4_of(plan: Plan) -> list[int]:
    return [i for i, name in enumerate(NAMES) if plan.linears[name] == FP4]


COSTS = [0.05, 0.04, 0.03, 0.02, 0.01, 0.005]


def test_a_plan_that_measures_as_predicted_is_taken(lone_mesh):
    model = Model(COSTS)
    trials, tried, best = try_plans(model, request(COSTS), lone_mesh)
    assert fp4_of(best) == [3, 4, 5] and best.trial.name == "solver" and best.objective == "snip"
    assert best.trial.increase == pytest.approx(0.035, abs=1e-5) and best.trial.tokens == TOKENS
    assert [one.name for one in tried][:2] == ["solver", "lowest"], "and then rules"
    assert all(linear.precision == BF16 for linear in model.linears.values()), "as they were"
    assert trials.passes == len(tried) + 1


@pytest.mark.parametrize(("predicted", "others"), [(0.035, False), (0.0348, False), (0.03, True)])
def test_others_are_run_only_if_the_plan_costs_more_than_predicted(predicted, others, lone_mesh):
    model = Model(COSTS, noise=0.01)
    _, tried, best = try_plans(model, request(COSTS), lone_mesh, predict=lambda plan: predicted)
    assert (len(tried) > 1) == others and best.trial.name == "solver"
    assert abs(best.trial.tried[0].increase - 0.035) < 0.001


@pytest.mark.parametrize(("predicted", "taken"), [(0.0, "lowest"), (0.039, "lowest"), (0.041, "solver")])
def test_a_plan_counts_with_its_prediction_where_it_measures_less(predicted, taken, lone_mesh):
    """Luck makes all in FP4 look better than BF16.  The solver's plan costs .04, and was predicted to cost .035."""
    model = Model(COSTS, together=[(NAMES, -5.0), (NAMES[3:], 0.005)])

    def predict(plan):
        return {3: 0.035, 6: predicted}[len(fp4_of(plan))]

    _, tried, best = try_plans(model, request(COSTS), lone_mesh, passes=3, predict=predict)
    assert [one.name for one in tried] == ["solver", "lowest"] and best.trial.name == taken
    assert tried[1].increase == pytest.approx(-4.84, abs=1e-3), "what was measured stands in the record"


def test_errors_that_do_not_add_up_are_found_by_holding_linears(lone_mesh):
    """The three that are predicted cheapest cost a nat together; with any of them held they do not."""
    model = Model(COSTS, together=[((NAMES[3], NAMES[4]), 1.0)])
    _, tried, best = try_plans(model, request(COSTS), lone_mesh)
    assert fp4_of(best) == [2, 4, 5] and best.trial.name == f"hold {NAMES[3]}"
    assert best.trial.increase == pytest.approx(0.045, abs=1e-5)
    first = best.trial.tried[0]
    assert first.name == "solver" and first.increase == pytest.approx(1.035, abs=1e-5)
    assert len({str(one.plan.linears) for one in tried}) == len(tried), "nothing is run twice"


def test_holds_add_up(lone_mesh):
    """Two pairs that must not be together: the second hold keeps the first."""
    model = Model(COSTS, together=[((NAMES[3], NAMES[4]), 1.0), ((NAMES[2], NAMES[5]), 1.0)])
    _, _, best = try_plans(model, request(COSTS), lone_mesh)
    assert not {3, 4} <= set(fp4_of(best)) and not {2, 5} <= set(fp4_of(best))
    assert len(fp4_of(best)) == 3, "at the target"


def test_holds_add_up_below_what_else_is_best(lone_mesh):
    """Each of two linears costs a nat, but not with all in FP4: one hold measures worse than that, and two better."""
    model = Model(COSTS, together=[(NAMES[3:4], 1.0), (NAMES[4:5], 1.0), (NAMES, -1.5)])
    _, tried, best = try_plans(model, request(COSTS), lone_mesh)
    assert fp4_of(best) == [1, 2, 5] and best.trial.name == f"hold {NAMES[4]}"
    assert [one.name for one in tried if one.taken] == ["solver", "lowest", best.trial.name]


def test_a_held_linear_keeps_what_costs_nothing(lone_mesh):
    """By GEMM, it is fprop that costs: dgrad and wgrad of a held linear stay in FP4."""
    options = [FP8, LinearPrecision.parse("fp8/fp4/fp4"), FP4]
    quality = np.stack([np.zeros(len(NAMES)), np.zeros(len(NAMES)), np.array(COSTS)], axis=1)
    asked = SolveRequest(quality, np.tile([0.0, 2 / 3, 1.0], (len(NAMES), 1)) / len(NAMES), 0.75)
    solved = build_plan(asked.solve(), SHAPES, options, iteration=7, objective="snip", target=0.75)
    made = partial(build_plan, shapes=SHAPES, options=options, iteration=7, objective="snip", target=0.75)
    model = Model(COSTS, together=[((NAMES[4], NAMES[5]), 1.0)])
    tried = Trials(model, model.linears, lone_mesh, torch.device("cpu")).run(
        Proposals(lambda: [("solver", solved)], asked, SHAPES, options, made), 3
    )
    assert fp4_of(solved) == [4, 5] and tried[1].name == f"hold {NAMES[4]}"
    assert tried[1].plan.linears[NAMES[4]] == options[1] and fp4_of(tried[1].plan) == [3, 5]


def test_low_precision_everywhere_is_taken_where_it_measures_better(lone_mesh):
    """All in FP4 cost less than some: what one error does, another undoes."""
    model = Model(COSTS, together=[(NAMES, -0.5)])
    _, _, best = try_plans(model, request(COSTS), lone_mesh)
    assert fp4_of(best) == list(range(6)) and best.trial.name == best.objective == "lowest"
    assert best.achieved == pytest.approx(1.0) and best.solver.status == "none"


def test_noise_overrules_nothing(lone_mesh):
    """Random rounding alone tells the plans apart: the solver's stays."""
    chosen = [try_plans(Model([0.0] * 6, noise=noise), request(COSTS), lone_mesh)[2] for noise in (0.5, 1.0, 2.0)]
    assert [fp4_of(plan) for plan in chosen] == [[3, 4, 5]] * 3
    assert 0.001 < chosen[0].trial.error < 0.05


def test_plans_beyond_a_limit_are_not_tried(lone_mesh):
    """Neither the plan in force nor low precision everywhere; without the limit, both are."""
    in_force = Plan.by_hand({name: FP4 if i in (0, 1, 2, 3) else FP8 for i, name in enumerate(NAMES)}, SHAPES)
    limit = Limit("first two", np.array([[0.0, float(i < 2)] for i in range(len(NAMES))]), 1.0)
    for limits, rest in ([], ["in_force", "lowest"]), ([limit], []):
        asked = request(COSTS, limits=tuple(limits))
        _, tried, _ = try_plans(Model(COSTS), asked, lone_mesh, in_force=in_force)
        assert [one.name for one in tried if one.name in ("in_force", "lowest")] == rest


@pytest.mark.parametrize(
    "more",
    [
        {"fixed": np.array([0, *[-1] * 5])},
        {"ties": np.array([0, -1, 0, 0, -1, -1])},
        {"reserved": np.array([False, True]), "fixed": np.array([-1, -1, -1, 1, 1, 1])},
    ],
)
def test_a_plan_in_force_that_breaks_new_options_is_not_tried(more, lone_mesh):
    """A run that resumes with another --snip-fix or --snip-granularity holds a plan of the old ones."""
    in_force = Plan.by_hand({name: FP4 if i < 3 else FP8 for i, name in enumerate(NAMES)}, SHAPES)
    _, tried, _ = try_plans(Model(COSTS), request(COSTS, **more), lone_mesh, in_force=in_force)
    assert tried[0].name == "solver" and "in_force" not in [one.name for one in tried]


@pytest.mark.parametrize(("linears", "stays"), [([0, 1, 2], True), ([0, 1], False)])
def test_the_plan_in_force_stays_if_it_measures_better_and_meets_the_target(linears, stays, lone_mesh):
    precisions = {name: FP4 if i in linears else FP8 for i, name in enumerate(NAMES)}
    in_force = Plan.by_hand(precisions, SHAPES, iteration=3)
    model = Model([-0.1, -0.1, -0.1, 0.02, 0.01, 0.005])
    _, tried, best = try_plans(model, request(COSTS), lone_mesh, passes=4, in_force=in_force)
    assert ("in_force" in [one.name for one in tried]) == stays
    assert (best.iteration == 3 and best.objective == "by hand") == stays


def test_losses_that_are_not_finite(lone_mesh):
    """A plan without a finite loss is never taken, nor any if all are so; without BF16's there is no trial."""
    model = Model(COSTS, together=[((NAMES[3], NAMES[4], NAMES[5]), math.nan)])
    _, tried, best = try_plans(model, request(COSTS), lone_mesh)
    assert not {3, 4, 5} <= set(fp4_of(best)) and math.isfinite(best.trial.increase)
    assert tried[0].record == TriedRecord("solver", None, None, None)
    assert try_plans(Model([math.nan] * 6), request(COSTS), lone_mesh)[2] is None
    with pytest.raises(TrialFailed, match="the loss in BF16 is nan"):
        try_plans(Model(COSTS, base=math.nan), request(COSTS), lone_mesh)


def test_sequences_without_a_token_that_counts(lone_mesh):
    model = Model(COSTS)
    with pytest.raises(TrialFailed, match="no token of its sequences counts in the loss"):
        Trials(lambda *context: torch.zeros(0), model.linears, lone_mesh, torch.device("cpu"))


def test_no_more_passes_than_asked_for(lone_mesh):
    model = Model(COSTS, together=[((NAMES[3], NAMES[4]), 1.0)])
    for passes in (2, 3, 5):
        trials, tried, _ = try_plans(model, request(COSTS), lone_mesh, passes)
        assert trials.passes == passes == len(tried) + 1


def test_fixed_tied_and_staged_linears_stay_so(lone_mesh):
    """Every plan that is run keeps what the request asks for."""
    ties, stage = np.array([0, -1, 0, -1, -1, -1]), np.array([0, 0, 0, 1, 1, 1])
    fixed = np.array([-1, -1, -1, -1, 0, -1])
    asked = request([0.01, 0.5, 0.02, 0.03, 0.0, 0.04], ties=ties, stage=stage, fixed=fixed)
    model = Model(COSTS, together=[((NAMES[0], NAMES[2]), 1.0)])
    _, tried, best = try_plans(model, asked, lone_mesh)
    for one in tried:
        fp4 = fp4_of(one.plan)
        assert (0 in fp4) == (2 in fp4) and 4 not in fp4
        assert sum(i < 3 for i in fp4) >= 1.5 and sum(i >= 3 for i in fp4) >= 1.5
    assert fp4_of(best)[:3] == [0, 1, 2] or 0 in fp4_of(best), "the first stage cannot do without them"


def test_plans_are_solved_only_when_they_are_tried(lone_mesh, monkeypatch):
    """A trial of two passes solves nothing; "lowest" is no solve, and the rules are one each."""
    solves = []
    solve = SolveRequest.solve
    monkeypatch.setattr(SolveRequest, "solve", lambda request: solves.append(1) or solve(request))
    found = {}
    for passes in (2, 3, 4, 5):
        solves.clear()
        try_plans(Model(COSTS), request(COSTS), lone_mesh, passes)
        found[passes] = len(solves) - 1  # the plan itself
    assert found == {2: 0, 3: 0, 4: 1, 5: 2}


def test_what_was_predicted_stands_beside_what_was_measured(lone_mesh, caplog):
    """Of every plan: in its record and in the log."""
    model, asked = Model(COSTS, together=[((NAMES[3], NAMES[4]), 1.0)]), request(COSTS)
    costs = {name: {"bf16": 0.0, "fp8": 0.0, "fp4": cost} for name, cost in zip(NAMES, COSTS)}
    solved = plan_of(asked.solve())
    trials = Trials(model, model.linears, lone_mesh, torch.device("cpu"))
    first = partial(first_plans, solved, asked, SHAPES, OPTIONS, plan_of, None)
    proposals = Proposals(first, asked, SHAPES, OPTIONS, plan_of)
    with caplog.at_level(logging.INFO):
        tried, best = try_plan(trials, proposals, 8, solved, Predictions(costs, {}))
    for one in best.trial.tried:
        plan = next(other.plan for other in tried if other.name == one.name)
        assert one.predicted == pytest.approx(sum(COSTS[i] for i in fp4_of(plan)))
    assert best.trial.tried[0].predicted == pytest.approx(0.035) and len(tried) == 7
    assert "best of 7 plans tried on 4096 tokens" in caplog.text and f"hold {NAMES[3]} 0.045 +-" in caplog.text
    assert "solver 1.035 +- " in caplog.text and "(predicted 0.035)" in caplog.text


def test_a_proposal_that_fails_fails_the_trial(lone_mesh):
    def propose(tried):
        raise OSError("no solver")

    model = Model(COSTS)
    with pytest.raises(TrialFailed, match="no solver"):
        Trials(model, model.linears, lone_mesh, torch.device("cpu")).run(propose, 4)


def test_a_record_travels_in_the_plan_s_file(lone_mesh, tmp_path):
    _, tried, best = try_plans(Model(COSTS), request(COSTS), lone_mesh)
    best.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.trial == best.trial and read.trial.tried == [one.record for one in tried]
    assert read.hash == best.hash == dataclasses.replace(best, trial=None).hash


@pytest.mark.parametrize(
    ("tokens", "together", "stages", "samples"),
    [(8192, 1, 1, 64), (100, 1, 1, 1), (129, 2, 1, 2), (129, 2, 4, 8), (8192, 64, 8, 512)],
)
def test_samples_fill_microbatches_and_stages(tokens, together, stages, samples):
    assert samples_of(tokens, 128, together, stages) == samples
