"""Multiple-choice knapsack of one stage: LP bound and greedy, reduction, HiGHS.  Used by ilp.py only.

Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), ch. 11 (hulls, greedy, reduced costs);
HiGHS, https://highs.dev.  Convention: G groups with O options each; cost [G, O] >= 0, inf = ruled out,
and at least one 0 in a row; deficit [G, O] whole units >= 0; sum of deficits <= capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """min sum cost[g, o_g] subject to sum deficit[g, o_g] <= capacity.  cost, deficit [G, O]."""

    cost: Floats
    deficit: Ints
    capacity: int

    def cost_of(self, choice: Ints) -> float:
        """Cost of one option per group; choice [G]."""
        return float(self.cost[np.arange(len(choice)), choice].sum())

    def deficit_of(self, choice: Ints) -> int:
        """Deficit of one option per group; choice [G]."""
        return int(self.deficit[np.arange(len(choice)), choice].sum())


@dataclass(frozen=True)
class Greedy:
    """A plan of a block: choice [G], its cost, a lower bound on any plan's cost, the price of one unit."""

    choice: Ints
    cost: float
    bound: float
    price: float


@dataclass(frozen=True)
class Core:
    """What is left of a block: options [V] of open groups, numbered 0..G'-1, and the part already decided.

    choice [G] holds the decided groups' options (and the greedy plan's for open ones); group [V], option [V]
    and open_groups [G'] say where variable v stands; cost [V] in the block's unit less each group's
    smallest, constant: what that and the decided groups cost; deficit [V]; start [V] the greedy plan as 0/1.
    """

    choice: Ints
    open_groups: Ints
    group: Ints
    option: Ints
    cost: Floats
    deficit: Ints
    capacity: int
    constant: float
    start: Floats

    def lift(self, variables: Ints) -> Ints:
        """Plan of the block, [G], from the chosen variable of each open group, [G']."""
        full = self.choice.copy()
        full[self.open_groups] = self.option[variables]
        return full


@dataclass(frozen=True)
class Found:
    """HiGHS's answer on a core: chosen variable per open group [G'] or None; bound without the constant."""

    choice: Ints | None
    bound: float


def lagrangian_greedy(block: Block) -> Greedy:
    """The LP relaxation's bound and a feasible plan from its vertex, improved by single changes.

    Starts with each group's cheapest option and walks down the lower hulls of (deficit, cost), the step with
    the least cost per unit first, until the capacity holds.
    """
    rows = np.arange(len(block.cost))
    # Cheapest first, of equally cheap ones the smallest deficit.
    choice = np.lexsort((block.deficit, block.cost), axis=1)[:, 0]
    need = block.deficit_of(choice) - block.capacity
    price = 0.0
    if need > 0:
        steps = _hull_steps(block, choice)
        order = np.argsort(steps.ratio, kind="stable")
        last = int(np.searchsorted(np.cumsum(steps.units[order]), need))
        price = float(steps.ratio[order[last]])
        for step in order[: last + 1]:
            choice[steps.group[step]] = steps.option[step]
    dual = block.cost + price * block.deficit
    bound = float(dual.min(axis=1).sum()) - price * block.capacity
    choice = _improve_singly(block, choice, rows)
    cost = block.cost_of(choice)
    # The sums above carry rounding; a bound may be a little low, never high.
    slop = 1e-13 * (float(dual.min(axis=1).sum()) + price * block.capacity)
    return Greedy(choice, cost, min(max(bound - slop, 0.0), cost), price)


@dataclass(frozen=True)
class _Steps:
    """Steps down the hulls, [S] each, in order within a group: cost per unit, units, group, new option."""

    ratio: Floats
    units: Ints
    group: Ints
    option: Ints


def _hull_steps(block: Block, start: Ints) -> _Steps:
    rows = np.arange(len(start))
    current, floor = start.copy(), np.zeros(len(start))
    parts: list[tuple[Floats, Ints, Ints, Ints]] = []
    while True:
        units = block.deficit[rows, current][:, None] - block.deficit
        extra = block.cost - block.cost[rows, current][:, None]
        ratio = np.where(units > 0, extra / np.maximum(units, 1), np.inf)
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
    return _Steps(ratio_, units_, group_, option_)


