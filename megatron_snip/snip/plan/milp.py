"""One option per group at the lowest cost, as arrays: a model, a Lagrangian bound, and HiGHS.

    minimise  sum_g cost[g, o_g]   subject to   sum_g row.values[g, o_g] <= row.upper   for every row

Variables are x[g, o] in {0, 1}.  They sum to 1 per group, and each further ``Row`` is a constraint.
Source: HiGHS, https://highs.dev; the bound: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), ch. 11.
Convention: one thread, seed 0, no output.  Costs are divided by their maximum, and rows have units well above HiGHS's
tolerances.  Models are passed as arrays, since building them from expressions takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from megatron_snip.snip.plan.program import Floats, Ints

#: From best to worst; a solution has the worst status of its parts.
STATUSES = ("greedy", "optimal", "node_limit", "time_limit", "fallback")
#: Values up to this multiple of a common unit stay exact; others are counted in 2^-20 of their maximum.
EXACT_LIMIT, ROUNDED_STEPS = 2**24, 2**20
#: Tolerance of a row: nothing for integers, a fraction of the maximum otherwise.
ROW_TOLERANCE = 1e-8


def worst(*statuses: str) -> str:
    """The worst of some statuses."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Row:
    """A constraint: the sum over groups of values[g, o_g], minus ``z`` times the longest, is in [``lower``, ``upper``].

    values [G, O], from ``whole`` or ``scaled``.  The longest is the only continuous variable, see Model.
    Constraints on plans have only an upper bound: ``holds``, ``improve`` and ``part`` ignore a lower one.
    """

    values: Floats
    upper: float
    lower: float = -np.inf
    z: float = 0.0

    def of(self, choice: Ints) -> float:
        """The sum for a plan [G]."""
        return float(self.values[np.arange(len(choice)), choice].sum())

    def holds(self, choice: Ints) -> bool:
        """Whether a plan [G] satisfies the constraint."""
        return self.of(choice) <= self.upper + ROW_TOLERANCE


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

    def part(self, groups: Ints) -> Model:
        """The model of only some groups [G']."""
        return Model(self.cost[groups], [Row(row.values[groups], row.upper) for row in self.rows])


@dataclass(frozen=True)
class Best:
    """A plan [G], its cost, a lower bound on every plan's cost, and a status of STATUSES."""

    choice: Ints
    cost: float
    bound: float
    status: str


