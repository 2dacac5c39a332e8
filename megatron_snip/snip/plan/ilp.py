"""Choose one option per linear: the lowest quality loss whose efficiency reaches the target.

    minimise  sum_l Q[l, o_l] (+ churn)   subject to   sum_l e[l, o_l] >= target      (or per pipeline stage)

If the options of lowest Q reach the target, the plan is one of those that save least.
Source: SNIP, arXiv 2602.01410 (one-hot ILP); solver: HiGHS, https://highs.dev.
Convention: numpy in, numpy out, no torch.  Q [L, O] any unit, lower is better, may be negative; e [L, O] any unit,
higher saves more; the target is in e's unit.

program.py checks the input: ties form groups, fixed and reserved options exclude options, and churn adds to Q.  The
other constraints are ``saving_row``, ``limit_row`` and ``time_row``.  milp.py solves a model of such rows.
"""

from __future__ import annotations

import dataclasses
import time as clock
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_snip.errors import UserError
from megatron_snip.snip.plan.milp import (
    ROW_TOLERANCE,
    Answer,
    Effort,
    Model,
    Row,
    least_longest,
    run_highs,
    scaled,
    worst,
)
from megatron_snip.snip.plan.program import (
    BUDGET_TOLERANCE,
    Bools,
    Budget,
    Floats,
    InfeasibleTarget,
    Ints,
    Limit,
    Program,
    Terms,
    check_feasible,
    checked,
    dominated,
)

__all__ = ["InfeasibleTarget", "Solution", "check_target", "keeps", "solve", "solve_pareto"]


@dataclass(frozen=True, eq=False)
class Solution:
    """Result of ``solve``.

    choice [L]: indices of options.  objective: sum of Q over the choice, including churn.  bound: no plan is below it.
    gap = (objective - bound) / (objective - sum of min_o Q), 0 if both are 0, so that a constant added to a linear's
    row changes nothing.  seconds: wall clock.
    status: "optimal" (HiGHS proves the gap), "node_limit" and "time_limit" (the best plan so far).
    churn: the part of objective for leaving the current plan.  makespan: if ``time`` was given, the bound on a stage's
    time that the plan keeps, and to which objective and bound refer.
    """

    choice: Ints
    objective: float
    bound: float
    gap: float
    status: str
    seconds: float
    churn: float = 0.0
    makespan: float | None = None


def solve(terms: Terms) -> Solution:
    """The plan with the lowest quality loss.

    Raises InfeasibleTarget; UserError with the row for shapes, ids and non-finite numbers, and if there is no plan
    within the limits.
    """
    begin = clock.perf_counter()
    program = checked(terms)
    _check_reachable(program)
    effort = Effort(terms.gap, terms.node_limit, terms.time_limit, begin)
    rows, makespan, status = _rows(program), None, "optimal"
    if program.time is not None:
        makespan, status = _makespan(program, rows, effort)
        rows += [time_row(program, groups, makespan) for groups in program.stages]
    found = _solved(Model(_beyond_least(program), rows), effort)
    if found.cost == 0 and (saving_least := _saving_least(program, rows, effort)) is not None:
        found = dataclasses.replace(found, choice=saving_least)
    choice, base = found.choice[program.group], float(_least(program).sum())
    return Solution(
        choice=choice,
        objective=base + found.cost,
        bound=base + found.bound,
        gap=(found.cost - found.bound) / found.cost if found.cost > 0 else 0.0,
        status=worst(status, found.status),
        seconds=clock.perf_counter() - begin,
        churn=float(program.churn[np.arange(len(choice)), choice].sum()),
        makespan=makespan,
    )


def solve_pareto(terms: Terms, targets: Sequence[float]) -> list[Solution]:
    """One Solution per target in place of that of ``terms``, in the order of targets.

    A plan that also reaches the next higher target is that target's solution, too, because its bound holds there.
    time_limit is per target.  Raises as ``solve``, before anything is solved, for the highest target.
    """
    found: dict[float, Solution] = {}
    if not len(targets):
        return []
    each = {target: dataclasses.replace(terms, target=target) for target in targets}
    programs = {target: checked(one) for target, one in each.items()}  # report all input errors before solving
    _check_reachable(programs[max(targets)])
    last: Solution | None = None
    for target in sorted(each):
        if last is None or terms.time is not None or not _keeps(programs[target], last.choice):
            last = solve(each[target])
        found[target] = last
    return [found[target] for target in targets]


