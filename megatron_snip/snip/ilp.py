"""Choose one option per linear: least quality loss whose efficiency reaches the target.

    minimise  sum_l Q[l, o_l]   subject to   sum_l e[l, o_l] >= target      (or per pipeline stage)

Source: SNIP, arXiv 2602.01410 (one-hot ILP); multiple-choice knapsack: Kellerer, Pferschy, Pisinger,
"Knapsack Problems", ch. 11; solver: HiGHS, https://highs.dev.
Convention: numpy in, numpy out, no torch.  Q [L, O] any unit, lower is better, may be negative;
e [L, O] any unit, higher saves more; the budget is in e's unit.  Each stage is a knapsack of its own:

1. shift:   cost c = Q - min_o Q >= 0, deficit d = max_o e - e >= 0 in whole units, capacity = max - budget;
2. greedy:  the LP bound and a plan from the lower hulls of (d, c); done if the bound proves the gap;
3. reduce:  drop options whose reduced cost exceeds greedy - bound: they are in no better plan;
4. HiGHS:   what is left, costs divided by their largest, started from the greedy plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_snip.snip.knapsack import Block, Greedy, lagrangian_greedy, reduced, run_highs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A plan may miss its budget by this much of the most that can be reached: rounding of e, nothing more.
BUDGET_TOLERANCE = 1e-9
#: Deficits with a common unit stay exact up to this many of it; others are rounded up to 2^-20 of the top.
EXACT_LIMIT, ROUNDED_STEPS = 2**24, 2**20
#: From best to worst; the status of a solution is the worst of its stages.
STATUSES = ("greedy", "optimal", "node_limit", "time_limit", "fallback")


class InfeasibleTarget(ValueError):
    """No choice reaches the target.  ``reachable`` is the highest target that some choice reaches."""

    def __init__(self, message: str, reachable: float) -> None:
        super().__init__(message)
        self.reachable = reachable


@dataclass(frozen=True, eq=False)
class Solution:
    """What ``solve`` found.

    choice [L] indices of options; objective = sum of Q over the choice; bound: no plan is below it;
    gap = (objective - bound) / (objective - sum of min_o Q), 0 when both are 0, so that a constant added
    to a linear's row changes nothing; seconds of wall clock.
    status: "greedy" (its own bound proves the gap), "optimal" (HiGHS proves it), "node_limit" and
    "time_limit" (the best plan so far), "fallback" (HiGHS failed, the greedy plan).
    """

    choice: Ints
    objective: float
    bound: float
    gap: float
    status: str
    seconds: float


@dataclass(frozen=True)
class _Problem:
    """Checked input.  quality and efficiency [L, O]; stage and group [L] ids; fixed [L], -1 where free."""

    quality: Floats
    efficiency: Floats
    target: float
    stage: Ints | None
    group: Ints
    fixed: Ints


def solve(
    quality_loss: ArrayLike,
    efficiency: ArrayLike,
    target: float,
    *,
    stage: ArrayLike | None = None,
    ties: ArrayLike | None = None,
    fixed: ArrayLike | None = None,
    gap: float = 1e-4,
    node_limit: int = 20_000,
    time_limit: float = 30.0,
) -> Solution:
    """Choose an option for each of L linears; quality_loss and efficiency are [L, O].

    stage [L]: with it, every stage s must save target * sum over its linears of max_o e; without it the whole
    must save ``target`` in e's unit.  ties [L]: linears of one non-negative id take one option; -1 is untied.
    fixed [L]: the option a linear must take; -1 is free.  gap: see Solution; 0 asks for the exact optimum.
    node_limit (branch-and-bound nodes per stage) keeps the result reproducible; time_limit (seconds, for all
    stages together) is the emergency stop and the only source of differences between two runs.

    Raises InfeasibleTarget, or ValueError for shapes, ids and non-finite numbers, naming the row.
    """
    start = time.perf_counter()
    problem = _check(quality_loss, efficiency, target, stage, ties, fixed)
    if not gap >= 0:
        raise ValueError(f"gap is {gap}, but must be 0 or more")
    choice = np.zeros(len(problem.quality), dtype=np.int64)
    shift = cost = bound = 0.0
    status = STATUSES[0]
    for rows, block, base in _blocks(problem):
        best = lagrangian_greedy(block)
        block_status = "greedy"
        if best.cost - best.bound > gap * best.cost:
            left = time_limit - (time.perf_counter() - start)
            best, block_status = _improve(block, best, gap, node_limit, left)
        choice[rows] = best.choice[_local(problem.group[rows])]
        shift, cost, bound = shift + base, cost + best.cost, bound + best.bound
        status = max(status, block_status, key=STATUSES.index)
    objective = float(problem.quality[np.arange(len(choice)), choice].sum())
    return Solution(
        choice=choice,
        objective=objective,
        bound=min(bound + shift, objective),
        gap=max(0.0, cost - bound) / cost if cost > 0 else 0.0,
        status=status,
        seconds=time.perf_counter() - start,
    )


def _improve(block: Block, greedy: Greedy, gap: float, node_limit: int, seconds: float) -> tuple[Greedy, str]:
    """HiGHS on what the greedy's bound cannot rule out; never worse than the greedy plan."""
    core = reduced(block, greedy)
    if core is None:  # every group is decided: the greedy plan is the only one left
        return Greedy(greedy.choice, greedy.cost, greedy.cost, greedy.price), "optimal"
    if seconds <= 0:
        return greedy, "time_limit"
    found, status = run_highs(core, abs_gap=gap * greedy.bound, node_limit=node_limit, seconds=seconds)
    if found is None:
        return greedy, status
    choice, bound = greedy.choice, max(greedy.bound, min(core.constant + found.bound, greedy.cost))
    cost = greedy.cost
    if found.choice is not None:
        better = core.lift(found.choice)
        better_cost = block.cost_of(better)
        assert block.deficit_of(better) <= block.capacity, "HiGHS returned a plan over its budget"
        if better_cost < cost:
            choice, cost = better, better_cost
    return Greedy(choice, cost, min(bound, cost), greedy.price), status


