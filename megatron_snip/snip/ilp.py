"""Choose one option per linear: least quality loss whose efficiency reaches the target.

    minimise  sum_l Q[l, o_l] (+ churn)   subject to   sum_l e[l, o_l] >= target      (or per pipeline stage)

Source: SNIP, arXiv 2602.01410 (one-hot ILP); multiple-choice knapsack: Kellerer, Pferschy, Pisinger,
"Knapsack Problems", ch. 11; solver: HiGHS, https://highs.dev.
Convention: numpy in, numpy out, no torch.  Q [L, O] any unit, lower is better, may be negative;
e [L, O] any unit, higher saves more; the budget is in e's unit.  Each stage is a knapsack of its own:

1. shift:   cost c = Q - min_o Q >= 0, deficit d = max_o e - e >= 0 in whole units, capacity = max - budget;
2. greedy:  the LP bound and a plan from the lower hulls of (d, c); done if the bound proves the gap;
3. reduce:  drop options whose reduced cost exceeds greedy - bound: they are in no better plan;
4. HiGHS:   what is left, costs divided by their largest, started from the greedy plan.

program.py checks the input, knapsack.py holds 2 and 3, highs.py 4, makespan.py a bound on the slowest stage.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_snip.snip.highs import Search, worst
from megatron_snip.snip.knapsack import Block, Ints, whole_units
from megatron_snip.snip.makespan import solve_makespan
from megatron_snip.snip.program import (
    BUDGET_TOLERANCE,
    InfeasibleTarget,
    Program,
    budgets,
    check_feasible,
    checked,
    local_ids,
    merge,
)

__all__ = ["InfeasibleTarget", "Solution", "check_target", "solve", "solve_pareto"]


@dataclass(frozen=True, eq=False)
class Solution:
    """What ``solve`` found.

    choice [L] indices of options; objective = sum of Q over the choice, churn included; bound: no plan is
    below it; gap = (objective - bound) / (objective - sum of min_o Q), 0 when both are 0, so that a constant
    added to a linear's row changes nothing; seconds of wall clock.
    status: "greedy" (its own bound proves the gap), "optimal" (HiGHS proves it), "node_limit" and
    "time_limit" (the best plan so far), "fallback" (HiGHS failed, the greedy plan).
    churn: the part of objective that leaving the plan in force costs.  makespan: where ``time`` was given, the
    bound on a stage's time that the plan keeps, and that objective and bound are about.
    """

    choice: Ints
    objective: float
    bound: float
    gap: float
    status: str
    seconds: float
    churn: float = 0.0
    makespan: float | None = None


def solve(
    quality_loss: ArrayLike,
    efficiency: ArrayLike,
    target: float,
    *,
    stage: ArrayLike | None = None,
    time: ArrayLike | None = None,
    ties: ArrayLike | None = None,
    fixed: ArrayLike | None = None,
    reserved: ArrayLike | None = None,
    current: ArrayLike | None = None,
    churn: ArrayLike = 0.0,
    gap: float = 1e-4,
    node_limit: int = 20_000,
    time_limit: float = 30.0,
) -> Solution:
    """Choose an option for each of L linears; quality_loss and efficiency are [L, O].

    The whole must save ``target`` in e's unit.
    stage [L]: with it, every stage s must save target * sum over its linears of max_o e instead.
    time [L, O], 0 or more: with it, the whole must save the target again, and no stage may take longer than a
    bound that is minimised first (makespan.py tells how, Solution.makespan is the bound).
    ties [L]: linears of one non-negative id take one option; -1 is untied.
    fixed [L]: the option a linear must take; -1 is free.  reserved [O]: true for options that only linears
    fixed to them take; they count for no stage's max_o e.
    current [L]: the options in force, -1 for none; churn: what leaving them costs, in Q's unit, for every linear
    that changes, or [O, O] from one option to another.
    gap: see Solution; 0 asks for the exact optimum.
    node_limit (branch-and-bound nodes per stage) keeps the result reproducible; time_limit (seconds, for all
    stages together) is the emergency stop and the only source of differences between two runs.

    Raises InfeasibleTarget, or ValueError for shapes, ids and non-finite numbers, naming the row.
    """
    begin = clock.perf_counter()
    program = checked(
        quality_loss, efficiency, target, stage=stage, time=time, ties=ties, fixed=fixed, reserved=reserved,
        current=current, churn=churn,
    )  # fmt: skip
    if not gap >= 0:
        raise ValueError(f"gap is {gap}, but must be 0 or more")
    check_feasible(program)
    search = Search(gap, node_limit, time_limit, begin)
    found = _solve_blocks(program, search) if program.time is None else _solve_makespan(program, search)
    rows = np.arange(len(found.choice))
    changes = float(program.churn[rows, found.choice].sum())
    objective = float(program.quality[rows, found.choice].sum()) + changes
    return Solution(
        choice=found.choice,
        objective=objective,
        bound=min(found.bound + found.shift, objective),
        gap=max(0.0, found.cost - found.bound) / found.cost if found.cost > 0 else 0.0,
        status=found.status,
        seconds=clock.perf_counter() - begin,
        churn=changes,
        makespan=found.makespan,
    )


def solve_pareto(
    quality_loss: ArrayLike, efficiency: ArrayLike, targets: Sequence[float], **constraints: Any
) -> list[Solution]:
    """One Solution for each of some targets, in their order; constraints and limits as in ``solve``.

    A plan that reaches a higher target too is taken for it as it stands: its bound holds there as well.
    time_limit is each target's own.  Raises as ``solve``, before anything is solved, for the highest target.
    """
    found: dict[float, Solution] = {}
    if not len(targets):
        return []
    limits = {"gap", "node_limit", "time_limit"}
    terms = {name: value for name, value in constraints.items() if name not in limits}
    for target in targets:  # what is wrong with one is said before the others are solved
        checked(quality_loss, efficiency, target, **terms)
    check_feasible(checked(quality_loss, efficiency, max(targets), **terms))
    last: Solution | None = None
    for target in sorted(set(targets)):
        program = checked(quality_loss, efficiency, target, **terms)
        if last is None or program.time is not None or not _reaches(program, last.choice):
            last = solve(quality_loss, efficiency, target, **constraints)
        found[target] = last
    return [found[target] for target in targets]


def check_target(efficiency: ArrayLike, target: float, **constraints: Any) -> None:
    """Raise InfeasibleTarget if no plan reaches the target; efficiency [L, O], constraints as in ``solve``."""
    check_feasible(checked(np.zeros_like(np.asarray(efficiency), np.float64), efficiency, target, **constraints))


@dataclass(frozen=True)
class _Found:
    """A plan [L]; its cost and bound above the shift, the sum of each group's least cost."""

    choice: Ints
    shift: float
    cost: float
    bound: float
    status: str
    makespan: float | None = None


