"""The joint program finds the best of all plans; the two programs that it joins are special cases."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_snip.errors import UserError
from megatron_snip.snip.plan.ilp import solve as solve_precision
from megatron_snip.snip.plan.program import Limit, Terms
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.program import GIB, Peaks
from megatron_snip.train.memory_plan.program import solve as solve_memory

EXACT = 1e-6  # of a solver that stops at a gap of 1e-4, on programs that it solves exactly


def made_up(seed, ranks=1, blocks=2, units=2, options=2, choices=2, shared=True, mixed=False):
    """A problem whose numbers are drawn; the units of a block may read one input."""
    draw = np.random.default_rng(seed)
    made, phases = [], 4
    for stage in range(ranks):
        count = blocks * units
        forms = tuple(range(options)) if seed % 3 else (0,) * (options - 1) + (1,)
        inputs = []
        for b in range(blocks if shared else 0):
            kept = draw.integers(50, 400, (max(forms) + 1, choices))
            kept[:, -1] = 0  # the last choice keeps nothing
            whole = np.where(kept.any(axis=0), kept.sum(axis=0) - 20, 0) if mixed else None
            more = draw.random(choices) / 4 if mixed else None
            inputs.append(joint.Input(b, tuple(range(b * units, (b + 1) * units)), forms, kept, whole, more))
        own = np.sort(draw.integers(0, 900, (phases, blocks, choices)), axis=2)[:, :, ::-1]
        made.append(
            joint.Rank(
                stage, stage * count + np.arange(count), np.repeat(np.arange(blocks), units),
                draw.integers(1000, 3000, phases), own, draw.integers(0, 200, (phases, count, options, choices)),
                inputs, draw.integers(0, 3, (phases, blocks)),
                np.cumsum(draw.random((blocks, choices)), axis=1),
                draw.random((count, options, choices)) * np.linspace(2, 1, options)[:, None],
                tuple(f"phase {p}" for p in range(phases)),
            )
        )  # fmt: skip
    cost = draw.lognormal(0, 1, (ranks * blocks * units, options)) * np.arange(options)
    return joint.Problem(made, cost, np.ones(cost.shape, bool))


def judged(problem, options, blocks):
    """Quality loss, the most bytes and the most seconds of a plan, from the definitions alone."""
    bytes_, seconds = 0, 0.0
    for rank, choice in zip(problem.ranks, blocks, strict=True):
        taken = sum(rank.block_seconds[b, c] for b, c in enumerate(choice))
        taken += sum(
            rank.unit_seconds[u, options[member], choice[rank.block[u]]] for u, member in enumerate(rank.members)
        )
        for phase, base in enumerate(rank.base):
            total = base + sum(rank.blocks[phase, b, c] for b, c in enumerate(choice))
            for u, member in enumerate(rank.members):
                total += rank.units[phase, u, options[member], choice[rank.block[u]]]
            for one in rank.inputs:
                held = {one.forms[options[rank.members[u]]] for u in one.units}
                c = choice[one.block]
                each = one.mixed[c] if len(held) > 1 and one.mixed is not None else sum(one.kept[f, c] for f in held)
                total += rank.flight[phase, one.block] * each
            bytes_ = max(bytes_, total)
        for one in rank.inputs:
            if one.more is not None and len({one.forms[options[rank.members[u]]] for u in one.units}) > 1:
                taken += one.more[choice[one.block]]
        seconds = max(seconds, taken)
    return sum(problem.cost[u, o] for u, o in enumerate(options)), bytes_, seconds


def every_plan(problem):
    """All plans, and [P, 3]: what `judged` says of each."""
    units, options = problem.cost.shape
    choices = [product(range(problem.choices), repeat=rank.blocks.shape[1]) for rank in problem.ranks]
    plans = list(product(product(range(options), repeat=units), product(*map(list, choices))))
    return plans, np.array([judged(problem, *plan) for plan in plans])


CASES = {
    "one rank": {},
    "three choices": {"blocks": 2, "units": 1, "choices": 3, "options": 3},
    "six blocks": {"blocks": 6, "units": 1, "choices": 2, "options": 2, "shared": False},
    "two ranks": {"ranks": 2, "blocks": 1, "units": 2, "choices": 3},
    "rows in place of two forms": {"mixed": True, "options": 3, "choices": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_best_of_all_plans(case, seed):
    problem = made_up(seed, **CASES[case])
    _, known = every_plan(problem)
    quality, bytes_, seconds = known.T
    for memory, loss in ((0.1, 0.5), (0.4, 0.2), (0.7, 0.8)):
        budget = int(np.quantile(bytes_, memory))
        most = float(np.quantile(quality[bytes_ <= budget], loss))
        fits = (bytes_ <= budget) & (quality <= most)
        found = joint.solve(problem, budget, most)
        told = (found.quality, max(found.peaks), max(found.seconds))
        assert told == pytest.approx(judged(problem, found.options, found.blocks), rel=1e-9)
        assert told[1] <= budget and told[0] <= most * (1 + EXACT)
        assert told[2] == pytest.approx(seconds[fits].min(), rel=1e-4) and max(found.gap, found.loss_gap) <= 1e-4
        best = fits & (seconds <= told[2] * (1 + EXACT))
        assert told[0] == pytest.approx(quality[best].min(), rel=1e-4)


def test_limits_and_fixed_linears_hold():
    problem = made_up(4, blocks=2, units=2)
    count = np.tile([0.0, 1.0], (4, 1))
    allowed = problem.allowed.copy()
    allowed[1] = False, True
    held = replace(problem, allowed=allowed, limits=[Limit("--snip-max", count, 2.0)])
    plans, known = every_plan(problem)
    kept = np.array([sum(options) <= 2 and options[1] == 1 for options, _ in plans])
    budget = int(np.quantile(known[kept, 1], 0.5))
    fits = kept & (known[:, 1] <= budget)
    found = joint.solve(held, budget, np.inf)
    assert max(found.seconds) == pytest.approx(known[fits, 2].min(), rel=1e-4)
    assert found.options[1] == 1 and found.options.sum() <= 2


def test_without_a_bound_on_memory_it_is_the_precision_program():
    problem = made_up(5, blocks=3, units=2, choices=2, options=2)
    rank = problem.ranks[0]
    flops = np.array([4.0, 1.0, 2.0, 3.0, 5.0, 2.5])
    again = np.array([1.0, 4 / 3])  # running fprop again is a third more
    seconds = flops[:, None, None] * np.array([1.0, 0.5])[:, None] * again
    blocks = np.array([[1.0, 1.5]] * 3)
    problem = replace(problem, ranks=[replace(rank, unit_seconds=seconds, block_seconds=blocks)])
    saved = (flops[:, None] * [0.0, 0.5]) / flops.sum() * 2
    alone = solve_precision(Terms(problem.cost, saved, 0.6, gap=0.0))
    found = joint.solve(problem, 10**9, alone.objective)
    assert found.blocks == ((0, 0, 0),)
    assert found.quality == pytest.approx(alone.objective, rel=EXACT)
    assert found.seconds[0] <= seconds[np.arange(6), alone.choice, 0].sum() + 3.0 + EXACT
    assert saved[np.arange(6), found.options].sum() >= 0.6 - EXACT


def test_with_one_option_it_is_the_memory_program():
    problem = made_up(6, blocks=5, units=1, options=1, choices=3, shared=False)
    rank = problem.ranks[0]
    peaks = Peaks(rank.base, rank.blocks + rank.units[:, :, 0], rank.stretch)
    seconds = rank.block_seconds + rank.unit_seconds[:, 0]
    _, known = every_plan(problem)
    for share in (0.1, 0.5, 0.9):
        budget = int(np.quantile(known[:, 1], share))
        alone = solve_memory(peaks, seconds, budget, "pipeline rank 0")
        found = joint.solve(problem, budget, 0.0)
        assert found.seconds[0] == pytest.approx(alone.seconds, rel=1e-4) and found.quality == 0


def test_separately_keeps_the_options():
    problem = made_up(7)
    plans, known = every_plan(problem)
    options = (1, 0, 0, 1)
    of_them = np.array([plan[0] == options for plan in plans])
    budget = int(np.quantile(known[of_them, 1], 0.3))
    found = joint.separately(problem, budget, np.array(options))
    assert tuple(found.options) == options
    assert max(found.seconds) == pytest.approx(known[of_them & (known[:, 1] <= budget), 2].min(), rel=1e-4)
    together = joint.solve(problem, budget, found.quality)
    assert max(together.seconds) <= max(found.seconds) * (1 + 1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_short_is_told(ranks):
    problem = made_up(8, ranks=ranks, blocks=1)
    made = [
        replace(
            rank, base=rank.base * GIB, blocks=rank.blocks * GIB, units=rank.units * GIB,
            inputs=[replace(one, kept=one.kept * GIB) for one in rank.inputs],
        )
        for rank in problem.ranks
    ]  # fmt: skip
    problem = replace(problem, ranks=made)
    _, known = every_plan(problem)
    most = float(np.quantile(known[:, 0], 0.5))
    least = int(known[known[:, 0] <= most, 1].min())
    with pytest.raises(UserError) as info:
        joint.solve(problem, least - 7 * GIB, most)
    need, short = re.search(r"at least ([\d.]+) GiB .*, ([\d.]+) more", str(info.value)).groups()
    assert float(need) == least / GIB and float(short) == 7.0
    joint.solve(problem, least, most)


def test_without_time_to_search_the_answer_is_the_start(monkeypatch):
    problem = made_up(7)
    _, known = every_plan(problem)
    budget = int(np.quantile(known[:, 1], 0.5))
    start = joint.separately(problem, budget, np.array((1, 0, 0, 1)))
    monkeypatch.setattr(joint, "_SECONDS", 0.0)
    found = joint.solve(problem, budget, start.quality, start)
    assert (found.seconds, found.quality, found.status) == (start.seconds, start.quality, "time_limit")
    assert found.gap == found.loss_gap == 1, "nothing is known of better plans"