def check_target(terms: Terms) -> None:
    """Raise InfeasibleTarget if no plan reaches the target.  Ignores quality_loss."""
    _check_reachable(checked(dataclasses.replace(terms, quality_loss=np.zeros_like(terms.efficiency))))


def keeps(terms: Terms, choice: Ints) -> bool:
    """Whether a plan [L] obeys fixes and ties, keeps all limits and reaches the target, in total or per stage."""
    return _keeps(checked(terms), choice)


def _rows(program: Program) -> list[Row]:
    """All constraints but a makespan's."""
    rows = [saving_row(program, budget) for budget in program.budgets]
    return rows + [limit_row(program, limit) for limit in program.limits]


def saving_row(program: Program, budget: Budget) -> Row:
    """Constraint: groups leave at most as much of their maximum savings unsaved as their budget allows."""
    return scaled(_only(budget.groups, _unsaved(program)), max(0.0, budget.most - budget.wanted + budget.slack))


def limit_row(program: Program, limit: Limit) -> Row:
    """Constraint: what groups add to a limit beyond their minimum is at most what it allows."""
    beyond, least = _beyond(limit.values, program.allowed)
    return scaled(beyond, max(0.0, limit.most - least))


def time_row(program: Program, groups: Ints, makespan: float) -> Row:
    """Constraint: the time of a stage's groups [G'] beyond their minimum is at most what the makespan allows."""
    beyond, least = _beyond(_times(program, groups), program.allowed)
    return scaled(beyond, max(0.0, makespan * (1 + BUDGET_TOLERANCE) - least))


def _check_reachable(program: Program) -> None:
    """Raise InfeasibleTarget with the highest reachable target, if no plan reaches the target and keeps all limits."""
    check_feasible(program)
    if not program.limits:
        return
    names = " and ".join(limit.name for limit in program.limits)
    model, unit = _shortfall_model(program)
    found = run_highs(model, Effort(0.0, 20_000, 30.0, clock.perf_counter()))
    if found is None or not model.fits(found.choice):
        raise InfeasibleTarget(f"no plan keeps {names}; raise a limit", -np.inf)
    plan = np.arange(len(found.choice)), found.choice
    short = max(float(row.values[plan].sum()) - row.upper for row in model.rows if row.z > 0)
    if short > ROW_TOLERANCE:
        most, each = program.target - short * unit, " per stage" if program.per_stage else ""
        raise InfeasibleTarget(
            f"target {program.target:.6g}{each} is out of reach: at most {most:.6g} with {names}; "
            "lower the target or raise a limit",
            most,
        )


def _shortfall_model(program: Program) -> tuple[Model, float]:
    """Model of the least z by which a plan that keeps the limits may miss the target; and the unit of z."""
    unsaved = _unsaved(program)
    full = [one.full if program.per_stage and one.full > 0 else 1.0 for one in program.budgets]
    unit = max(float(unsaved[one.groups].max()) / whole for one, whole in zip(program.budgets, full)) or 1.0
    rows = [limit_row(program, limit) for limit in program.limits]
    for one, whole in zip(program.budgets, full):
        left = (one.most - one.wanted + one.slack) / (unit * whole)
        rows.append(Row(_only(one.groups, unsaved) / (unit * whole), left, z=1.0))
    return Model(np.where(program.allowed, 0.0, np.inf), rows, 0.0), unit


def _beyond(values: Floats, allowed: Bools) -> tuple[Floats, float]:
    """[G, O]: values beyond the minimum of each group, 0 for excluded options; and the sum of these minima."""
    least = values.min(axis=1, where=allowed, initial=np.inf)
    return np.where(allowed, values - least[:, None], 0.0), float(least.sum())


def _only(groups: Ints, values: Floats) -> Floats:
    """[G, O]: values of some groups, 0 for all others."""
    only = np.zeros_like(values)
    only[groups] = values[groups]
    return only


def _unsaved(program: Program) -> Floats:
    """[G, O]: savings that an option gives up against the group's best; 0 for excluded options."""
    most = program.saved.max(axis=1, where=program.allowed, initial=-np.inf)
    return np.where(program.allowed, most[:, None] - program.saved, 0.0)