def _solve_blocks(program: Program, search: Search) -> _Found:
    choice = np.zeros(len(program.quality), dtype=np.int64)
    shift = cost = bound = 0.0
    status = "greedy"
    for rows, block, base in blocks_of(program):
        best, how = search.solve(block)
        choice[rows] = best.choice[local_ids(program.group[rows])]
        shift, cost, bound = shift + base, cost + best.cost, bound + best.bound
        status = worst(status, how)
    return _Found(choice, shift, cost, bound, status)


def blocks_of(program: Program) -> list[tuple[Ints, Block, float]]:
    """One knapsack per stage: (rows of its linears, block over its groups, sum of min_o Q)."""
    budget = budgets(program)
    blocks = []
    for s, rows in program.stages.items():
        groups = merge(program, rows)
        most = groups.saved.max(axis=1)
        tolerance = BUDGET_TOLERANCE * float(np.abs(most).sum())
        deficit = np.where(np.isfinite(groups.saved), most[:, None] - groups.saved, 0.0)
        wanted = program.target if program.stage is None else budget[s]
        slack = max(0.0, float(most.sum()) - wanted + tolerance)
        units, capacity = whole_units(deficit, slack)
        base = groups.cost.min(axis=1)
        block = Block(groups.cost - base[:, None], units[None], np.array([capacity], np.int64))
        blocks.append((rows, block, float(base.sum())))
    return blocks


def _solve_makespan(program: Program, search: Search) -> _Found:
    assert program.stage is not None
    groups = merge(program, np.arange(len(program.quality)))
    local = local_ids(program.group)
    stage = np.zeros(len(groups.cost), np.int64)
    stage[local] = local_ids(program.stage)
    best = solve_makespan(groups, stage, program.target, search)
    shift = float(groups.cost.min(axis=1).sum())
    return _Found(best.choice[local], shift, best.cost, best.bound, best.status, best.makespan)


def _reaches(program: Program, choice: Ints) -> bool:
    """Whether a plan [L] of a lower target reaches this one too."""
    for rows, block, _ in blocks_of(program):
        local = local_ids(program.group[rows])
        options = np.zeros(len(block.cost), np.int64)
        options[local] = choice[rows]
        if not block.fits(options):
            return False
    return True
