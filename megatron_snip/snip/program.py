"""The integer program as checked data: what may be chosen, and what each group of tied linears costs and saves.

Used by ilp.py and makespan.py.  Convention: L linears, O options, G groups of linears that take one option;
an untied linear is a group of its own.  An option that is ruled out costs inf, saves -inf and takes inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A plan may miss its budget by this much of the most that can be reached: rounding of e, nothing more.
BUDGET_TOLERANCE = 1e-9


class InfeasibleTarget(ValueError):
    """No choice reaches the target.  ``reachable`` is the highest target that some choice reaches."""

    def __init__(self, message: str, reachable: float) -> None:
        super().__init__(message)
        self.reachable = reachable


@dataclass(frozen=True)
class Program:
    """Checked input.

    quality, churn, efficiency [L, O], time [L, O] or None; stage [L] ids or None; group [L] ids;
    fixed [L], -1 where free; reserved [O]: options for linears fixed to them only.
    """

    quality: Floats
    churn: Floats
    efficiency: Floats
    target: float
    time: Floats | None
    stage: Ints | None
    group: Ints
    fixed: Ints
    reserved: NDArray[np.bool_]

    @property
    def stages(self) -> dict[int, Ints]:
        """Rows of the linears of each stage; one stage 0 where there are none."""
        stages = np.zeros(len(self.quality), np.int64) if self.stage is None else self.stage
        return {int(s): np.flatnonzero(stages == s) for s in np.unique(stages)}

    def most_saved(self, rows: Ints) -> float:
        """Sum over linears of the most that an option saves which is not reserved, whatever is fixed."""
        return float(self.efficiency[rows][:, ~self.reserved].max(axis=1).sum())

    def saved_by(self, choice: Ints, rows: Ints) -> float:
        """What a plan [L] saves in some linears."""
        return float(self.efficiency[rows, choice[rows]].sum())


@dataclass(frozen=True)
class Groups:
    """Sums over the linears of each group: cost (churn included), saved, time [G, O]."""

    cost: Floats
    saved: Floats
    time: Floats


def merge(program: Program, rows: Ints) -> Groups:
    """The groups that some linears form; groups in the order of their ids."""
    local = local_ids(program.group[rows])
    time = np.zeros_like(program.quality) if program.time is None else program.time
    sums = []
    for matrix in (program.quality + program.churn, program.efficiency, time):
        merged = np.zeros((int(local.max()) + 1, matrix.shape[1]))
        np.add.at(merged, local, matrix[rows])
        sums.append(merged)
    fixed = np.full(len(sums[0]), -1)
    np.maximum.at(fixed, local, program.fixed[rows])
    options = np.arange(len(program.reserved))
    ruled_out = np.where(fixed[:, None] >= 0, options != fixed[:, None], program.reserved)
    cost, saved, taken = sums
    cost[ruled_out], saved[ruled_out], taken[ruled_out] = np.inf, -np.inf, np.inf
    return Groups(cost, saved, taken)


def local_ids(group: Ints) -> Ints:
    """Group ids renumbered from 0 in their own order."""
    return np.unique(group, return_inverse=True)[1].reshape(-1)


def budgets(program: Program) -> dict[int, float]:
    """What each stage must save under a target for each of them."""
    return {s: program.target * program.most_saved(rows) for s, rows in program.stages.items()}


def check_feasible(program: Program) -> None:
    """Raise InfeasibleTarget, saying what is the most that can be reached, if no plan reaches the target."""
    saved = {s: merge(program, rows).saved for s, rows in program.stages.items()}
    reach = {s: float(values.max(axis=1).sum()) for s, values in saved.items()}
    size = {s: BUDGET_TOLERANCE * float(np.abs(values.max(axis=1)).sum()) for s, values in saved.items()}
    if program.stage is None or program.time is not None:
        most = sum(reach.values())
        if most < program.target - sum(size.values()):
            held = int((program.fixed >= 0).sum())
            raise InfeasibleTarget(
                f"target {program.target:.6g} is out of reach: at most {most:.6g} with these options"
                f"{f' and {held} fixed linears' if held else ''}; lower the target or allow cheaper options",
                most,
            )
        return
    budget = budgets(program)
    if short := [s for s in reach if reach[s] < budget[s] - size[s]]:
        share = {s: reach[s] / (budget[s] / program.target) for s in short}
        listed = ", ".join(f"stage {s}: {r:.6g}" for s, r in share.items())
        raise InfeasibleTarget(
            f"target {program.target:.6g} per stage is out of reach: at most {listed}; "
            "lower the target, free fixed linears or allow cheaper options",
            min(share.values()),
        )


def checked(
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
) -> Program:
    """Arguments of ``ilp.solve`` as a Program.  Raises ValueError naming the argument and the row."""
    quality = np.array(quality_loss, dtype=np.float64)
    saved = np.array(efficiency, dtype=np.float64)
    if quality.ndim != 2 or 0 in quality.shape or saved.shape != quality.shape:
        raise ValueError(
            f"quality_loss is {list(quality.shape)} and efficiency {list(saved.shape)}, "
            "but both must be [linears, options] with at least one of each"
        )
    _check_finite("quality_loss", quality)
    _check_finite("efficiency", saved)
    if not np.isfinite(target):
        raise ValueError(f"target is {target}, but must be a finite number")
    count, options = quality.shape
    stages = None if stage is None else _ids("stage", stage, count)
    tie_ids = np.full(count, -1) if ties is None else _ids("ties", ties, count)
    fixed_ids = np.full(count, -1) if fixed is None else _ids("fixed", fixed, count, options)
    only_fixed = np.zeros(options, np.bool_) if reserved is None else np.array(reserved, dtype=np.bool_)
    if only_fixed.shape != (options,):
        raise ValueError(f"reserved must hold {options} truth values, one per option; got {list(only_fixed.shape)}")
    if only_fixed.all():
        raise ValueError("all options are reserved for linears fixed to them; leave one to the others")
    _check_groups(tie_ids, stages, fixed_ids)
    return Program(
        quality=quality,
        churn=_churn(current, churn, count, options),
        efficiency=saved,
        target=float(target),
        time=None if time is None else _times(time, stages, quality.shape),
        stage=stages,
        # An untied linear is a group of its own, numbered above all ids in use.
        group=np.where(tie_ids >= 0, tie_ids, tie_ids.max() + 1 + np.arange(count)),
        fixed=fixed_ids,
        reserved=only_fixed,
    )


def _times(time: ArrayLike, stages: Ints | None, shape: tuple[int, ...]) -> Floats:
    times = np.array(time, dtype=np.float64)
    if times.shape != shape:
        raise ValueError(f"time is {list(times.shape)}, but must be [linears, options] = {list(shape)}")
    _check_finite("time", times)
    if bad := np.flatnonzero((times < 0).any(axis=1)).tolist():
        raise ValueError(f"time has a negative number in row {bad[0]}: {times[bad[0]].tolist()}")
    if stages is None:
        raise ValueError("time is given without stage; say which stage each linear is on, or leave time out")
    return times


def _churn(current: ArrayLike | None, churn: ArrayLike, count: int, options: int) -> Floats:
    """[L, O]: what leaving the plan in force costs."""
    weight = np.array(churn, dtype=np.float64)
    if weight.shape not in ((), (options, options)) or not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError(
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
        raise ValueError(
            f"{what} has a non-finite number in row {bad[0]} of {len(array)}: {array[bad[0]].tolist()}"
            f"{f' (rows {bad} in all)' if len(bad) > 1 else ''}; fix that linear to an option instead"
        )


def _ids(what: str, values: ArrayLike, count: int, options: int | None = None) -> Ints:
    """Whole numbers [L]; with ``options``, indices of options or -1."""
    array = np.asarray(values)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{what} must hold {count} whole numbers, one per linear; got {array.dtype}{list(array.shape)}"
        )
    if options is not None and (bad := np.flatnonzero((array < -1) | (array >= options)).tolist()):
        none = "free" if what == "fixed" else "none"
        raise ValueError(f"{what}[{bad[0]}] is {array[bad[0]]}, but there are {options} options (-1 is {none})")
    return array.astype(np.int64)


def _check_groups(ties: Ints, stages: Ints | None, fixed: Ints) -> None:
    for tie in np.unique(ties[ties >= 0]):
        rows = np.flatnonzero(ties == tie)
        options = sorted(set(fixed[rows].tolist()) - {-1})
        if len(options) > 1:
            raise ValueError(f"linears {rows.tolist()} are tied (id {tie}) but fixed to options {options}")
        if stages is not None and len(set(stages[rows].tolist())) > 1:
            raise ValueError(f"linears {rows.tolist()} are tied (id {tie}) across stages; untie them, or drop stage")
