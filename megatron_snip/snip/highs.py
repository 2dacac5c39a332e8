"""HiGHS on what a knapsack's reduction left, and the least stage time.  Used by ilp.py and makespan.py only.

Source: HiGHS, https://highs.dev.  Convention: one thread, no output, costs divided by their largest, whole
coefficients; the model is passed as arrays, since building it by expressions takes seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import highspy
import numpy as np

from megatron_snip.snip.knapsack import Block, Core, Floats, Greedy, Ints, lagrangian_greedy, reduced

#: From best to worst; the status of a solution is the worst of its parts.
STATUSES = ("greedy", "optimal", "node_limit", "time_limit", "fallback")


def worst(*statuses: str) -> str:
    """The worst of some statuses."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Search:
    """How far to search: gap relative to a block's cost, nodes a HiGHS run, seconds from now for all of them."""

    gap: float
    node_limit: int
    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    @property
    def seconds_left(self) -> float:
        """Until the time limit; not above 0 once it has passed."""
        return self.seconds - (time.perf_counter() - self.begin)

    def solve(self, block: Block) -> tuple[Greedy, str]:
        """The best plan found of a block with one resource, and its status."""
        return self.improve(block, lagrangian_greedy(block))

    def improve(self, block: Block, greedy: Greedy) -> tuple[Greedy, str]:
        """HiGHS on what the greedy's bound cannot rule out; never worse than the greedy plan."""
        if greedy.cost - greedy.bound <= self.gap * greedy.cost:
            return greedy, "greedy"
        core = reduced(block, greedy)
        if core is None:  # every group is decided: the greedy plan is the only one left
            return Greedy(greedy.choice, greedy.cost, greedy.cost, greedy.prices), "optimal"
        if self.seconds_left <= 0:
            return greedy, "time_limit"
        found, status = run_highs(
            core, abs_gap=self.gap * greedy.bound, node_limit=self.node_limit, seconds=self.seconds_left
        )
        if found is None:
            return greedy, status
        choice, cost = greedy.choice, greedy.cost
        bound = max(greedy.bound, min(core.constant + found.bound, greedy.cost))
        if found.choice is not None:
            better = core.lift(found.choice)
            better_cost = block.cost_of(better)
            assert block.fits(better), "HiGHS returned a plan over its budget"
            if better_cost < cost:
                choice, cost = better, better_cost
        return Greedy(choice, cost, min(bound, cost), greedy.prices), status


@dataclass(frozen=True)
class Found:
    """HiGHS's answer on a core: chosen variable per open group [G'] or None; bound without the constant."""

    choice: Ints | None
    bound: float