def _improve_singly(block: Block, choice: Ints, rows: Ints) -> Ints:
    """Change one group at a time while that lowers the cost and the capacity holds."""
    choice = choice.copy()
    for _ in range(4 * block.cost.size):  # each change lowers the cost; the limit is for rounding's sake
        slack = block.capacity - block.deficit_of(choice)
        extra = block.deficit - block.deficit[rows, choice][:, None]
        gain = np.where(extra <= slack, block.cost[rows, choice][:, None] - block.cost, 0.0)
        group, option = np.unravel_index(int(gain.argmax()), gain.shape)
        if not gain[group, option] > 0:
            break
        choice[group] = option
    return choice


def reduced(block: Block, greedy: Greedy) -> Core | None:
    """Drop options that no plan better than the greedy one can hold; None if nothing is left to decide."""
    dual = block.cost + greedy.price * block.deficit
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
    deficit = np.where(kept, block.deficit[open_groups], np.iinfo(np.int64).max)
    least_cost, least_deficit = cost.min(axis=1), deficit.min(axis=1)
    group, option = np.nonzero(kept)
    decided = np.flatnonzero(~is_open)
    used = int(block.deficit[decided, choice[decided]].sum()) + int(least_deficit.sum())
    return Core(
        choice=choice,
        open_groups=open_groups,
        group=group,
        option=option,
        cost=cost[group, option] - least_cost[group],
        deficit=deficit[group, option] - least_deficit[group],
        capacity=block.capacity - used,
        constant=float(block.cost[decided, choice[decided]].sum()) + float(least_cost.sum()),
        start=(option == greedy.choice[open_groups][group]).astype(np.float64),
    )


def _dominated(block: Block) -> NDArray[np.bool_]:
    """[G, O]: another option of the group is no worse in both, and better in one or earlier in the list."""
    cost, deficit = block.cost, block.deficit
    no_worse = (cost[:, None, :] <= cost[:, :, None]) & (deficit[:, None, :] <= deficit[:, :, None])
    same = (cost[:, None, :] == cost[:, :, None]) & (deficit[:, None, :] == deficit[:, :, None])
    earlier = np.arange(cost.shape[1])[None, :] < np.arange(cost.shape[1])[:, None]
    by_other: NDArray[np.bool_] = (no_worse & (~same | earlier)).any(axis=2)
    return by_other


def run_highs(core: Core, *, abs_gap: float, node_limit: int, seconds: float) -> tuple[Found | None, str]:
    """Solve a core.  abs_gap in the block's unit.  Returns (answer or None, status as in ilp.STATUSES)."""
    scale = float(core.cost.max()) or 1.0
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,  # the gap asked for is in abs_gap: HiGHS does not know the constant
        "mip_abs_gap": max(abs_gap / scale, 1e-12),
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
        "mip_max_nodes": node_limit,
        "time_limit": seconds,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_model(core, scale))
    solution = highspy.HighsSolution()
    solution.col_value = core.start
    highs.setSolution(solution)
    highs.run()
    outcome, info = highs.getModelStatus(), highs.getInfo()
    statuses = highspy.HighsModelStatus
    if outcome == statuses.kOptimal:
        status = "optimal"
    elif outcome == statuses.kTimeLimit:
        status = "time_limit"
    elif outcome in (statuses.kSolutionLimit, statuses.kIterationLimit):
        status = "node_limit"
    else:
        return None, "fallback"
    bound = float(info.mip_dual_bound) * scale if np.isfinite(info.mip_dual_bound) else 0.0
    return Found(_round(core, np.array(highs.getSolution().col_value)), bound), status


def _round(core: Core, values: Floats) -> Ints | None:
    """The chosen variable of each open group, [G'], or None if there is no plan or it breaks the capacity."""
    if len(values) != len(core.group):
        return None
    order = np.lexsort((values, core.group))  # within a group the largest value comes last
    chosen = order[np.searchsorted(core.group[order], np.arange(len(core.open_groups)), "right") - 1]
    fits = int(core.deficit[chosen].sum()) <= core.capacity
    return chosen if fits else None


def _model(core: Core, scale: float) -> highspy.HighsLp:
    """One-hot rows, then the capacity, column by column; each column has two entries."""
    count, groups = len(core.group), len(core.open_groups)
    common = int(np.gcd.reduce(core.deficit)) or 1
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, groups + 1
    model.col_cost_ = core.cost / scale
    model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
    model.row_lower_ = np.append(np.ones(groups), -np.inf)
    model.row_upper_ = np.append(np.ones(groups), float(core.capacity // common))
    index, value = np.empty(2 * count, np.int32), np.ones(2 * count)
    index[0::2], index[1::2] = core.group, groups
    value[1::2] = core.deficit / common
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = index, value
    model.integrality_ = [highspy.HighsVarType.kInteger] * count
    return model
