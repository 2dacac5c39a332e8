"""Precision and memory in one integer program: an option of each linear and a choice of each block, together.

What a linear keeps for backward, the casts of its weight, and what running it again costs all depend on both.  With
one-hot y[u, o] for units u (linears that take one option together) and z[b, c] for blocks, their products
w[u, o, c] = y[u, o] z[b(u), c] are columns of their own, and linear rows tie them together:

    sum_oc w[u, o, c] = 1,    sum_o w[u, o, c] = z[b(u), c],    y[u, o] = sum_c w[u, o, c]

For one-hot y and z these rows have exactly one solution, so nothing is approximated.  An input that several units read
is kept once for each form that wgrad reads it in.  Its columns v[i, S, c] are the sets S of forms that are kept:

    sum_S v[i, S, c] = z[b(i), c],    sum_{o of form f} w[u, o, c] <= sum_{S with f} v[i, S, c]    for u that read i

With Q[u, o] the quality loss of `snip.plan`, bytes and seconds linear in w and v, and Q* the quality loss of the plan
that --snip-target asks for:

    1. T = the least seconds of the slowest pipeline rank     with  sum Q <= Q*
    2. minimise  sum Q                                        with  seconds of every rank <= T

both with bytes of every phase <= the memory, and all limits and fixed linears of `snip.plan`.  So the plan is at least
as good and as fast as that of precision first, and then of memory for it (`separately`).  If everything may be kept,
it is the plan of `snip.plan` or one as good and as fast; with one option it is the plan of `program`.

Exact: what kept inputs and casts of weights take, which dry runs measure.  Estimated: temporary tensors within the
forward or backward of a block are those of the worst option, though its linears may differ; `joint_plan` checks the
answer by a dry run.  Modelled: seconds, see `rates`.

Convention: U units, O options, B blocks and C choices of a rank, P phases, I inputs with several units, S sets of
forms.  Groups of the model are units and then inputs; column k C + c of a group is its option or set k under choice c.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from megatron_snip.errors import UserError
from megatron_snip.snip.plan.milp import ROW_TOLERANCE, Answer, Effort, Model, Row, run_highs, scaled, worst
from megatron_snip.snip.plan.program import BUDGET_TOLERANCE, Bools, Floats, Ints, Limit
from megatron_snip.train.memory_plan.program import GIB, Bytes, Peaks, undominated

_GAP, _NODES, _SECONDS = 1e-4, 20_000, 60.0


@dataclass(frozen=True, eq=False)
class Input:
    """An input that several units of block number ``block`` of a rank read.

    units: of the rank.  forms [O]: the form that an option keeps it in, a number.  kept [F, C]: bytes of each form per
    microbatch.  mixed [C]: bytes of two forms or more; None if it is their sum.  more [C]: seconds of an iteration that
    two forms or more take beyond one, because tp gathers the rows themselves.
    """

    block: int
    units: tuple[int, ...]
    forms: tuple[int, ...]
    kept: Bytes
    mixed: Bytes | None = None
    more: Floats | None = None

    @cached_property
    def sets(self) -> list[tuple[int, ...]]:
        """The sets of forms that its units can need."""
        known = sorted(set(self.forms))
        return [one for size in range(1, len(self.units) + 1) for one in combinations(known, size)]

    @property
    def bytes(self) -> Bytes:
        """[S, C]: bytes per microbatch."""
        return np.array(
            [
                self.kept[list(one)].sum(axis=0) if len(one) == 1 or self.mixed is None else self.mixed
                for one in self.sets
            ]
        )

    @property
    def seconds(self) -> Floats:
        """[S, C]: seconds beyond those of one form."""
        more = np.zeros(self.kept.shape[1]) if self.more is None else self.more
        return np.array([more * (len(one) > 1) for one in self.sets])

    @property
    def matters(self) -> Bools:
        """[C]: whether the set of forms makes a difference."""
        return np.asarray(np.concatenate([self.bytes, self.seconds]).any(axis=0))


@dataclass(frozen=True, eq=False)
class Rank:
    """Pipeline rank ``stage``: its blocks and units, what they take in each phase, and their seconds.

    members [U]: units by number in the whole program.  block [U]: of each unit, as a row of B; every block has one.
    base [P], blocks [P, B, C], units [P, U, O, C]: bytes.  flight [P, B]: microbatches that keep their inputs.
    block_seconds [B, C], unit_seconds [U, O, C]: of an iteration.  stretch [P]: names for messages.
    """

    stage: int
    members: Ints
    block: Ints
    base: Bytes
    blocks: Bytes
    units: Bytes
    inputs: Sequence[Input]
    flight: Bytes
    block_seconds: Floats
    unit_seconds: Floats
    stretch: tuple[str, ...]

    @property
    def first(self) -> Ints:
        """[B]: the unit that carries the numbers of its block."""
        return np.array([np.flatnonzero(self.block == b)[0] for b in range(self.blocks.shape[1])], np.int64)

    @property
    def groups(self) -> int:
        """Units and inputs."""
        return len(self.members) + len(self.inputs)

    @property
    def width(self) -> int:
        """Columns of its widest group."""
        _, _, options, choices = self.units.shape
        return choices * max([options, *(len(one.sets) for one in self.inputs)])

    def peaks(self, width: int) -> Peaks:
        """Bytes of its phases over groups and columns; those that others dominate are left out."""
        phases, units, options, choices = self.units.shape
        values = np.zeros((phases, self.groups, width), np.int64)
        of_units = values[:, :units, : options * choices].reshape(phases, units, options, choices)
        of_units += self.units
        of_units[:, self.first] += self.blocks[:, :, None, :]
        values[:, :units, : options * choices] = of_units.reshape(phases, units, -1)
        for place, one in enumerate(self.inputs):
            flat = one.bytes.reshape(-1)
            values[:, units + place, : len(flat)] = self.flight[:, [one.block]] * flat
        return undominated(Peaks(self.base, values, self.stretch))

    def seconds(self, width: int) -> Floats:
        """[G, W]: seconds of its groups."""
        units, options, choices = self.unit_seconds.shape
        table, taken = np.zeros((self.groups, width)), self.unit_seconds.copy()
        taken[self.first] += self.block_seconds[:, None, :]
        table[:units, : options * choices] = taken.reshape(units, -1)
        for place, one in enumerate(self.inputs):
            table[units + place, : len(one.sets) * choices] = one.seconds.reshape(-1)
        return table


@dataclass(frozen=True, eq=False)
class Problem:
    """What to solve.  cost [U, O]: quality loss, with churn.  allowed [U, O].  limits: of `snip.plan`, by unit."""

    ranks: Sequence[Rank]
    cost: Floats
    allowed: Bools
    limits: Sequence[Limit] = ()

    @property
    def choices(self) -> int:
        """Choices of a block."""
        return int(self.ranks[0].blocks.shape[2])

    @cached_property
    def width(self) -> int:
        """Columns of the widest group."""
        return max(rank.width for rank in self.ranks)

    @cached_property
    def starts(self) -> list[int]:
        """The first group of each rank, and the number of groups."""
        return [0, *np.cumsum([rank.groups for rank in self.ranks]).tolist()]

    @cached_property
    def places(self) -> Ints:
        """[U]: the group of each unit."""
        found = np.zeros(len(self.cost), np.int64)
        for rank, start in zip(self.ranks, self.starts, strict=False):
            found[rank.members] = start + np.arange(len(rank.members))
        return found

    @cached_property
    def peaks(self) -> list[Peaks]:
        """The peaks of each rank."""
        return [rank.peaks(self.width) for rank in self.ranks]

    def whole(self, at: int, values: Floats) -> Floats:
        """[G, W] of all ranks from that of one."""
        table = np.zeros((self.starts[-1], self.width))
        table[self.starts[at] : self.starts[at + 1]] = values
        return table

    def by_option(self, values: Floats, fill: float = 0.0) -> Floats:
        """[G, W] from [U, O], alike under every choice; ``fill`` in the columns that units lack."""
        table = np.zeros((self.starts[-1], self.width))
        table[self.places] = fill
        table[self.places, : values.shape[1] * self.choices] = np.repeat(values, self.choices, axis=1)
        return table


@dataclass(frozen=True)
class Chosen:
    """A plan: the option of each unit [U]; of each rank the choices of its blocks, bytes at its peak, and seconds; its
    quality loss, HiGHS's status, and how far its seconds may be from the least, as a share.
    """

    options: Ints
    blocks: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]
    seconds: tuple[float, ...]
    quality: float
    status: str = "given"
    gap: float = 0.0


def solve(problem: Problem, budget: int, quality: float, start: Chosen | None = None) -> Chosen:
    """The plan of least quality loss among the fastest that fit ``budget`` bytes a rank and lose at most ``quality``.

    start: a plan that does, than which the answer is no worse.  Raises UserError with what is missing if nothing fits.
    """
    fastest = _fastest(problem, budget, quality, start)
    found = least_loss(problem, budget, max(fastest.seconds), fastest)
    if found is None:
        return fastest
    return dataclasses.replace(found, gap=fastest.gap, status=worst(fastest.status, found.status))


def least_loss(problem: Problem, budget: int, seconds: float, start: Chosen) -> Chosen | None:
    """The plan of least quality loss that fits ``budget`` bytes and ``seconds`` on every rank; None if none is found.

    start: a plan that fits.  gap: of the answer's quality loss.
    """
    rows = [*_links(problem), *_limits(problem, np.inf), *_memory(problem, budget)]
    tables = [problem.whole(at, rank.seconds(problem.width)) for at, rank in enumerate(problem.ranks)]
    rows += [scaled(table, seconds * (1 + BUDGET_TOLERANCE)) for table in tables]
    least = problem.cost.min(axis=1, where=problem.allowed, initial=np.inf)
    model = Model(problem.by_option(problem.cost - least[:, None]) + _open(problem), rows)
    answer = run_highs(model, _effort(), _columns(problem, start.options, start.blocks))
    if answer is None or not all(row.holds(answer.choice) for row in rows):
        return None
    return _chosen(problem, answer, 1 - answer.bound / answer.cost if answer.cost > 0 else 0.0)


def separately(problem: Problem, budget: int, options: Ints) -> Chosen:
    """The fastest plan in which units take these options [U].  Raises UserError if none fits."""
    fixed = np.arange(problem.cost.shape[1]) == options[:, None]
    return _fastest(dataclasses.replace(problem, allowed=fixed, limits=()), budget, np.inf, None)


def _effort() -> Effort:
    return Effort(_GAP, _NODES, _SECONDS, time.perf_counter())


def _fastest(problem: Problem, budget: int, quality: float, start: Chosen | None) -> Chosen:
    """The plan of step 1."""
    rows = [*_links(problem), *_limits(problem, quality)]
    fitting = [*rows, *_memory(problem, budget)]
    tables = [problem.whole(at, rank.seconds(problem.width)) for at, rank in enumerate(problem.ranks)]
    unit = max(float(table.max()) for table in tables) or 1.0
    slowest = [Row(table / unit, 0.0, z=1.0) for table in tables]
    known = None if start is None else _columns(problem, start.options, start.blocks)
    answer = run_highs(Model(_open(problem), [*fitting, *slowest], longest=0.0), _effort(), known)
    if answer is None or not all(row.holds(answer.choice) for row in fitting):
        raise _short(problem, rows, budget)
    found = _chosen(problem, answer, 0.0)
    if start is not None and max(start.seconds) < max(found.seconds):
        found = start  # within HiGHS's tolerance
    taken = max(found.seconds)
    return dataclasses.replace(found, gap=max(0.0, 1 - answer.bound * unit / taken) if taken > 0 else 0.0)


def _open(problem: Problem) -> Floats:
    """[G, W]: 0 for columns that a plan may take, infinite for others."""
    table = problem.by_option(np.where(problem.allowed, 0.0, np.inf), np.inf)
    for rank, start in zip(problem.ranks, problem.starts, strict=False):
        for place, one in enumerate(rank.inputs):
            row = table[start + len(rank.members) + place]
            row[:] = np.inf
            for choice, all_sets in enumerate(one.matters):  # or else one set stands for all
                row[choice : len(one.sets) * problem.choices : problem.choices if all_sets else problem.width] = 0.0
    return table


def _links(problem: Problem) -> list[Row]:
    """Rows that make all groups of a block take one choice, and inputs keep the forms that their units need."""
    rows = []
    for rank, start in zip(problem.ranks, problem.starts, strict=False):
        options, count = rank.units.shape[2], len(rank.members)
        for choice in range(problem.choices):
            chosen = np.arange(choice, problem.width, problem.choices)
            group_of = [*enumerate(rank.block.tolist()), *((count + i, one.block) for i, one in enumerate(rank.inputs))]
            for group, block in group_of:
                if choice and group != rank.first[block]:  # the first choice follows from the others
                    row = np.zeros((problem.starts[-1], problem.width))
                    row[start + group, chosen] = 1.0
                    row[start + rank.first[block], chosen[:options]] = -1.0
                    rows.append(Row(row, 0.0, lower=0.0))
            for i, one in enumerate(rank.inputs):
                for form in set(one.forms) if one.matters[choice] else ():
                    having = chosen[[k for k, held in enumerate(one.sets) if form in held]]
                    for u in one.units:
                        row = np.zeros((problem.starts[-1], problem.width))
                        row[start + u, chosen[[o for o, kept in enumerate(one.forms) if kept == form]]] = 1.0
                        row[start + count + i, having] = -1.0
                        rows.append(Row(row, 0.0))
    return rows


def _limits(problem: Problem, quality: float) -> list[Row]:
    """Rows of the quality loss and of the limits, each beyond the least of every unit."""
    rows = []
    for values, most in [(problem.cost, quality), *((limit.values, limit.most) for limit in problem.limits)]:
        least = values.min(axis=1, where=problem.allowed, initial=np.inf)
        beyond = np.where(problem.allowed, values - least[:, None], 0.0)
        if np.isfinite(most):
            rows.append(scaled(problem.by_option(beyond), max(0.0, most - float(least.sum()))))
    return rows


def _memory(problem: Problem, budget: int, z: float = 0.0) -> list[Row]:
    """Rows of the phases; with ``z``, of their bytes beyond the budget against the longest, in GiB."""
    rows = []
    for at, peaks in enumerate(problem.peaks):
        unit = float(np.abs(peaks.values).max()) or 1.0
        for values, base in zip(peaks.values, peaks.base.tolist(), strict=True):
            rows.append(Row(problem.whole(at, values) / unit, (budget - base) / unit, z=z * GIB / unit))
    return rows


def _chosen(problem: Problem, answer: Answer, gap: float) -> Chosen:
    options, blocks = np.zeros(len(problem.cost), np.int64), []
    for rank, start in zip(problem.ranks, problem.starts, strict=False):
        columns = answer.choice[start : start + len(rank.members)]
        options[rank.members], choice = columns // problem.choices, columns % problem.choices
        assert (choice == choice[rank.first][rank.block]).all(), "a block has one choice"
        blocks.append(choice[rank.first].tolist())
    return dataclasses.replace(given(problem, options, blocks), status=answer.status, gap=gap)


def given(problem: Problem, options: Ints, blocks: Sequence[Sequence[int]]) -> Chosen:
    """What a plan takes: the options of units [U], and of each rank the choices of its blocks."""
    peaks, seconds, whole = [], [], _columns(problem, options, blocks)
    for at, rank in enumerate(problem.ranks):
        columns = whole[problem.starts[at] : problem.starts[at + 1]]
        peaks.append(problem.peaks[at].of(columns)[0])
        seconds.append(float(rank.seconds(problem.width)[np.arange(rank.groups), columns].sum()))
    quality = float(problem.cost[np.arange(len(options)), options].sum())
    return Chosen(options, tuple(map(tuple, blocks)), tuple(peaks), tuple(seconds), quality)


def _columns(problem: Problem, options: Ints, blocks: Sequence[Sequence[int]]) -> Ints:
    """[G]: the columns of a plan, see ``given``."""
    columns: list[int] = []
    for rank, chosen in zip(problem.ranks, blocks, strict=True):
        choice, own = np.array(chosen, np.int64), options[rank.members]
        columns += (own * problem.choices + choice[rank.block]).tolist()
        for one in rank.inputs:
            needed = tuple(sorted({one.forms[own[u]] for u in one.units}))
            at = one.sets.index(needed) if one.matters[choice[one.block]] else 0
            columns.append(at * problem.choices + int(choice[one.block]))
    return np.array(columns, np.int64)


def _short(problem: Problem, rows: Sequence[Row], budget: int) -> UserError:
    """The error for a budget that no plan fits."""
    answer = run_highs(Model(_open(problem), [*rows, *_memory(problem, 0, z=1.0)], longest=0.0), _effort())
    if answer is None:
        return UserError("no plan keeps all limits; raise one, or lower --snip-target")
    need, at = max((peak, at) for at, peak in enumerate(_chosen(problem, answer, 0.0).peaks))
    if need <= budget + ROW_TOLERANCE * GIB:
        return UserError("the solver found no plan in time; raise --memory-gib, or allow fewer options")
    return UserError(
        f"--memory-gib is {budget / GIB:.2f}, and pipeline rank {problem.ranks[at].stage} needs at least "
        f"{need / GIB:.2f} GiB under any plan of this quality, {(need - budget) / GIB:.2f} more; raise it, shard more, "
        "or lower --micro-batch-size"
    )
