"""The ILP against exhaustive search, its bounds, its errors, and a 70B-sized instance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_snip.errors import UserError
from megatron_snip.quant import LinearShape
from megatron_snip.snip.plan import ilp, program
from megatron_snip.snip.plan.cost import GemmTimes, efficiency
from megatron_snip.snip.plan.ilp import InfeasibleTarget
from megatron_snip.snip.plan.milp import Answer
from megatron_snip.snip.plan.program import Limit, Terms, dominated
from megatron_snip.snip.plan.recipes import recipe_options
from tests.unit.snip.plan.exhaustive import coupled_instance, exhaustive, random_instance, within_constraints

SEEDS = [range(10 * block, 10 * block + 10) for block in range(20)]


def solve(*terms, **more):
    return ilp.solve(Terms(*terms, **more))


def solve_pareto(quality, saved, targets, **more):
    return ilp.solve_pareto(Terms(quality, saved, 0.0, **more), targets)


def checked(*terms, **more):
    return program.checked(Terms(*terms, **more))


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_equals_exhaustive_search(seeds):
    for seed in seeds:
        quality, saved, target, keywords = random_instance(seed)
        best, makespan = exhaustive(quality, saved, target, **keywords)
        if best is None:
            with pytest.raises(InfeasibleTarget):
                solve(quality, saved, target, gap=0, **keywords)
            continue
        found = solve(quality, saved, target, gap=0, **keywords)
        scale = np.abs(quality).max()
        assert found.objective == pytest.approx(best, abs=1e-9 * scale), f"seed {seed}"
        assert found.bound <= best + 1e-9 * scale, f"seed {seed}"
        assert found.gap < 1e-6 and found.status == "optimal", f"seed {seed}: {found}"
        assert found.makespan == (None if makespan is None else pytest.approx(makespan, rel=1e-9)), f"seed {seed}"
        legal = {name: value for name, value in keywords.items() if name not in ("current", "churn")}
        assert within_constraints(found.choice, saved, target, makespan=found.makespan, **legal), f"seed {seed}"


def test_makespans_that_the_target_couples_equal_exhaustive_search():
    """Those that relaxed plans reach, and those that are raised to what a whole plan can do."""
    raised = 0
    for seed in range(120):
        quality, saved, target, keywords = coupled_instance(seed)
        best, makespan = exhaustive(quality, saved, target, **keywords)
        found = solve(quality, saved, target, gap=0, **keywords)
        program = checked(quality, saved, target, **keywords)
        raised += found.makespan > ilp._ideal_makespan(program, program.budgets[0]) * (1 + 1e-9)
        assert found.makespan == pytest.approx(makespan, rel=1e-9), f"seed {seed}"
        assert found.objective == pytest.approx(best, abs=1e-9 * quality.max()), f"seed {seed}"
        assert found.bound <= best + 1e-9 * quality.max(), f"seed {seed}"
        assert found.gap < 1e-6 and found.status == "optimal", f"seed {seed}: {found}"
    assert 20 < raised < 100


@pytest.mark.parametrize("answer", [None, Answer(np.zeros(56, np.int64), 0.0, 0.0, "optimal")], ids=["none", "broken"])
def test_no_plan_and_one_that_breaks_a_constraint_are_refused(answer, monkeypatch):
    quality, saved = llama_instance(56, 8)
    monkeypatch.setattr(ilp, "run_highs", lambda *_: answer)
    with pytest.raises(UserError, match="found no plan within 30 seconds and 20000 nodes; raise its limits"):
        solve(quality, saved, 0.6)


def test_the_random_instances_hold_every_constraint():
    kinds = [frozenset(random_instance(seed)[3]) for seeds in SEEDS for seed in seeds]
    for kind in ("stage", "time", "ties", "fixed", "reserved", "current", "limits"):
        assert sum(kind in kinds_ for kinds_ in kinds) >= 10, kind
    assert sum(not kinds_ for kinds_ in kinds) >= 20, "the global target alone"


def llama_instance(linears, options, seed=0):
    """A per-GEMM objective with outliers and Llama-2's sizes: options are subsets of three GEMMs in FP4."""
    rng = np.random.default_rng(seed)
    flops = np.tile([64, 8, 8, 64, 224, 224, 224], linears // 7).astype(float)
    parts = np.array([[(option >> gemm) & 1 for gemm in range(3)] for option in range(options)])
    cost = rng.lognormal(0, 2, (linears, 3)) * [1, 0.01, 0.05] * flops[:, None]
    return cost @ parts.T, flops[:, None] / flops.sum() * parts.mean(axis=1)[None]


def test_70b_sized_instance_is_proved():
    quality, saved = llama_instance(560, 8)
    stage = np.arange(560) // 70
    found = solve(quality, saved, 0.75, stage=stage)
    assert found.status == "optimal" and found.gap <= 1e-4
    chosen = saved[np.arange(560), found.choice]
    for s in range(8):
        assert chosen[stage == s].sum() >= 0.75 * saved[stage == s].max(axis=1).sum() * (1 - 1e-12)
    assert found.objective == pytest.approx(quality[np.arange(560), found.choice].sum())
    again = solve(quality, saved, 0.75, stage=stage)
    assert np.array_equal(again.choice, found.choice) and again.bound == found.bound


def test_scale_and_shift_of_costs_change_nothing():
    quality, saved = llama_instance(56, 8)
    best = solve(quality, saved, 0.6, gap=0)
    shift = np.random.default_rng(1).normal(size=(56, 1)) * 1e-9 * quality.max()
    for factor in (1e-12, 1e9):
        moved = solve((quality + shift) * factor, saved, 0.6, gap=0)
        assert np.array_equal(moved.choice, best.choice)


def test_limits_are_said(monkeypatch):
    """HiGHS proves instances of this size at the first node, so it is asked for a bound that it did not reach."""
    quality, saved = llama_instance(560, 8)
    exact, run = solve(quality, saved, 0.6, gap=0), ilp.run_highs
    assert exact.status == "optimal"
    with pytest.raises(UserError, match="found no plan within 0 seconds"):
        solve(quality, saved, 0.6, gap=0, time_limit=0.0)
    monkeypatch.setattr(ilp, "run_highs", lambda *given: replace(run(*given), bound=0.0, status="node_limit"))
    found = solve(quality, saved, 0.6, gap=0)
    assert found.status == "node_limit" and found.gap == 1.0 and found.bound < found.objective == exact.objective
    timed = solve(quality, saved, 0.6, stage=np.arange(560) // 70, time=1.0 - saved)
    assert timed.status == "node_limit"


def test_small_costs_beside_a_large_one_are_told_apart():
    """One linear costs a million times what the plan does."""
    quality, saved = llama_instance(56, 8)
    alone = solve(quality, saved, 0.6, gap=0, fixed=np.where(np.arange(56) == 3, 0, -1))
    quality[3] *= 1e6 * alone.objective / quality[3].max()
    best = solve(quality, saved, 0.6, gap=0)
    assert best.choice[3] == 0 and best.objective == pytest.approx(alone.objective, rel=1e-9)


def test_target_of_everything_and_of_nothing():
    rng = np.random.default_rng(0)
    quality, saved = rng.random((9, 3)), rng.random((9, 3))
    everything = solve(quality, saved, saved.max(axis=1).sum())
    assert np.array_equal(everything.choice, saved.argmax(axis=1))
    nothing = solve(quality, saved, 0.0)
    assert np.array_equal(nothing.choice, quality.argmin(axis=1)) and nothing.gap == 0


def test_budget_holds_for_savings_without_a_common_unit():
    """Slack a hair below what the cheap plan wants: rounding to units must not let it through."""
    saved = np.array([[0, math.pi], [0, math.e]])
    unit = math.pi / 2**20
    slack = (math.floor(math.e / unit) + 0.01) * unit
    assert math.floor(slack / unit) == math.floor(math.e / unit) and slack < math.e
    found = solve([[0, 1], [0, 1]], saved, math.pi + math.e - slack)
    assert found.choice.tolist() == [1, 1]
    assert solve([[0, 1], [0, 1]], saved, math.pi - 1e-5).choice.tolist() == [1, 0]


def test_infeasible_targets_say_what_is_possible():
    quality, saved = np.zeros((4, 2)), np.array([[0, 0.25]] * 4)
    with pytest.raises(InfeasibleTarget, match=r"target 1\.1 is out of reach: at most 1 with") as caught:
        solve(quality, saved, 1.1)
    assert caught.value.reachable == pytest.approx(1.0)
    with pytest.raises(InfeasibleTarget, match=r"at most 0\.75 with these options and 1 fixed"):
        solve(quality, saved, 0.8, fixed=[0, -1, -1, -1])
    with pytest.raises(InfeasibleTarget, match=r"at most stage 3: 0\.5") as caught:
        solve(quality, saved, 0.8, stage=[3, 3, 5, 5], fixed=[0, -1, -1, -1])
    assert caught.value.reachable == pytest.approx(0.5)


def test_limits_out_of_reach_say_what_is_possible():
    """One alone, two that exclude each other, and one that leaves less than the target; the plan for that exists."""
    quality, saved = np.tile([0.0, 1.0], (4, 1)), np.tile([0.0, 0.25], (4, 1))
    with pytest.raises(InfeasibleTarget, match=r"bytes: at most 3 is out of reach, at least 4 with these options"):
        solve(quality, saved, 0.5, limits=[Limit("bytes", np.ones((4, 2)), 3.0)])
    few, many = Limit("few", 4 * saved, 1.0), Limit("many", -4 * saved, -2.0)
    with pytest.raises(InfeasibleTarget, match="no plan keeps few and many; raise a limit") as caught:
        solve(quality, saved, 0.0, limits=[few, many])
    assert caught.value.reachable == -math.inf
    for stage, reachable in ((None, 0.25), (np.array([0, 0, 0, 0]), 0.25), (np.array([0, 0, 1, 1]), 0.0)):
        with pytest.raises(InfeasibleTarget, match="out of reach: at most .* with few; lower the target") as caught:
            solve(quality, saved, 0.5, stage=stage, limits=[few])
        assert caught.value.reachable == pytest.approx(reachable, abs=1e-9)
        solve(quality, saved, max(0.0, caught.value.reachable * (1 - 1e-9)), stage=stage, limits=[few])


@pytest.mark.parametrize("limit", [Limit("bytes", np.ones((4, 3)), 1.0), Limit("bytes", np.ones((4, 2)), math.inf)])
def test_bad_limits_are_named(limit):
    with pytest.raises(UserError, match=r"bytes has values \[4, .\] and at most .*, but needs"):
        solve(np.zeros((4, 2)), np.zeros((4, 2)), 0.0, limits=[limit])
    bad = Limit("bytes", np.full((4, 2), np.nan), 1.0)
    with pytest.raises(UserError, match="bytes has a non-finite number in row 0"):
        solve(np.zeros((4, 2)), np.zeros((4, 2)), 0.0, limits=[bad])


def test_a_stage_whose_options_save_nothing_has_no_share_of_it():
    """By measured times a fixed linear may take longer than in any of the others' options."""
    saved = np.array([[0, 0, -0.5], [0, 1, 1]])
    with pytest.raises(
        InfeasibleTarget, match=r"at most stage 4: nothing, as no option saves anything there;"
    ) as caught:
        solve(np.zeros((2, 3)), saved, 0.5, stage=[4, 7], fixed=[2, -1], reserved=[False, False, True])
    assert caught.value.reachable == -np.inf
    assert solve(np.zeros((2, 3)), saved, 0.5, stage=[4, 7]).choice.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quality_loss": [[0, 1], [np.nan, 1]]}, "quality_loss has a non-finite number in row 1 of 2"),
        ({"efficiency": [[0, np.inf], [0, 1]]}, "efficiency has a non-finite number in row 0"),
        ({"quality_loss": [[0, 1, 2], [0, 1, 2]]}, r"quality_loss is \[2, 3\] and efficiency \[2, 2\]"),
        ({"quality_loss": [], "efficiency": []}, "at least one of each"),
        ({"target": np.nan}, "target is nan"),
        ({"stage": [0]}, "stage must hold 2 whole numbers"),
        ({"ties": [0.5, 0.5]}, "ties must hold 2 whole numbers"),
        ({"fixed": [0, 2]}, r"fixed\[1\] is 2, but there are 2 options"),
        (
            {"ties": [0, 0], "fixed": [0, 1]},
            r"linears \[0, 1\] are tied \(id 0\) but fixed to options \[0, 1\]",
        ),
        ({"ties": [7, 7], "stage": [0, 1]}, r"tied \(id 7\) across stages"),
        ({"time": [[1, 1], [1, 1]]}, "time is given without stage; say which stage"),
        ({"time": [[1, 1]], "stage": [0, 1]}, r"time is \[1, 2\], but must be \[linears, options\] = \[2, 2\]"),
        ({"time": [[1, 1], [1, -1]], "stage": [0, 1]}, r"time has a negative number in row 1: \[1.0, -1.0\]"),
        ({"time": [[1, np.nan], [1, 1]], "stage": [0, 1]}, "time has a non-finite number in row 0"),
        ({"reserved": [True]}, r"reserved must hold 2 truth values, one per option; got \[1\]"),
        ({"reserved": [True, True]}, "all options are reserved"),
        ({"current": [0, 5]}, r"current\[1\] is 5, but there are 2 options \(-1 is none\)"),
        ({"churn": -1.0}, "churn is -1.0, but must be a number of 0 or more, or 2 x 2 of them"),
        ({"churn": [1.0, 2.0]}, r"churn is \[1.0, 2.0\]"),
        ({"churn": np.inf}, "churn is inf"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {"quality_loss": [[0, 1], [0, 1]], "efficiency": [[0, 1], [0, 1]], "target": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        solve(**arguments)


@pytest.mark.parametrize("stages", [None, np.array([0, 0, 1, 1, 1])], ids=["whole", "each stage"])
def test_where_savings_are_free_no_more_are_taken_than_asked_for(stages):
    """As by GEMM: fprop costs, dgrad and wgrad do not."""
    draw = np.random.default_rng(3)
    for target in (0.0, 0.2, 0.35, 0.5, 0.6, 0.7):
        size = draw.integers(1, 30, (5, 1)) / 100
        saved, quality = size * [0.0, 1.0, 1.0, 2.0, 3.0], draw.uniform(1, 2, (5, 1)) * [0.0, 0.0, 0.0, 0.0, 1.0]
        wanted = target if stages is not None else target * saved.max(axis=1).sum()
        found = solve(quality, saved, wanted, stage=stages, gap=0)
        plans = np.array(list(itertools.product(range(5), repeat=5)))
        of_plans = saved[np.arange(5), plans]
        groups = [np.arange(5)] if stages is None else [np.flatnonzero(stages == s) for s in (0, 1)]
        reach = [of_plans[:, g].sum(axis=1) >= target * saved[g].max(axis=1).sum() - 1e-9 for g in groups]
        good = np.logical_and.reduce(reach)
        cost = quality[np.arange(5), plans].sum(axis=1)
        assert found.objective == pytest.approx(cost[good].min(), abs=1e-12)
        taken = saved[np.arange(5), found.choice].sum()
        if target <= 0.6:
            assert found.objective == found.gap == 0 and found.bound == pytest.approx(0, abs=1e-12)
            assert taken == pytest.approx(of_plans.sum(axis=1)[good & (cost == 0)].min())
        else:
            assert found.objective > 0


def test_churn_keeps_a_plan_that_is_little_worse():
    quality, saved = np.array([[0, 1.0], [0, 1.1], [0, 5.0]]), np.array([[0, 0.5]] * 3)
    assert solve(quality, saved, 0.5).choice.tolist() == [1, 0, 0]
    kept = solve(quality, saved, 0.5, current=[0, 1, 0], churn=0.2)
    assert kept.choice.tolist() == [0, 1, 0] and kept.churn == 0 and kept.objective == pytest.approx(1.1)
    left = solve(quality, saved, 0.5, current=[0, 0, 1], churn=0.2)
    assert left.choice.tolist() == [1, 0, 0] and left.churn == pytest.approx(0.4) == left.objective - 1.0
    one_way = solve(quality, saved, 0.5, current=[0, 1, -1], churn=[[0, 9], [0, 0]])
    assert one_way.choice.tolist() == [0, 1, 0], "leaving the second is free, entering the first is not"


def test_reserved_options_are_for_fixed_linears_alone():
    quality, saved = np.array([[1.0, 2.0, 0.0]] * 4), np.array([[0, 0.25, 0.3]] * 4)
    found = solve(quality, saved, 0.5, fixed=[2, -1, -1, -1], reserved=[False, False, True])
    assert found.choice[0] == 2 and sorted(found.choice[1:].tolist()) == [0, 0, 1]
    each = solve(quality, saved, 1.0, stage=[0, 0, 1, 1], reserved=[False, False, True])
    assert each.choice.tolist() == [1, 1, 1, 1], "1 is what the open options reach"


def test_makespan_spends_the_target_where_stages_are_slow():
    """Stage 0 has three linears, stage 1 one: all that is saved goes to the first, whatever it costs."""
    quality = np.array([[0, 9.0], [0, 8.0], [0, 7.0], [0, 1.0]])
    saved, time = np.array([[0, 1.0]] * 4), np.array([[2.0, 1.0]] * 4)
    stage = [4, 4, 4, 7]
    assert solve(quality, saved, 2).choice.tolist() == [0, 0, 1, 1]
    found = solve(quality, saved, 2, stage=stage, time=time)
    assert found.choice.tolist() == [0, 1, 1, 0] and found.makespan == 4.0
    assert solve(quality, saved, 0, stage=stage, time=time).makespan == 6.0
    everything = solve(quality, saved, 4, stage=stage, time=time)
    assert everything.choice.tolist() == [1, 1, 1, 1] and everything.makespan == 3.0
    with pytest.raises(InfeasibleTarget, match="target 3 is out of reach: at most 2 with these options and 2 fixed"):
        solve(quality, saved, 3, stage=stage, time=time, fixed=[0, 0, -1, -1])


def test_makespan_where_what_is_saved_takes_longer():
    """The FP4 share has to come from linears that FP4 makes slower: the target couples the stages."""
    rng = np.random.default_rng(0)
    quality, saved = llama_instance(56, 8)
    time = rng.random((56, 8)) + saved / saved.max()
    stage = np.arange(56) // 14
    found = solve(quality, saved, 0.6, stage=stage, time=time, gap=0)
    rows = np.arange(56)
    assert saved[rows, found.choice].sum() >= 0.6 * (1 - 1e-12) and found.status == "optimal"
    assert np.bincount(stage, time[rows, found.choice]).max() <= found.makespan * (1 + 1e-4)
    assert found.bound <= found.objective and found.gap < 1e-6
    free = solve(quality, saved, 0.6, gap=0)
    assert np.bincount(stage, time[rows, free.choice]).max() > found.makespan and free.objective <= found.bound


def test_pareto_is_each_target_apart():
    quality, saved = llama_instance(28, 8)
    targets = [0.75, 0.0, 0.5, 0.501, 0.5, 1.0]
    for keywords in ({}, {"stage": np.arange(28) // 14}, {"fixed": np.where(np.arange(28) == 3, 7, -1)}):
        found = solve_pareto(quality, saved, targets, gap=0, **keywords)
        for target, one in zip(targets, found, strict=True):
            assert one.objective == pytest.approx(solve(quality, saved, target, gap=0, **keywords).objective)
        assert found[2] is found[4] and found[1].objective <= found[2].objective <= found[0].objective
    coarse = solve_pareto(quality, saved, [0.5, 0.5001], fixed=np.where(np.arange(28) < 27, 7, -1))
    assert coarse[0] is coarse[1], "a plan that reaches the next target is taken for it"
    quarters = np.array([[0, 0.25]] * 4)
    timed = solve_pareto(4 * quarters, quarters, [0.3, 0.4], stage=[0, 0, 1, 1], time=0.25 - quarters / 2)
    assert timed[0].choice.sum() == timed[1].choice.sum() == 2
    assert [one.makespan for one in timed] == pytest.approx([0.425, 0.4]), "a higher target has a bound of its own"
    assert solve_pareto(quality, saved, []) == []
    with pytest.raises(InfeasibleTarget, match=r"target 1\.25 is out of reach: at most 1 "):
        solve_pareto(quality, saved, [0.5, 1.25, 1.1])
    with pytest.raises(ValueError, match="target is nan"):
        solve_pareto(quality, saved, [0.5, np.nan])


def test_stdout_stays_clean(capfd):
    quality, saved = llama_instance(560, 8)
    for limits in ({}, {"node_limit": 1}):
        solve(quality, saved, 0.6, gap=0, **limits)
    assert capfd.readouterr() == ("", "")


def recipes_instance(linears: int, seed: int):
    """Costs and saved time of the recipes of Blackwell: heavy-tailed costs of fprop's format, none of the others."""
    rng = np.random.default_rng(seed)
    options = recipe_options("recipes:blackwell", measured=False)
    scale = {"bf16": 0.0, "mxfp8": 0.01, "nvfp4": 1.0, "nvfp4_4over6": 0.9, "nvfp4_plain": 1.0}
    size = np.exp(2 * rng.standard_normal((linears, 1)))
    noise = {fmt: rng.uniform(0.7, 1.3, (linears, 1)) for fmt in scale}
    cost = np.hstack([size * noise[option.fprop] * scale[option.fprop] for option in options])
    shapes = [LinearShape(str(i), int(rng.integers(1, 5)), 128) for i in range(linears)]
    return cost, efficiency(shapes, options, "time", GemmTimes.published("b300"))


# 7 can be searched, 560 are as many as 70B has
@pytest.mark.parametrize("linears", [7, pytest.param(224, marks=pytest.mark.slow), 560])
def test_options_that_another_beats_change_no_plan(linears, monkeypatch):
    """They are left out before the solve, with the same objective; of the recipes few are left."""
    for seed, target in ((0, 0.5), (1, 0.9)):
        cost, saved = recipes_instance(linears, seed)
        left = ~dominated(checked(cost, saved, target))
        assert left.sum(axis=1).max() <= 20 < cost.shape[1], "of each linear"
        found = solve(cost, saved, target, gap=1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(ilp, "dominated", lambda program: np.zeros_like(program.allowed))
            whole = solve(cost, saved, target, gap=1e-6)
        assert found.objective == pytest.approx(whole.objective, rel=1e-5)
        assert left[np.arange(linears), found.choice].all()
        if linears == 7:
            best, _ = exhaustive_by_linear(cost, saved, target)
            assert found.objective == pytest.approx(best, rel=1e-5)


def exhaustive_by_linear(cost, saved, target):
    """The lowest cost, by adding one linear after the other and keeping only what nothing beats."""
    front = [(0.0, 0.0)]
    for row in range(len(cost)):
        every = sorted({(c + a, -(s + b)) for c, s in front for a, b in zip(cost[row], saved[row], strict=True)})
        front, most = [], -np.inf
        for c, s in every:
            if -s > most:
                front.append((c, -s))
                most = -s
    return min((c, s) for c, s in front if s >= target * (1 - 1e-9))


def test_what_beats_an_option():
    """More is saved for less; equal cost, a longer time, a reserved or a fixed option beat nothing."""
    cost, saved = [[1.0, 2.0, 2.0, 3.0]], [[0.5, 0.5, 0.7, 0.6]]
    assert dominated(checked(cost, saved, 0.1)).tolist() == [[False, True, False, True]]
    assert not dominated(checked([[1.0, 1.0]], [[0.5, 0.2]], 0.1)).any(), "the solver's to choose"
    slow = [[2.0, 1.0, 1.0, 1.0]]
    assert dominated(checked(cost, saved, 0.1, time=slow, stage=[0])).tolist() == [[False, False, False, True]]
    reserved = dominated(checked(cost, saved, 0.1, reserved=[True, False, False, False]))
    assert reserved.tolist() == [[False, False, False, True]]
    assert not dominated(checked(cost, saved, 0.1, fixed=[3]))[0, 3]
    tied = dominated(checked([*cost, [5.0, 1.0, 9.0, 9.0]], [*saved, *saved], 0.1, ties=[0, 0]))
    assert tied.tolist() == [[True, False, False, True]], "by the sums over what is tied"