def _blocks(problem: _Problem) -> list[tuple[Ints, Block, float]]:
    """One knapsack per stage: (rows of its linears, block over its groups, sum of min_o Q)."""
    stages = np.zeros(len(problem.quality), np.int64) if problem.stage is None else problem.stage
    rows_of = {int(s): np.flatnonzero(stages == s) for s in np.unique(stages)}
    merged = {s: _merge(problem, rows) for s, rows in rows_of.items()}
    budget = {}
    for s, rows in rows_of.items():
        most = float(problem.efficiency[rows].max(axis=1).sum())
        budget[s] = problem.target if problem.stage is None else problem.target * most
    _check_feasible(problem, merged, budget)
    blocks = []
    for s, (quality, saved) in merged.items():
        most = saved.max(axis=1)
        tolerance = BUDGET_TOLERANCE * float(np.abs(most).sum())
        deficit = np.where(np.isfinite(saved), most[:, None] - saved, 0.0)
        slack = max(0.0, float(most.sum()) - budget[s] + tolerance)
        units, capacity = _whole_units(deficit, slack)
        base = quality.min(axis=1)
        blocks.append((rows_of[s], Block(quality - base[:, None], units, capacity), float(base.sum())))
    return blocks


def _merge(problem: _Problem, rows: Ints) -> tuple[Floats, Floats]:
    """Sum Q and e over the linears of each group: [G, O] each; options ruled out get Q = inf, e = -inf."""
    local = _local(problem.group[rows])
    quality = np.zeros((int(local.max()) + 1, problem.quality.shape[1]))
    saved = np.zeros_like(quality)
    np.add.at(quality, local, problem.quality[rows])
    np.add.at(saved, local, problem.efficiency[rows])
    for row, group in zip(rows, local):
        if (option := int(problem.fixed[row])) >= 0:
            ruled_out = np.arange(quality.shape[1]) != option
            quality[group, ruled_out], saved[group, ruled_out] = np.inf, -np.inf
    return quality, saved


def _local(group: Ints) -> Ints:
    """Group ids renumbered from 0 in their own order."""
    return np.unique(group, return_inverse=True)[1].reshape(-1)