def run_highs(core: Core, *, abs_gap: float, node_limit: int, seconds: float) -> tuple[Found | None, str]:
    """Solve a core.  abs_gap in the block's unit.  Returns (answer or None, status as in STATUSES)."""
    scale = float(core.cost.max()) or 1.0
    common = np.maximum(np.gcd.reduce(core.deficit, axis=1), 1)
    entries = (core.deficit // common[:, None]).astype(np.float64)
    model = _model(core.group, entries, (core.capacity // common).astype(np.float64), core.cost / scale)
    highs, status = _run(model, core.start, abs_gap / scale, node_limit, seconds)
    if status == "fallback":
        return None, status
    bound = _bound(highs) * scale
    return Found(_round(core, np.array(highs.getSolution().col_value)), bound), status


def _run(
    model: highspy.HighsLp, start: Floats, abs_gap: float, node_limit: int, seconds: float
) -> tuple[highspy.Highs, str]:
    """HiGHS after its run, and what the run came to."""
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,  # the gap asked for is in abs_gap: HiGHS does not know the constant
        "mip_abs_gap": max(abs_gap, 1e-12),
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
        "mip_max_nodes": node_limit,
        "time_limit": seconds,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(model)
    solution = highspy.HighsSolution()
    solution.col_value = start
    highs.setSolution(solution)
    highs.run()
    outcome, statuses = highs.getModelStatus(), highspy.HighsModelStatus
    if outcome == statuses.kOptimal:
        return highs, "optimal"
    if outcome == statuses.kTimeLimit:
        return highs, "time_limit"
    if outcome in (statuses.kSolutionLimit, statuses.kIterationLimit):
        return highs, "node_limit"
    return highs, "fallback"


def _bound(highs: highspy.Highs) -> float:
    bound = float(highs.getInfo().mip_dual_bound)
    return bound if np.isfinite(bound) else 0.0


def _round(core: Core, values: Floats) -> Ints | None:
    """The chosen variable of each open group, [G'], or None if there is no plan or it breaks a capacity."""
    if len(values) != len(core.group):
        return None
    chosen = _largest(core.group, values, len(core.open_groups))
    fits = (core.deficit[:, chosen].sum(axis=1) <= core.capacity).all()
    return chosen if fits else None


def _largest(group: Ints, values: Floats, groups: int) -> Ints:
    """Index of the largest value of each group: group [V], values [V] -> [groups]."""
    order = np.lexsort((values, group))  # within a group the largest value comes last
    chosen: Ints = order[np.searchsorted(group[order], np.arange(groups), "right") - 1]
    return chosen


def least_makespan(
    taken: Floats,
    stage: Ints,
    deficit: Ints,
    capacity: int,
    *,
    floor: float,
    start: Ints,
    node_limit: int,
    seconds: float,
) -> tuple[Ints, str]:
    """A plan [G] whose deficits keep the capacity and whose slowest stage takes the least time, or ``floor``.

    taken [G, O]: time, inf where ruled out; stage [G]; deficit [G, O] whole units; ``start`` [G] keeps the capacity.
    Returns the plan, never a slower one than ``start``, and the status as in STATUSES.
    """
    group, option = np.nonzero(np.isfinite(taken))
    top = float(taken[group, option].max()) or 1.0
    stages = np.unique(stage)
    # One column more, the makespan: for every stage, sum of its times - makespan <= 0.
    entries = np.zeros((1 + len(stages), len(group) + 1))
    entries[0, :-1] = deficit[group, option]
    entries[1:, :-1] = np.where(stage[group] == stages[:, None], taken[group, option] / top, 0.0)
    entries[1:, -1] = -1.0
    upper = np.append(float(capacity), np.zeros(len(stages)))
    model = _model(np.append(group, -1), entries, upper, np.append(np.zeros(len(group)), 1.0))
    model.col_lower_ = np.append(np.zeros(len(group)), floor / top)
    model.col_upper_ = np.append(np.ones(len(group)), np.inf)
    model.integrality_ = [highspy.HighsVarType.kInteger] * len(group) + [highspy.HighsVarType.kContinuous]
    rows = np.arange(len(taken))

    def makespan(choice: Ints) -> float:
        return float(np.bincount(stage, taken[rows, choice]).max())

    values = np.append(option == start[group], max(makespan(start), floor) / top).astype(np.float64)
    highs, status = _run(model, values, 0.0, node_limit, seconds)
    answer = np.array(highs.getSolution().col_value)
    if status == "fallback" or len(answer) != len(values):
        return start, status
    choice = option[_largest(group, answer[:-1], len(taken))]
    fits = int(deficit[rows, choice].sum()) <= capacity and makespan(choice) < makespan(start)
    return (choice if fits else start), status


def _model(group: Ints, entries: Floats, upper: Floats, cost: Floats) -> highspy.HighsLp:
    """One-hot rows of the groups, then entries @ x <= upper.  group [V], -1 for none; entries [R, V]; cost [V]."""
    count, groups = len(group), int(group.max()) + 1
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, groups + len(entries)
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
    model.row_lower_ = np.append(np.ones(groups), np.full(len(entries), -np.inf))
    model.row_upper_ = np.append(np.ones(groups), upper)
    model.integrality_ = [highspy.HighsVarType.kInteger] * count
    resource, column = np.nonzero(entries)
    grouped = np.flatnonzero(group >= 0)
    columns, rows = np.append(grouped, column), np.append(group[grouped], groups + resource)
    values = np.append(np.ones(len(grouped)), entries[resource, column])
    order = np.lexsort((rows, columns))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(columns[order], np.arange(count + 1)).astype(np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = rows[order].astype(np.int32), values[order]
    return model
