"""Multiple-choice knapsack: LP bound and greedy plan, reduction by reduced costs.  Used by ilp.py and makespan.py.

Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), ch. 11 (hulls, greedy, reduced costs).
Convention: G groups with O options each and R resources; cost [G, O] >= 0, inf = ruled out, at least one 0 in
a row; deficit [R, G, O] whole units >= 0; per resource, sum of deficits <= capacity.  Most blocks have R = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Deficits with a common unit stay exact up to this many of it; others are rounded to 2^-20 of the top.
EXACT_LIMIT, ROUNDED_STEPS = 2**24, 2**20


@dataclass(frozen=True)
class Block:
    """min sum cost[g, o_g] subject to sum_g deficit[r, g, o_g] <= capacity[r] for every resource r.

    cost [G, O], deficit [R, G, O], capacity [R].
    """

    cost: Floats
    deficit: Ints
    capacity: Ints

    def cost_of(self, choice: Ints) -> float:
        """Cost of one option per group; choice [G]."""
        return float(self.cost[np.arange(len(choice)), choice].sum())

    def deficit_of(self, choice: Ints) -> Ints:
        """Deficits [R] of one option per group; choice [G]."""
        used: Ints = self.deficit[:, np.arange(len(choice)), choice].sum(axis=1)
        return used

    def fits(self, choice: Ints) -> bool:
        """Whether every capacity holds; choice [G]."""
        return bool((self.deficit_of(choice) <= self.capacity).all())


@dataclass(frozen=True)
class Greedy:
    """A plan of a block: choice [G], its cost, a lower bound on any plan's cost, prices [R] of one unit."""

    choice: Ints
    cost: float
    bound: float
    prices: Floats


@dataclass(frozen=True)
class Core:
    """What is left of a block: options [V] of open groups, numbered 0..G'-1, and the part already decided.

    choice [G] holds the decided groups' options (and the greedy plan's for open ones); group [V], option [V]
    and open_groups [G'] say where variable v stands; cost [V] in the block's unit less each group's
    smallest, constant: what that and the decided groups cost; deficit [R, V]; start [V] the greedy plan as 0/1.
    """

    choice: Ints
    open_groups: Ints
    group: Ints
    option: Ints
    cost: Floats
    deficit: Ints
    capacity: Ints
    constant: float
    start: Floats

    def lift(self, variables: Ints) -> Ints:
        """Plan of the block, [G], from the chosen variable of each open group, [G']."""
        full = self.choice.copy()
        full[self.open_groups] = self.option[variables]
        return full


def whole_units(deficit: Floats, slack: float, *, strict: bool = True) -> tuple[Ints, int]:
    """Deficits [G, O] and slack in whole units, so that HiGHS's tolerances cannot blur the budget.

    FLOP shares have a common unit and stay exact.  Others are rounded.  strict: up, and slack down: a plan that
    fits in units fits in truth, and one that fits by less than G * 2^-20 of the largest deficit may be lost.
    Else all down: a plan that fits in truth fits in units, and may break the slack by as little.
    """
    values = np.unique(deficit[deficit > 0])
    if not len(values):
        return np.zeros(deficit.shape, np.int64), 0
    top = float(values[-1])
    unit = top
    for value in values.tolist():
        while value > 1e-10 * top:
            unit, value = value, unit % value
        if unit < top / EXACT_LIMIT:
            break
    steps = np.rint(top / unit) if unit > 0 else np.inf
    if steps <= EXACT_LIMIT:
        unit = top / steps
        whole = np.rint(deficit / unit)
        if np.abs(deficit / unit - whole).max() < 1e-6:
            return whole.astype(np.int64), int(slack / unit)
    unit = top / ROUNDED_STEPS
    rounded = np.ceil(deficit / unit - 1e-6) if strict else np.floor(deficit / unit)
    return rounded.astype(np.int64), int(slack / unit)


def lagrangian_greedy(block: Block) -> Greedy:
    """The LP relaxation's bound and a feasible plan from its vertex, improved by single changes; R = 1.

    Starts with each group's cheapest option and walks down the lower hulls of (deficit, cost), the step with
    the least cost per unit first, until the capacity holds.
    """
    ((deficit,), (capacity,)) = block.deficit, block.capacity.tolist()
    # Cheapest first, of equally cheap ones the smallest deficit.
    choice = np.lexsort((deficit, block.cost), axis=1)[:, 0]
    need = int(block.deficit_of(choice)[0]) - capacity
    price = 0.0
    if need > 0:
        steps = hull_steps(block.cost, deficit, choice)
        order = np.argsort(steps.ratio, kind="stable")
        last = int(np.searchsorted(np.cumsum(steps.units[order]), need))
        price = float(steps.ratio[order[last]])
        for step in order[: last + 1]:
            choice[steps.group[step]] = steps.option[step]
    dual = block.cost + price * deficit
    bound = float(dual.min(axis=1).sum()) - price * capacity
    choice = improve_singly(block, choice)
    cost = block.cost_of(choice)
    # The sums above carry rounding; a bound may be a little low, never high.
    slop = 1e-13 * (float(dual.min(axis=1).sum()) + price * capacity)
    return Greedy(choice, cost, min(max(bound - slop, 0.0), cost), np.array([price]))


