"""Plans whose slowest pipeline stage is as fast as their target allows.  Used by ilp.py only.

    1. M  = the least time of the slowest stage over ideal plans, which may split linears between options, that
            save exactly the target; raised to what a whole plan can do where none keeps it;
    2. minimise Q  subject to  target saved by the whole,  time of every stage <= M.

The target says how much is saved, so M is taken at that amount: without it the fastest plan would always be
the one that saves the most.  Where saving and time go together (a GEMM in FP4 saves time, every other takes
one time), stages that keep M reach the target by themselves and are solved apart; else the target couples
them, and its Lagrangian price gives bound, first plan and reduction.
Times without a common unit hold to 2^-20 of the largest difference between two options, for every linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_snip.snip.highs import Search, least_makespan, worst
from megatron_snip.snip.knapsack import (
    Block,
    Floats,
    Greedy,
    Ints,
    hull_steps,
    improve_singly,
    lagrangian_greedy,
    whole_units,
)
from megatron_snip.snip.program import BUDGET_TOLERANCE, Groups

_GROWTHS, _BISECTIONS = 40, 25


@dataclass(frozen=True)
class Balanced:
    """A plan [G] with its cost and bound above the sum of each group's least cost; bound on a stage's time."""

    choice: Ints
    cost: float
    bound: float
    makespan: float
    status: str


def solve_makespan(groups: Groups, stage: Ints, target: float, search: Search) -> Balanced:
    """The plan of the two steps above; stage [G] numbered from 0.  The target must be within reach."""
    makespan = ideal_makespan(groups, stage, target)
    block = _block(groups, stage, target, makespan)
    best, status = _stages_apart(block, stage, search)
    if int(block.deficit_of(best.choice)[0]) <= block.capacity[0]:
        return Balanced(best.choice, best.cost, best.bound, makespan, status)
    first = joint_greedy(block, stage)
    status = "greedy"
    if first is None:  # perhaps no whole plan keeps the ideal's time
        rows = np.arange(len(stage))
        taken = groups.time - groups.time.min(axis=1, keepdims=True)
        start = lagrangian_greedy(Block(taken, block.deficit[:1], block.capacity[:1])).choice
        if search.seconds_left > 0:
            start, status = least_makespan(
                groups.time, stage, block.deficit[0], int(block.capacity[0]), floor=makespan, start=start,
                node_limit=search.node_limit, seconds=search.seconds_left,
            )  # fmt: skip
        else:
            status = "time_limit"
        makespan = max(makespan, float(np.bincount(stage, groups.time[rows, start]).max()))
        block = _block(groups, stage, target, makespan)
        first = joint_greedy(block, stage, start)
        assert first is not None
    best, how = search.improve(block, first)
    return Balanced(best.choice, best.cost, best.bound, makespan, worst(status, how))


def ideal_makespan(groups: Groups, stage: Ints, target: float) -> float:
    """Step 1's M before it is raised: saved [G, O] and time [G, O], stage [G] numbered from 0."""
    forbidden = np.isinf(groups.saved)
    least = float(np.where(forbidden, np.inf, groups.saved).min(axis=1).sum())
    target = min(max(target, least), float(groups.saved.max(axis=1).sum()))
    members = [np.flatnonzero(stage == s) for s in range(int(stage.max()) + 1)]
    fastest = max(float(groups.time[rows].min(axis=1).sum()) for rows in members)
    levels = []
    # Within a time, ideal plans can save anything between a least and a most: the target must lie between.
    for saved, limit in ((groups.saved, target), (-groups.saved, -target)):
        cost = np.where(forbidden, np.inf, saved)
        levels.append(_level([_profile(cost[rows], groups.time[rows]) for rows in members], fastest, limit))
    return max(levels)


def _profile(cost: Floats, time: Floats) -> tuple[Floats, Floats]:
    """Breakpoints of one stage, times rising: (time [P], least cost [P] of an ideal plan within that time)."""
    time = np.where(np.isfinite(time), time, 0.0)
    start = np.lexsort((time, cost), axis=1)[:, 0]
    rows = np.arange(len(start))
    steps = hull_steps(cost, time, start)
    order = np.argsort(steps.ratio, kind="stable")
    units, extra = steps.units[order].astype(np.float64), (steps.ratio * steps.units)[order]
    times = float(time[rows, start].sum()) - np.append(0.0, np.cumsum(units))
    costs = float(cost[rows, start].sum()) + np.append(0.0, np.cumsum(extra))
    return times[::-1], costs[::-1]


