"""One option per group at the lowest cost, as arrays: a model, and HiGHS.

    minimise  sum_g cost[g, o_g]   subject to   sum_g row.values[g, o_g] <= row.upper   for every row

Variables are x[g, o] in {0, 1}.  They sum to 1 per group, and each further ``Row`` is a constraint.
Source: HiGHS, https://highs.dev.
Convention: one thread, seed 0, no output.  Costs and rows are divided by their maximum.  HiGHS gets arrays, because
building a model from expressions takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from megatron_snip.snip.plan.program import Floats, Ints

#: From best to worst.
STATUSES = ("optimal", "node_limit", "time_limit")
#: Tolerance of a row, a fraction of its largest value.
ROW_TOLERANCE = 1e-8


def worst(*statuses: str) -> str:
    """The worst of some statuses."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Row:
    """A constraint: the sum over groups of values[g, o_g], minus ``z`` times the longest, is in [``lower``, ``upper``].

    values [G, O], from ``scaled``.  The longest is the only continuous variable, see Model.
    Constraints on plans have only an upper bound, and ``holds`` ignores a lower one.
    """

    values: Floats
    upper: float
    lower: float = -np.inf
    z: float = 0.0

    def holds(self, choice: Ints) -> bool:
        """Whether a plan [G] satisfies the constraint."""
        return self.z > 0 or float(self.values[np.arange(len(choice)), choice].sum()) <= self.upper + ROW_TOLERANCE


@dataclass(frozen=True)
class Model:
    """cost [G, O], inf for excluded options, at least 0, with a 0 in each row; constraints.

    longest: None, or the lower bound of a continuous variable that is minimised instead of the cost.
    """

    cost: Floats
    rows: Sequence[Row]
    longest: float | None = None

    def cost_of(self, choice: Ints) -> float:
        """Cost of a plan [G]."""
        return float(self.cost[np.arange(len(choice)), choice].sum())

    def fits(self, choice: Ints) -> bool:
        """Whether a plan [G] satisfies every row."""
        return all(row.holds(choice) for row in self.rows)


@dataclass(frozen=True)
class Answer:
    """A plan [G], its cost, a lower bound on every plan's cost, and a status of STATUSES.

    If the longest is minimised, cost and bound are the longest's.
    """

    choice: Ints
    cost: float
    bound: float
    status: str


@dataclass(frozen=True)
class Effort:
    """When HiGHS stops.  Gap relative to a plan's cost, nodes per HiGHS run, seconds from ``begin`` for all runs."""

    gap: float
    node_limit: int
    seconds: float
    begin: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; 0 after it."""
        return max(0.0, self.seconds - (time.perf_counter() - self.begin))


def scaled(values: Floats, upper: float) -> Row:
    """The row of values [G, O] >= 0, divided by their maximum."""
    unit = float(values.max()) or 1.0
    return Row(values / unit, upper / unit)


def run_highs(model: Model, effort: Effort, start: Ints | None = None) -> Answer | None:
    """HiGHS's best plan; None if it has none.  start [G]: a plan that fits, than which the answer is no worse."""
    finite = model.cost[np.isfinite(model.cost)]
    scale = float(finite.max()) or 1.0 if model.longest is None else 1.0
    group, option = np.nonzero(np.isfinite(model.cost))
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": effort.gap,
        "mip_abs_gap": 1e-12,  # the default of 1e-6 exceeds differences of small costs
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
        "mip_max_nodes": effort.node_limit,
        "time_limit": effort.seconds_left,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_arrays(model, scale, highspy.HighsVarType.kInteger))
    if start is not None:
        known = highspy.HighsSolution()
        longest = max((float(row.values[np.arange(len(start)), start].sum()) - row.upper) / row.z
                      for row in model.rows if row.z > 0) if model.longest is not None else 0.0  # fmt: skip
        known.col_value = np.append(option == start[group], max(longest, model.longest or 0.0)).astype(float).tolist()
        highs.setSolution(known)
    highs.run()
    status, values = _status(highs), np.array(highs.getSolution().col_value)
    if status is None or len(values) != len(group) + 1 or not highs.getSolution().value_valid:
        return None
    likely = np.full(model.cost.shape, -1.0)
    likely[group, option] = values[:-1]
    choice = likely.argmax(axis=1)
    info = highs.getInfo()
    cost = model.cost_of(choice) if model.longest is None else float(info.objective_function_value)
    bound = float(info.mip_dual_bound) * scale
    return Answer(choice, cost, min(bound, cost) if np.isfinite(bound) else 0.0, status)


def least_longest(model: Model) -> float:
    """The lowest ``longest`` if groups may be split between options."""
    highs = highspy.Highs()
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        highs.setOptionValue(name, 1e-9)
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(_arrays(model, 1.0, highspy.HighsVarType.kContinuous))
    highs.run()
    assert _status(highs) == "optimal", f"HiGHS: {highs.getModelStatus()}"
    return float(highs.getInfo().objective_function_value)


def _status(highs: highspy.Highs) -> str | None:
    statuses = highspy.HighsModelStatus
    known = {
        statuses.kOptimal: "optimal", statuses.kTimeLimit: "time_limit", statuses.kSolutionLimit: "node_limit",
        statuses.kIterationLimit: "node_limit",
    }  # fmt: skip
    return known.get(highs.getModelStatus())


def _arrays(model: Model, scale: float, kind: highspy.HighsVarType) -> highspy.HighsLp:
    """Columns: x[g, o], then the longest.  Rows: one option per group, then the model's constraints."""
    group, option = np.nonzero(np.isfinite(model.cost))
    count, groups = len(group), len(model.cost)
    entries = np.array([np.append(row.values[group, option], -row.z) for row in model.rows])
    cost = model.cost[group, option] / scale if model.longest is None else np.zeros(count)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count + 1, groups + len(entries)
    lp.col_cost_ = np.append(cost, 0.0 if model.longest is None else 1.0)
    lp.col_lower_ = np.append(np.zeros(count), model.longest or 0.0)
    lp.col_upper_ = np.append(np.ones(count), 0.0 if model.longest is None else np.inf)
    lp.row_lower_ = np.append(np.ones(groups), [row.lower for row in model.rows])
    lp.row_upper_ = np.append(np.ones(groups), [row.upper for row in model.rows])
    lp.integrality_ = [kind] * count + [highspy.HighsVarType.kContinuous]
    row_of, column = np.nonzero(entries)
    rows, columns = np.append(group, groups + row_of), np.append(np.arange(count), column)
    values = np.append(np.ones(count), entries[row_of, column])
    order = np.lexsort((rows, columns))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(columns[order], np.arange(count + 2)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order].astype(np.int32), values[order]
    return lp