@dataclass(frozen=True)
class Steps:
    """Steps down the hulls, [S] each, in order within a group: cost per unit, units, group, new option."""

    ratio: Floats
    units: NDArray[Any]
    group: Ints
    option: Ints


def hull_steps(cost: Floats, deficit: NDArray[Any], start: Ints) -> Steps:
    """Steps of each group along the lower hull of (deficit, cost), from its option ``start`` [G] to the least deficit.

    cost and deficit [G, O]; deficits whole or not.
    """
    rows = np.arange(len(start))
    current, floor = start.copy(), np.zeros(len(start))
    parts: list[tuple[Floats, NDArray[Any], Ints, Ints]] = [
        (np.empty(0), np.empty(0, deficit.dtype), np.empty(0, np.int64), np.empty(0, np.int64))
    ]
    while True:
        units = deficit[rows, current][:, None] - deficit
        extra = cost - cost[rows, current][:, None]
        ratio = np.where(units > 0, extra / np.where(units > 0, units, 1), np.inf)
        best = ratio.min(axis=1)
        # Of equal ratios the longest step, so that the hull has no collinear points.
        option = np.where(ratio <= best[:, None], units, -1).argmax(axis=1)
        moves = np.flatnonzero(np.isfinite(best))
        if not len(moves):
            break
        floor = np.maximum(floor, np.where(np.isfinite(best), best, 0.0))  # convex despite rounding
        parts.append((floor[moves], units[moves, option[moves]], moves, option[moves]))
        current[moves] = option[moves]
    ratio_, units_, group_, option_ = (np.concatenate(column) for column in zip(*parts))
    return Steps(ratio_, units_, group_, option_)


def improve_singly(block: Block, choice: Ints) -> Ints:
    """Change one group of a plan [G] at a time while that lowers the cost and the capacities hold."""
    choice, rows = choice.copy(), np.arange(len(choice))
    for _ in range(4 * block.cost.size):  # each change lowers the cost; the limit is for rounding's sake
        slack = block.capacity - block.deficit_of(choice)
        extra = block.deficit - block.deficit[:, rows, choice][:, :, None]
        fits = (extra <= slack[:, None, None]).all(axis=0)
        gain = np.where(fits, block.cost[rows, choice][:, None] - block.cost, 0.0)
        group, option = np.unravel_index(int(gain.argmax()), gain.shape)
        if not gain[group, option] > 0:
            break
        choice[group] = option
    return choice


def reduced(block: Block, greedy: Greedy) -> Core | None:
    """Drop options that no plan better than the greedy one can hold; None if nothing is left to decide."""
    dual = block.cost + np.tensordot(greedy.prices, block.deficit, axes=1)
    extra = dual - dual.min(axis=1, keepdims=True)
    rows = np.arange(len(dual))
    keep = greedy.bound + extra <= greedy.cost * (1 + 1e-9)
    keep &= ~_dominated(block)
    keep[rows, greedy.choice] = True
    is_open = keep.sum(axis=1) > 1
    open_groups = np.flatnonzero(is_open)
    if not len(open_groups):
        return None
    choice = np.where(is_open, greedy.choice, keep.argmax(axis=1))
    kept = keep[open_groups]
    cost = np.where(kept, block.cost[open_groups], np.inf)
    deficit = np.where(kept, block.deficit[:, open_groups], np.iinfo(np.int64).max)
    least_cost, least_deficit = cost.min(axis=1), deficit.min(axis=2)
    group, option = np.nonzero(kept)
    decided = np.flatnonzero(~is_open)
    used = block.deficit[:, decided, choice[decided]].sum(axis=1) + least_deficit.sum(axis=1)
    return Core(
        choice=choice,
        open_groups=open_groups,
        group=group,
        option=option,
        cost=cost[group, option] - least_cost[group],
        deficit=deficit[:, group, option] - least_deficit[:, group],
        capacity=block.capacity - used,
        constant=float(block.cost[decided, choice[decided]].sum()) + float(least_cost.sum()),
        start=(option == greedy.choice[open_groups][group]).astype(np.float64),
    )


def _dominated(block: Block) -> NDArray[np.bool_]:
    """[G, O]: another option of the group is no worse in all, and better in one or earlier in the list."""
    measures = [block.cost, *block.deficit]
    no_worse = np.logical_and.reduce([m[:, None, :] <= m[:, :, None] for m in measures])
    same = np.logical_and.reduce([m[:, None, :] == m[:, :, None] for m in measures])
    earlier = np.arange(block.cost.shape[1])[None, :] < np.arange(block.cost.shape[1])[:, None]
    by_other: NDArray[np.bool_] = (no_worse & (~same | earlier)).any(axis=2)
    return by_other