@dataclass(frozen=True)
class Search:
    """Limits: gap relative to a plan's cost, nodes per HiGHS run, seconds from now for all runs."""

    gap: float
    node_limit: int
    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; 0 or less after it."""
        return self.seconds - (time.perf_counter() - self.begin)

    def best(self, model: Model, start: Ints | None = None, bound: float = 0.0) -> Best:
        """The best plan found.  ``start`` [G] satisfies the rows; by default it is the greedy plan for the only row."""
        if start is None:
            start, bound = greedy(model)
        start = improve(model, start)
        cost = model.cost_of(start)
        if cost - bound <= self.gap * cost:
            return Best(start, cost, min(bound, cost), "greedy")
        if self.seconds_left <= 0:
            return Best(start, cost, bound, "time_limit")
        # No better plan has an option that costs more than a whole plan; without it, costs keep their precision.
        close = Model(np.where(model.cost <= cost * (1 + 1e-9), model.cost, np.inf), model.rows)
        answer = run_highs(close, start, self)
        status, bound = answer.status, min(max(bound, answer.bound), cost)
        if answer.choice is not None and not model.fits(answer.choice):  # violation beyond HiGHS's tolerances
            status = "fallback"
        elif answer.choice is not None and (found := model.cost_of(answer.choice)) < cost:
            start, cost = answer.choice, found
        return Best(start, cost, min(bound, cost), status)


def unit_of(values: Floats) -> float | None:
    """The largest number of which all values are integer multiples, unless a multiple would exceed EXACT_LIMIT."""
    distinct = np.unique(values[values > 0])
    if not len(distinct):
        return 1.0
    unit = top = float(distinct[-1])
    for value in distinct.tolist():
        while value > 1e-10 * top:
            unit, value = value, unit % value
        if unit < top / EXACT_LIMIT:
            return None
    unit = top / np.rint(top / unit)
    return unit if np.abs(values / unit - np.rint(values / unit)).max() < 1e-6 else None


def whole(values: Floats, upper: float) -> Row:
    """The row of values [G, O] >= 0 in integer units.

    FLOP shares have a common unit and stay exact.  Other values are rounded up, and ``upper`` down: plans that satisfy
    the row also satisfy the exact one, but plans within G * 2^-20 of the largest value may be excluded.
    """
    if (unit := unit_of(values)) is not None:
        return Row(np.rint(values / unit), float(np.floor(upper / unit)))
    unit = float(values.max()) / ROUNDED_STEPS
    return Row(np.ceil(values / unit - 1e-6), float(np.floor(upper / unit)))


def scaled(values: Floats, upper: float) -> Row:
    """The row of values [G, O] >= 0, divided by their maximum."""
    unit = float(values.max()) or 1.0
    return Row(values / unit, upper / unit)


def greedy(model: Model) -> tuple[Ints, float]:
    """A plan [G] that satisfies the model's only row, and the bound of the linear relaxation.

    The bound at a price per unit of the row is the minimum of cost + price * values, minus price * upper.  Of two
    plans, the cheap one violates the row and the dear one satisfies it.  At the price where both tie, either a third
    plan is better and replaces one of them, or the price is optimal.
    """
    (row,) = model.rows
    size = np.where(np.isfinite(model.cost), row.values, np.inf)
    cheap, dear = (np.lexsort(keys, axis=1)[:, 0] for keys in ((size, model.cost), (model.cost, size)))
    if row.holds(cheap):
        return cheap, model.cost_of(cheap)
    bound = model.cost_of(cheap)
    for _ in range(1000):  # ends by itself; the limit guards against rounding
        price = (model.cost_of(dear) - model.cost_of(cheap)) / (row.of(cheap) - row.of(dear))
        dual = model.cost + price * row.values
        third = dual.argmin(axis=1)
        least, spent = float(dual.min(axis=1).sum()), price * row.upper
        bound = max(bound, least - spent - 1e-13 * (least + spent))  # sums round; a bound must not be too high
        met = model.cost_of(dear) + price * row.of(dear)
        if not least < met - 1e-13 * met:
            break
        if row.holds(third):
            dear = third
        else:
            cheap = third
    return dear, bound


def improve(model: Model, choice: Ints) -> Ints:
    """Change one group of a plan [G] at a time while that lowers the cost and satisfies the rows."""
    choice, groups = choice.copy(), np.arange(len(choice))
    for _ in range(4 * model.cost.size):  # each change lowers the cost; the limit guards against rounding
        gain = np.where(np.isfinite(model.cost), model.cost[groups, choice][:, None] - model.cost, 0.0)
        for row in model.rows:
            left = row.upper + ROW_TOLERANCE - row.of(choice)
            gain[row.values - row.values[groups, choice][:, None] > left] = 0.0
        group, option = np.unravel_index(int(gain.argmax()), gain.shape)
        if not gain[group, option] > 0:
            break
        choice[group] = option
    return choice


@dataclass(frozen=True)
class Answer:
    """Result of HiGHS: a plan [G] or None, a bound, and a status of STATUSES."""

    choice: Ints | None
    bound: float
    status: str


def run_highs(model: Model, start: Ints, search: Search) -> Answer:
    """Run HiGHS on a model, starting from a plan [G] that satisfies its rows."""
    finite = model.cost[np.isfinite(model.cost)]
    scale = float(finite.max()) or 1.0 if model.longest is None else 1.0
    group, option = np.nonzero(np.isfinite(model.cost))
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": search.gap,
        "mip_abs_gap": 1e-12,  # the default of 1e-6 exceeds differences of small costs
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
        "mip_max_nodes": search.node_limit,
        "time_limit": max(0.0, search.seconds_left),
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_arrays(model, scale, highspy.HighsVarType.kInteger))
    first = highspy.HighsSolution()
    first.col_value = np.append((option == start[group]).astype(np.float64), _longest(model, start))
    highs.setSolution(first)
    highs.run()
    status = _status(highs)
    values = np.array(highs.getSolution().col_value)
    if status == "fallback" or len(values) != len(group) + 1:
        return Answer(None, 0.0, status)
    likely = np.full(model.cost.shape, -1.0)
    likely[group, option] = values[:-1]
    choice = likely.argmax(axis=1)
    bound = float(highs.getInfo().mip_dual_bound) * scale
    return Answer(choice, bound if np.isfinite(bound) else 0.0, status)


def least_longest(model: Model) -> float | None:
    """The lowest ``longest`` if groups may be split between options; None if HiGHS has no answer."""
    highs = highspy.Highs()
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        highs.setOptionValue(name, 1e-9)
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(_arrays(model, 1.0, highspy.HighsVarType.kContinuous))
    highs.run()
    return float(highs.getInfo().objective_function_value) if _status(highs) == "optimal" else None


def _longest(model: Model, choice: Ints) -> float:
    """The value of longest for a plan [G]; 0 if the model has none."""
    return max([model.longest or 0.0, *((row.of(choice) - row.upper) / row.z for row in model.rows if row.z)])


def _status(highs: highspy.Highs) -> str:
    outcome, statuses = highs.getModelStatus(), highspy.HighsModelStatus
    if outcome == statuses.kOptimal:
        return "optimal"
    if outcome == statuses.kTimeLimit:
        return "time_limit"
    return "node_limit" if outcome in (statuses.kSolutionLimit, statuses.kIterationLimit) else "fallback"


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