def _times(program: Program, groups: Ints) -> Floats:
    """[G, O]: times of some groups, 0 for all others."""
    assert program.time is not None
    return _only(groups, program.time)


def _slowest(program: Program, choice: Ints) -> float:
    """The time of the slowest stage under a plan [G]."""
    assert program.time is not None
    times = program.time[np.arange(len(choice)), choice]
    return max(float(times[groups].sum()) for groups in program.stages)


def _beyond_least(program: Program) -> Floats:
    """[G, O]: cost beyond each group's lowest; infinite for excluded options, and for those that another beats."""
    allowed = program.allowed & ~dominated(program)
    return np.where(allowed, program.cost - _least(program)[:, None], np.inf)


def _least(program: Program) -> Floats:
    """[G]: lowest cost of each group."""
    least: Floats = program.cost.min(axis=1, where=program.allowed, initial=np.inf)
    return least


def _solved(model: Model, effort: Effort) -> Answer:
    """HiGHS's plan.  Raises UserError if it has none that satisfies the rows."""
    found = run_highs(model, effort)
    if found is not None and 0 < found.cost < 1e-3 * model.cost.max(where=np.isfinite(model.cost), initial=0.0):
        # no better plan has an option that costs more than this plan; without these, HiGHS can compare the others
        close = np.where(model.cost <= found.cost * (1 + 1e-9), model.cost, np.inf)
        found = run_highs(dataclasses.replace(model, cost=close), effort) or found
    if found is None or not model.fits(found.choice):
        raise UserError(
            f"the solver found no plan within {effort.seconds:.6g} seconds and {effort.node_limit} nodes; raise its "
            "limits, or lower the target"
        )
    return found


def _saving_least(program: Program, rows: Sequence[Row], effort: Effort) -> Ints | None:
    """[G]: of the plans that give every group its lowest cost, one that saves least; None if none is found.

    By GEMM, dgrad and wgrad may cost nothing in FP4.  Then only the target says how many of them to put there.
    """
    least = program.saved.min(axis=1, where=program.allowed, initial=np.inf)
    model = Model(np.where(_beyond_least(program) == 0, program.saved - least[:, None], np.inf), rows)
    found = run_highs(model, effort)
    return found.choice if found is not None and model.fits(found.choice) else None


def _makespan(program: Program, rows: Sequence[Row], effort: Effort) -> tuple[float, str]:
    """The bound M on a stage's time, which is as low as the target allows, and the solver's status.

        1. M  = the lowest time of the slowest stage over relaxed plans, which may split linears between options, that
                save exactly the target; raised if no integral plan is that fast;
        2. minimise Q  subject to  target saved in total,  time of every stage <= M.

    Plans for M save exactly the target.  Otherwise, M would always be the time of the plan that saves the most.
    """
    ideal = _ideal_makespan(program, program.budgets[0])
    fastest = _solved(_longest_model(program, rows, ideal)[0], effort)
    return max(ideal, _slowest(program, fastest.choice)), fastest.status


def _ideal_makespan(program: Program, budget: Budget) -> float:
    """M of step 1, before it is raised."""
    unsaved = _unsaved(program)
    rest = min(max(budget.most - budget.wanted, 0.0), float(unsaved.max(axis=1).sum()))
    at_most = scaled(unsaved, rest)
    model, top = _longest_model(program, [dataclasses.replace(at_most, lower=at_most.upper)], 0.0)
    return least_longest(model) * top


def _longest_model(program: Program, rows: Sequence[Row], least: float) -> tuple[Model, float]:
    """Model of the lowest time of the slowest stage, at least ``least``, under some constraints; and the time unit."""
    assert program.time is not None
    top = float(program.time[program.allowed].max()) or 1.0
    stages = [Row(_times(program, groups) / top, 0.0, z=1.0) for groups in program.stages]
    return Model(np.where(program.allowed, 0.0, np.inf), [*rows, *stages], least / top), top


def _keeps(program: Program, choice: Ints) -> bool:
    """Whether a plan [L] keeps all constraints but a makespan's."""
    plan = np.zeros(len(program.cost), np.int64)
    plan[program.group] = choice
    obeys = (plan[program.group] == choice).all() and program.allowed[np.arange(len(plan)), plan].all()
    return bool(obeys) and all(row.holds(plan) for row in _rows(program))
