"""The integer program as checked data: options, costs and savings of each group of linears, and the target.

Convention: L linears, O options, G groups of linears that take one option; an untied linear is its own group.
This module resolves ties, fixed linears, reserved options and churn: ties form groups, fixed linears and reserved
options exclude options, and churn is part of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_snip.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Tolerance of a budget, relative to the largest reachable savings, only for the rounding of e.
BUDGET_TOLERANCE = 1e-9
#: Savings that differ by less, relative to the largest, count as equal: their sums have another order.
_SAME = 1e-12


class InfeasibleTarget(UserError):
    """No choice reaches the target.  ``reachable`` is the highest reachable target; -inf if there is none."""

    def __init__(self, message: str, reachable: float) -> None:
        super().__init__(message)
        self.reachable = reachable


@dataclass(frozen=True, eq=False)
class Limit:
    """A linear constraint: the sum over linears of values[l, o_l] is at most ``at_most``.

    name: its name in messages, such as its option.  values [L, O], in any unit, may be negative.
    """

    name: str
    values: Floats
    at_most: float

    @property
    def most(self) -> float:
        """``at_most``, with a tolerance for rounding."""
        return self.at_most + BUDGET_TOLERANCE * float(np.abs(self.values).max(axis=1).sum())

    def holds(self, choice: Ints) -> bool:
        """Whether a plan [L] satisfies it."""
        return float(self.values[np.arange(len(choice)), choice].sum()) <= self.most


@dataclass(frozen=True, eq=False)
class Terms:
    """What to solve: choose one of O options for each of L linears.

    quality_loss [L, O]: what a plan minimises, in any unit.  efficiency [L, O]: what options save, in any unit; all
    linears together must save ``target`` in that unit.
    stage [L]: instead, every stage s must save target * sum over its linears of max_o e.
    time [L, O], 0 or more: all stages together save the target, as without stage, and no stage may take longer than a
    bound that is minimised first (see ``ilp._makespan``; Solution.makespan is the bound).
    ties [L]: linears with the same non-negative id take one option; -1 is untied.
    fixed [L]: the option that a linear must take; -1 is free.  reserved [O]: true for options that only linears fixed
    to them may take; a stage's max_o e leaves them out.
    current [L]: the options in force, -1 for none.  churn: the cost of changing a linear, in Q's unit, one number or
    [O, O] from one option to another.
    limits: further linear constraints.  gap: see ilp.Solution; 0 requests the exact optimum.
    node_limit (branch-and-bound nodes) keeps the result reproducible.  time_limit (seconds) is an emergency stop, and
    the only possible cause of differences between two runs.
    """

    quality_loss: Floats
    efficiency: Floats
    target: float
    stage: Ints | None = None
    time: Floats | None = None
    ties: Ints | None = None
    fixed: Ints | None = None
    reserved: Bools | None = None
    current: Ints | None = None
    churn: float | Floats = 0.0
    limits: tuple[Limit, ...] = ()
    gap: float = 1e-4
    node_limit: int = 20_000
    time_limit: float = 30.0


@dataclass(frozen=True)
class Budget:
    """Groups [G'] that must save ``wanted`` together.

    most: their largest savings.  full: the sum over their linears of the largest savings of an unreserved option,
    ignoring fixes.  slack: tolerance for rounding; most may be this far below wanted.
    """

    stage: int
    groups: Ints
    wanted: float
    most: float
    full: float
    slack: float

    @property
    def share(self) -> float:
        """The highest target of a stage, a share of ``full``; -inf if full is 0."""
        return self.most / self.full if self.full > 0 else -np.inf


@dataclass(frozen=True)
class Program:
    """Checked input.

    group [L]: the group of each linear.  churn [L, O]: cost of leaving the current plan.  held: number of fixed
    linears.  Sums over the linears of each group: cost (including churn), saved, time and the values of limits [G, O],
    time may be None; full [G], see Budget.  allowed [G, O].  stage [G]: ids, 0 without stages.  per_stage: each stage
    has the target.
    """

    group: Ints
    churn: Floats
    held: int
    cost: Floats
    saved: Floats
    time: Floats | None
    full: Floats
    allowed: Bools
    stage: Ints
    limits: tuple[Limit, ...]
    target: float
    per_stage: bool

    @property
    def stages(self) -> list[Ints]:
        """The groups of each stage."""
        return [np.flatnonzero(self.stage == s) for s in np.unique(self.stage)]

    @property
    def budgets(self) -> list[Budget]:
        """The savings that the target requires of each stage, or in total."""
        budgets = []
        for groups in self.stages if self.per_stage else [np.arange(len(self.cost))]:
            most = np.where(self.allowed, self.saved, -np.inf)[groups].max(axis=1)
            full = float(self.full[groups].sum())
            wanted = self.target * full if self.per_stage else self.target
            slack = BUDGET_TOLERANCE * float(np.abs(most).sum())
            budgets.append(Budget(int(self.stage[groups[0]]), groups, wanted, float(most.sum()), full, slack))
        return budgets


def dominated(program: Program) -> Bools:
    """[G, O]: options that no best plan takes.  Another costs the group less, saves as much, takes no longer and adds
    no more to any limit.

    Between options of equal cost, the solver decides.
    """
    cost, saved = program.cost, program.saved + _SAME * np.abs(program.saved).max()
    found = np.zeros_like(program.allowed)
    for other in range(cost.shape[1]):
        better = (cost[:, [other]] < cost) & (saved[:, [other]] >= program.saved) & program.allowed[:, [other]]
        if program.time is not None:
            better &= program.time[:, [other]] <= program.time
        for limit in program.limits:
            better &= limit.values[:, [other]] <= limit.values
        found |= better
    return found


def check_feasible(program: Program) -> None:
    """Raise InfeasibleTarget with the highest reachable target if no plan reaches the target, or keeps one limit.

    ilp.solve finds conflicts between several of them.
    """
    for limit in program.limits:
        if (least := float(np.where(program.allowed, limit.values, np.inf).min(axis=1).sum())) > limit.most:
            raise InfeasibleTarget(
                f"{limit.name}: at most {limit.at_most:.6g} is out of reach, at least {least:.6g} with these options; "
                "raise the limit, free fixed linears or allow other options",
                -np.inf,
            )
    short = [budget for budget in program.budgets if budget.most < budget.wanted - budget.slack]
    if not short:
        return
    if program.per_stage:
        listed = ", ".join(
            f"stage {one.stage}: {f'{one.share:.6g}' if one.full > 0 else 'nothing, as no option saves anything there'}"
            for one in short
        )
        raise InfeasibleTarget(
            f"target {program.target:.6g} per stage is out of reach: at most {listed}; "
            "lower the target, free fixed linears or allow cheaper options",
            min(budget.share for budget in short),
        )
    held = f" and {program.held} fixed linears" if program.held else ""
    raise InfeasibleTarget(
        f"target {program.target:.6g} is out of reach: at most {short[0].most:.6g} with these options{held}; "
        "lower the target or allow cheaper options",
        short[0].most,
    )


def checked(terms: Terms) -> Program:
    """Terms as a Program.  Raises UserError with the field and the row."""
    quality = np.array(terms.quality_loss, dtype=np.float64)
    saved = np.array(terms.efficiency, dtype=np.float64)
    if quality.ndim != 2 or 0 in quality.shape or saved.shape != quality.shape:
        raise UserError(
            f"quality_loss is {list(quality.shape)} and efficiency {list(saved.shape)}, "
            "but both must be [linears, options] with at least one of each"
        )
    _check_finite("quality_loss", quality)
    _check_finite("efficiency", saved)
    if not np.isfinite(terms.target):
        raise UserError(f"target is {terms.target}, but must be a finite number")
    count, options = quality.shape
    stages = None if terms.stage is None else _ids("stage", terms.stage, count)
    tie_ids = np.full(count, -1) if terms.ties is None else _ids("ties", terms.ties, count)
    fixed_ids = np.full(count, -1) if terms.fixed is None else _ids("fixed", terms.fixed, count, options)
    only_fixed = _reserved(terms.reserved, options)
    _check_ties(tie_ids, stages, fixed_ids)
    group = _groups(tie_ids)
    left = _churn(terms.current, terms.churn, count, options)
    return Program(
        group=group,
        churn=left,
        held=int((fixed_ids >= 0).sum()),
        cost=_summed(quality + left, group),
        saved=_summed(saved, group),
        time=None if terms.time is None else _summed(_times(terms.time, stages, quality.shape), group),
        full=_summed(saved[:, ~only_fixed].max(axis=1), group),
        allowed=_allowed(group, fixed_ids, only_fixed),
        stage=_of_groups(np.zeros(count, np.int64) if stages is None else stages, group),
        limits=tuple(replace(one, values=_summed(_values(one, quality.shape), group)) for one in terms.limits),
        target=float(terms.target),
        per_stage=stages is not None and terms.time is None,
    )


def _groups(ties: Ints) -> Ints:
    """[L]: group numbers.  Tied linears form a group; an untied linear is its own."""
    alone = ties.max() + 1 + np.arange(len(ties))
    groups: Ints = np.unique(np.where(ties >= 0, ties, alone), return_inverse=True)[1].reshape(-1)
    return groups


def _summed(values: Floats, group: Ints) -> Floats:
    """Sums over the linears of each group: [L, ...] -> [G, ...]."""
    sums = np.zeros((int(group.max()) + 1, *values.shape[1:]))
    np.add.at(sums, group, values)
    return sums


def _of_groups(values: Ints, group: Ints) -> Ints:
    """The maximum over the linears of each group: [L] -> [G]."""
    greatest = np.full(int(group.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(greatest, group, values)
    return greatest


def _allowed(group: Ints, fixed: Ints, reserved: Bools) -> Bools:
    """[G, O]: a group with a fixed linear takes only that option, others take no reserved one."""
    held = _of_groups(fixed, group)[:, None]
    allowed: Bools = np.where(held >= 0, np.arange(len(reserved)) == held, ~reserved)
    return allowed


def _reserved(reserved: ArrayLike | None, options: int) -> Bools:
    only_fixed = np.zeros(options, np.bool_) if reserved is None else np.array(reserved, dtype=np.bool_)
    if only_fixed.shape != (options,):
        raise UserError(f"reserved must hold {options} truth values, one per option; got {list(only_fixed.shape)}")
    if only_fixed.all():
        raise UserError("all options are reserved for linears fixed to them; leave one to the others")
    return only_fixed


def _values(limit: Limit, shape: tuple[int, ...]) -> Floats:
    values = np.array(limit.values, dtype=np.float64)
    if values.shape != shape or not np.isfinite(limit.at_most):
        raise UserError(
            f"{limit.name} has values {list(values.shape)} and at most {limit.at_most}, but needs [linears, options] = "
            f"{list(shape)} and a finite number"
        )
    _check_finite(limit.name, values)
    return values


def _times(time: ArrayLike, stages: Ints | None, shape: tuple[int, ...]) -> Floats:
    times = np.array(time, dtype=np.float64)
    if times.shape != shape:
        raise UserError(f"time is {list(times.shape)}, but must be [linears, options] = {list(shape)}")
    _check_finite("time", times)
    if bad := np.flatnonzero((times < 0).any(axis=1)).tolist():
        raise UserError(f"time has a negative number in row {bad[0]}: {times[bad[0]].tolist()}")
    if stages is None:
        raise UserError("time is given without stage; say which stage each linear is on, or leave time out")
    return times


def _churn(current: ArrayLike | None, churn: ArrayLike, count: int, options: int) -> Floats:
    """[L, O]: cost of leaving the current plan."""
    weight = np.array(churn, dtype=np.float64)
    if weight.shape not in ((), (options, options)) or not (np.isfinite(weight) & (weight >= 0)).all():
        raise UserError(
            f"churn is {weight.tolist()}, but must be a number of 0 or more, or {options} x {options} of them"
        )
    if current is None:
        return np.zeros((count, options))
    now = _ids("current", current, count, options)
    if weight.ndim == 0:
        weight = weight * (1.0 - np.eye(options))
    return np.where(now[:, None] >= 0, weight[now], 0.0)


def _check_finite(what: str, array: Floats) -> None:
    if bad := np.flatnonzero(~np.isfinite(array).all(axis=1)).tolist():
        raise UserError(
            f"{what} has a non-finite number in row {bad[0]} of {len(array)}: {array[bad[0]].tolist()}"
            f"{f' (rows {bad} in all)' if len(bad) > 1 else ''}; fix that linear to an option instead"
        )


def _ids(what: str, values: ArrayLike, count: int, options: int | None = None) -> Ints:
    """Integers [L]; with ``options``, indices of options or -1."""
    array = np.asarray(values)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{what} must hold {count} whole numbers, one per linear; got {array.dtype}{list(array.shape)}")
    if options is not None and (bad := np.flatnonzero((array < -1) | (array >= options)).tolist()):
        none = "free" if what == "fixed" else "none"
        raise UserError(f"{what}[{bad[0]}] is {array[bad[0]]}, but there are {options} options (-1 is {none})")
    return array.astype(np.int64)


def _check_ties(ties: Ints, stages: Ints | None, fixed: Ints) -> None:
    for tie in np.unique(ties[ties >= 0]):
        rows = np.flatnonzero(ties == tie)
        options = sorted(set(fixed[rows].tolist()) - {-1})
        if len(options) > 1:
            raise UserError(f"linears {rows.tolist()} are tied (id {tie}) but fixed to options {options}")
        if stages is not None and len(set(stages[rows].tolist())) > 1:
            raise UserError(f"linears {rows.tolist()} are tied (id {tie}) across stages; untie them, or drop stage")