def _check_feasible(problem: _Problem, merged: dict[int, tuple[Floats, Floats]], budget: dict[int, float]) -> None:
    reach = {s: float(saved.max(axis=1).sum()) for s, (_, saved) in merged.items()}
    short = {s: r for s, r in reach.items() if r < budget[s] - BUDGET_TOLERANCE * abs(r)}
    if not short:
        return
    if problem.stage is None:
        (most,) = reach.values()
        held = int((problem.fixed >= 0).sum())
        raise InfeasibleTarget(
            f"target {problem.target:.6g} is out of reach: at most {most:.6g} with these options"
            f"{f' and {held} fixed linears' if held else ''}; lower the target or allow cheaper options",
            most,
        )
    share = {s: reach[s] / (budget[s] / problem.target) for s in short}
    listed = ", ".join(f"stage {s}: {r:.6g}" for s, r in share.items())
    raise InfeasibleTarget(
        f"target {problem.target:.6g} per stage is out of reach: at most {listed}; "
        "lower the target, free fixed linears or allow cheaper options",
        min(share.values()),
    )


def _whole_units(deficit: Floats, slack: float) -> tuple[Ints, int]:
    """Deficits [G, O] and slack in whole units, so that HiGHS's tolerances cannot blur the budget.

    FLOP shares have a common unit and stay exact.  Others are rounded up, slack down: a plan that fits in
    units fits in truth, and one that fits by less than 2^-20 of the largest deficit may be lost.
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
    return np.ceil(deficit / unit - 1e-6).astype(np.int64), int(slack / unit)


def _check(
    quality_loss: ArrayLike,
    efficiency: ArrayLike,
    target: float,
    stage: ArrayLike | None,
    ties: ArrayLike | None,
    fixed: ArrayLike | None,
) -> _Problem:
    quality = np.array(quality_loss, dtype=np.float64)
    saved = np.array(efficiency, dtype=np.float64)
    if quality.ndim != 2 or 0 in quality.shape or saved.shape != quality.shape:
        raise ValueError(
            f"quality_loss is {list(quality.shape)} and efficiency {list(saved.shape)}, "
            "but both must be [linears, options] with at least one of each"
        )
    for what, array in (("quality_loss", quality), ("efficiency", saved)):
        if bad := np.flatnonzero(~np.isfinite(array).all(axis=1)).tolist():
            raise ValueError(
                f"{what} has a non-finite number in row {bad[0]} of {len(array)}: {array[bad[0]].tolist()}"
                f"{f' (rows {bad} in all)' if len(bad) > 1 else ''}; fix that linear to an option instead"
            )
    if not np.isfinite(target):
        raise ValueError(f"target is {target}, but must be a finite number")
    count, options = quality.shape
    stages = None if stage is None else _ids("stage", stage, count)
    tie_ids = np.full(count, -1) if ties is None else _ids("ties", ties, count)
    # An untied linear is a group of its own, numbered above all ids in use.
    group = np.where(tie_ids >= 0, tie_ids, tie_ids.max() + 1 + np.arange(count))
    fixed_ids = np.full(count, -1) if fixed is None else _ids("fixed", fixed, count)
    if bad := np.flatnonzero((fixed_ids < -1) | (fixed_ids >= options)).tolist():
        raise ValueError(f"fixed[{bad[0]}] is {fixed_ids[bad[0]]}, but there are {options} options (-1 is free)")
    _check_groups(tie_ids, stages, fixed_ids)
    return _Problem(quality, saved, float(target), stages, group, fixed_ids)


def _ids(what: str, values: ArrayLike, count: int) -> Ints:
    array = np.asarray(values)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{what} must hold {count} whole numbers, one per linear; got {array.dtype}{list(array.shape)}"
        )
    return array.astype(np.int64)


def _check_groups(ties: Ints, stages: Ints | None, fixed: Ints) -> None:
    for tie in np.unique(ties[ties >= 0]):
        rows = np.flatnonzero(ties == tie)
        options: Sequence[int] = sorted(set(fixed[rows].tolist()) - {-1})
        if len(options) > 1:
            raise ValueError(f"linears {rows.tolist()} are tied (id {tie}) but fixed to options {options}")
        if stages is not None and len(set(stages[rows].tolist())) > 1:
            raise ValueError(f"linears {rows.tolist()} are tied (id {tie}) across stages; untie them, or drop stage")