def _level(profiles: list[tuple[Floats, Floats]], floor: float, limit: float) -> float:
    """The least time, ``floor`` or more, within which the profiles' costs sum to ``limit`` or less."""
    times = np.unique(np.concatenate([np.array([floor]), *(times for times, _ in profiles)]))
    times = times[times >= floor]
    total = np.sum([np.interp(times, *profile) for profile in profiles], axis=0)
    enough = np.flatnonzero(total <= limit)
    at = int(enough[0]) if len(enough) else len(times) - 1  # the last one, but for rounding
    if at == 0:
        return float(times[0])
    above, below = float(total[at - 1]) - limit, limit - float(total[at])
    share = above / (above + below) if above + below > 0 else 1.0
    return float(times[at - 1] + share * (times[at] - times[at - 1]))


def _block(groups: Groups, stage: Ints, target: float, makespan: float) -> Block:
    """Resource 0: what may be left unsaved in all; resource 1 + s: the time of stage s."""
    most, allowed = groups.saved.max(axis=1), np.isfinite(groups.saved)
    slack = max(0.0, float(most.sum()) - target + BUDGET_TOLERANCE * float(np.abs(most).sum()))
    unsaved, capacity = whole_units(np.where(allowed, most[:, None] - groups.saved, 0.0), slack)
    deficits, capacities = [unsaved], [capacity]
    fastest = groups.time.min(axis=1)
    for s in range(int(stage.max()) + 1):
        here = allowed & (stage == s)[:, None]
        slack = max(0.0, makespan * (1 + BUDGET_TOLERANCE) - float(fastest[stage == s].sum()))
        units, capacity = whole_units(np.where(here, groups.time - fastest[:, None], 0.0), slack, strict=False)
        deficits.append(units)
        capacities.append(capacity)
    cost = groups.cost - groups.cost.min(axis=1, keepdims=True)
    return Block(cost, np.array(deficits), np.array(capacities, np.int64))


def _of_stage(block: Block, s: int, rows: Ints) -> Block:
    """The part of a block in one stage, without the target."""
    return Block(block.cost[rows], block.deficit[1 + s : 2 + s, rows], block.capacity[1 + s : 2 + s])


def _stages_apart(block: Block, stage: Ints, search: Search) -> tuple[Greedy, str]:
    """The best plan if nothing but time counts: its cost bounds that of all that save the target too."""
    choice = np.zeros(len(stage), np.int64)
    cost = bound = 0.0
    status = "greedy"
    for s in range(len(block.capacity) - 1):
        rows = np.flatnonzero(stage == s)
        best, how = search.solve(_of_stage(block, s, rows))
        choice[rows], status = best.choice, worst(status, how)
        cost, bound = cost + best.cost, bound + best.bound
    return Greedy(choice, cost, bound, np.zeros(len(block.capacity))), status


def joint_greedy(block: Block, stage: Ints, plan: Ints | None = None) -> Greedy | None:
    """Bound and plan from a price on what is left unsaved, stages apart at each price; None without any plan.

    block as of ``_block``, stage [G]; plan [G]: one that is known to be good.
    """
    top = float(block.cost[np.isfinite(block.cost)].max()) or 1.0
    price, low, high = top / max(1, int(block.deficit[0].max())) / 100, 0.0, np.inf
    cost = np.inf if plan is None else block.cost_of(plan)
    bound, prices = 0.0, np.zeros(len(block.capacity))
    grown = bisected = 0
    while grown < _GROWTHS and bisected < _BISECTIONS:
        choice, below, at = _priced(block, stage, price)
        if below > bound:
            bound, prices = below, at
        if block.fits(choice):
            high, choice = price, improve_singly(block, choice)
            if block.cost_of(choice) < cost:
                plan, cost = choice, block.cost_of(choice)
        else:
            low = price
        grown, bisected = grown + (high == np.inf), bisected + (high < np.inf)
        price = price * 8 if high == np.inf else (low + high) / 2
    return None if plan is None else Greedy(plan, cost, min(bound, cost), prices)


def _priced(block: Block, stage: Ints, price: float) -> tuple[Ints, float, Floats]:
    """(plan [G], lower bound on the block's cost, prices [R]) if a unit of the first resource costs ``price``."""
    dual = block.cost + price * block.deficit[0]
    base = dual.min(axis=1)
    choice, prices = np.zeros(len(stage), np.int64), np.zeros(len(block.capacity))
    prices[0] = price
    bound, spent = float(base.sum()), price * float(block.capacity[0])
    bound -= spent + 1e-13 * (bound + spent)  # sums carry rounding; a bound may be a little low, never high
    for s in range(len(block.capacity) - 1):
        rows = np.flatnonzero(stage == s)
        part = _of_stage(block, s, rows)
        best = lagrangian_greedy(Block(dual[rows] - base[rows, None], part.deficit, part.capacity))
        choice[rows], prices[1 + s], bound = best.choice, best.prices[0], bound + best.bound
    return choice, bound, prices
