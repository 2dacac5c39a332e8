"""The ILP against exhaustive search, its bounds, its errors, and a 70B-sized instance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_snip.snip.ilp import BUDGET_TOLERANCE, InfeasibleTarget, _blocks, _check, solve
from megatron_snip.snip.knapsack import lagrangian_greedy

COST_SCALES = (1e-9, 1e-6, 1e-3, 1.0, 1e3)


def flop_shares(rng, linears, options):
    """FP4 shares of linears of Llama-like sizes: option k puts k of options - 1 parts of the GEMMs in FP4."""
    flops = rng.choice([4, 16, 43, 56, 7], size=linears) * 2**20
    return flops[:, None] / flops.sum() * np.linspace(0, 1, options)[None]


def random_instance(seed):
    """(quality_loss, efficiency, target, keywords): every kind of constraint, alone and together."""
    rng = np.random.default_rng(seed)
    linears, options = int(rng.integers(1, 13)), int(rng.integers(1, 4))
    quality = rng.lognormal(0, 2, (linears, options)) * rng.choice([1, 1, 1, -0.1], (linears, options))
    quality *= COST_SCALES[seed % len(COST_SCALES)]
    shares = flop_shares(rng, linears, options)
    saved = rng.random((linears, options)) if seed % 4 == 3 else shares[:, rng.permutation(options)]
    keywords = {}
    if seed % 2:
        keywords["stage"] = rng.integers(0, 4, linears)
    if seed % 3 == 1:
        ties = rng.integers(-1, 4, linears)
        keywords["ties"] = np.where(ties >= 0, ties + 4 * keywords.get("stage", 0), -1)
    if seed % 5 == 1:
        groups = keywords.get("ties", np.full(linears, -1))
        held = int(rng.integers(linears))
        alike = (groups == groups[held]) & (groups >= 0)
        alike[held] = True
        keywords["fixed"] = np.where(alike, rng.integers(options), -1)
    target = float(rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]))
    if "stage" not in keywords:
        target *= float(saved.max(axis=1).sum())
    return quality, saved, target, keywords


def exhaustive(quality, saved, target, *, stage=None, ties=None, fixed=None):
    """(least cost or None, most that each stage can save): every plan, one row each."""
    linears, options = quality.shape
    plans = np.indices((options,) * linears, dtype=np.int8).reshape(linears, -1)
    legal = np.ones(plans.shape[1], bool)
    for row, option in enumerate(np.full(linears, -1) if fixed is None else fixed):
        legal &= (option < 0) | (plans[row] == option)
    for tie in set(() if ties is None else ties[ties >= 0].tolist()):
        first, *others = np.flatnonzero(ties == tie)
        for row in others:
            legal &= plans[row] == plans[first]
    plans = plans[:, legal]
    stages = np.zeros(linears, int) if stage is None else stage
    for s in np.unique(stages):
        rows = np.flatnonzero(stages == s)
        saving = sum(saved[row][plans[row]] for row in rows)
        most = saved[rows].max(axis=1).sum()
        budget = target if stage is None else target * most
        plans = plans[:, saving >= budget - BUDGET_TOLERANCE * abs(saved[rows].max(axis=1).sum())]
    if not plans.shape[1]:
        return None
    return sum(quality[row][plans[row]] for row in range(linears)).min()


@pytest.mark.parametrize("block", range(20))
def test_equals_exhaustive_search(block):
    for seed in range(10 * block, 10 * block + 10):
        quality, saved, target, keywords = random_instance(seed)
        best = exhaustive(quality, saved, target, **keywords)
        if best is None:
            with pytest.raises(InfeasibleTarget):
                solve(quality, saved, target, gap=0, **keywords)
            continue
        found = solve(quality, saved, target, gap=0, **keywords)
        scale = np.abs(quality).max()
        assert found.objective == pytest.approx(best, abs=1e-9 * scale), f"seed {seed}"
        assert found.bound <= best + 1e-9 * scale, f"seed {seed}"
        assert found.gap < 1e-6 and found.status in ("greedy", "optimal"), f"seed {seed}: {found}"


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
    assert found.status in ("greedy", "optimal") and found.gap <= 1e-4
    chosen = saved[np.arange(560), found.choice]
    for s in range(8):
        assert chosen[stage == s].sum() >= 0.75 * saved[stage == s].max(axis=1).sum() * (1 - 1e-12)
    assert found.objective == pytest.approx(quality[np.arange(560), found.choice].sum())
    again = solve(quality, saved, 0.75, stage=stage)
    assert np.array_equal(again.choice, found.choice) and again.bound == found.bound


@pytest.mark.parametrize("seed", range(5))
def test_greedy_bound_is_a_bound(seed):
    """Bound <= exact optimum <= greedy plan, and the greedy plan fits."""
    quality, saved = llama_instance(56, 8, seed)
    problem = _check(quality, saved, 0.6, None, None, None)
    ((_, block, base),) = _blocks(problem)
    greedy = lagrangian_greedy(block)
    best = solve(quality, saved, 0.6, gap=0)
    assert greedy.bound <= best.objective - base <= greedy.cost * (1 + 1e-12)
    assert block.deficit_of(greedy.choice) <= block.capacity
    assert greedy.bound > 0.9 * greedy.cost  # and says something


def test_scale_and_shift_of_costs_change_nothing():
    quality, saved = llama_instance(56, 8)
    best = solve(quality, saved, 0.6, gap=0)
    shift = np.random.default_rng(1).normal(size=(56, 1)) * 1e-9 * quality.max()
    for factor in (1e-12, 1e9):
        moved = solve((quality + shift) * factor, saved, 0.6, gap=0)
        assert np.array_equal(moved.choice, best.choice)


def test_limits_return_a_feasible_plan_and_say_so():
    quality, saved = llama_instance(560, 8)
    exact = solve(quality, saved, 0.6, gap=0)
    assert exact.status == "optimal"
    for limits, status in (({"node_limit": 0}, "node_limit"), ({"time_limit": 0.0}, "time_limit")):
        found = solve(quality, saved, 0.6, gap=0, **limits)
        assert found.status == status
        assert saved[np.arange(560), found.choice].sum() >= 0.6 * (1 - 1e-12)
        assert found.bound <= exact.objective <= found.objective and found.gap > 0


def test_failing_highs_falls_back_to_the_greedy_plan(monkeypatch):
    quality, saved = llama_instance(56, 8)
    monkeypatch.setattr("megatron_snip.snip.ilp.run_highs", lambda *_, **__: (None, "fallback"))
    found = solve(quality, saved, 0.6, gap=0)
    assert found.status == "fallback" and saved[np.arange(56), found.choice].sum() >= 0.6 * (1 - 1e-12)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quality_loss": [[0, 1], [np.nan, 1]]}, "quality_loss has a non-finite number in row 1 of 2"),
        ({"efficiency": [[0, np.inf], [0, 1]]}, "efficiency has a non-finite number in row 0"),
        ({"quality_loss": [[0, 1, 2], [0, 1, 2]]}, r"quality_loss is \[2, 3\] and efficiency \[2, 2\]"),
        ({"quality_loss": [], "efficiency": []}, "at least one of each"),
        ({"target": np.nan}, "target is nan"),
        ({"gap": -1.0}, "gap is -1"),
        ({"stage": [0]}, "stage must hold 2 whole numbers"),
        ({"ties": [0.5, 0.5]}, "ties must hold 2 whole numbers"),
        ({"fixed": [0, 2]}, r"fixed\[1\] is 2, but there are 2 options"),
        (
            {"ties": [0, 0], "fixed": [0, 1]},
            r"linears \[0, 1\] are tied \(id 0\) but fixed to options \[0, 1\]",
        ),
        ({"ties": [7, 7], "stage": [0, 1]}, r"tied \(id 7\) across stages"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {"quality_loss": [[0, 1], [0, 1]], "efficiency": [[0, 1], [0, 1]], "target": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        solve(**arguments)


def test_stdout_stays_clean(capfd):
    quality, saved = llama_instance(560, 8)
    for limits in ({}, {"node_limit": 1}, {"time_limit": 0.01}):
        solve(quality, saved, 0.6, gap=0, **limits)
    assert capfd.readouterr() == ("", "")
