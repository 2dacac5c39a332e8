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

Convention: U units, O options, B blocks and C choices, of a rank or of all; P phases of a rank; I inputs with several
units; S sets of forms.  The G groups of the program are its units and then these inputs.  Column k C + c of the W of a
group is its option or set k under choice c.  The first unit of a block carries the numbers of the block.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        made = np.array([self.kept[list(one)].sum(axis=0) for one in self.sets])
        if self.mixed is not None:
            made[len(self.kept) :] = self.mixed
        return made

    @property
    def seconds(self) -> Floats:
        """[S, C]: seconds beyond those of one form."""
        more = np.zeros(self.kept.shape[1]) if self.more is None else self.more
        return np.array([more * (len(one) > 1) for one in self.sets])

    @cached_property
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
    def block(self) -> Ints:
        """[U]: the block of each unit, counted through the ranks."""
        block, start = np.zeros(len(self.cost), np.int64), 0
        for rank in self.ranks:
            block[rank.members] = start + rank.block
            start += rank.blocks.shape[1]
        return block

    @cached_property
    def first(self) -> Ints:
        """[B]: the first unit of each block."""
        return np.unique(self.block, return_index=True)[1]

    @cached_property
    def inputs(self) -> list[Input]:
        """Those of all ranks, with their blocks and units in the whole program."""
        found = []
        for rank in self.ranks:
            for one in rank.inputs:
                units = rank.members[list(one.units)]
                found.append(dataclasses.replace(one, block=int(self.block[units[0]]), units=tuple(units.tolist())))
        return found

    @property
    def blank(self) -> Floats:
        """[G, W]: zeros."""
        widest = max([self.cost.shape[1], *(len(one.sets) for one in self.inputs)])
        return np.zeros((len(self.cost) + len(self.inputs), self.choices * widest))

    def by_option(self, values: Floats, fill: float = 0.0) -> Floats:
        """[G, W] from [U, O], alike under every choice; ``fill`` in the columns that units lack."""
        table, alike = self.blank, np.repeat(values, self.choices, axis=1)
        table[: len(values)] = fill
        table[: len(values), : alike.shape[1]] = alike
        return table

    @cached_property
    def peaks(self) -> list[Peaks]:
        """Bytes of the phases of each rank; those that others dominate are left out."""
        found = []
        for at, rank in enumerate(self.ranks):
            of_inputs = [rank.flight[:, one.block, None, None] * one.bytes for one in rank.inputs]
            found.append(
                undominated(Peaks(rank.base, self._table(at, rank.units, rank.blocks, of_inputs), rank.stretch))
            )
        return found

    @cached_property
    def seconds(self) -> list[Floats]:
        """[G, W] of each rank."""
        return [
            self._table(at, rank.unit_seconds, rank.block_seconds, [one.seconds for one in rank.inputs])
            for at, rank in enumerate(self.ranks)
        ]

    def _table(
        self, at: int, units: NDArray[Any], blocks: NDArray[Any], inputs: Sequence[NDArray[Any]]
    ) -> NDArray[Any]:
        """[..., G, W] from units [..., U, O, C], blocks [..., B, C] and inputs [..., S, C] of a rank."""
        others, taken, rank = units.shape[:-3], units.copy(), self.ranks[at]
        taken[..., np.unique(rank.block, return_index=True)[1], :, :] += blocks[..., None, :]
        table = np.zeros((*others, *self.blank.shape), units.dtype)
        start = len(self.cost) + sum(len(before.inputs) for before in self.ranks[:at])
        groups = [*rank.members.tolist(), *range(start, start + len(inputs))]
        for group, values in zip(groups, [*np.moveaxis(taken, -3, 0), *inputs], strict=True):
            flat = values.reshape(*others, -1)
            table[..., group, : flat.shape[-1]] = flat
        return table


@dataclass(frozen=True)
class Chosen:
    """A plan: the option of each unit [U]; of each rank the choices of its blocks, bytes at its peak, and seconds; its
    quality loss, and HiGHS's status.

    gap: how far its seconds may be above the least, as a share.  loss_gap: how far its quality loss may be above the
    least at its seconds, as a share of what it loses beyond the best option of every unit.
    """

    options: Ints
    blocks: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]
    seconds: tuple[float, ...]
    quality: float
    status: str = "given"
    gap: float = 0.0
    loss_gap: float = 0.0


def solve(problem: Problem, budget: int, quality: float, start: Chosen | None = None) -> Chosen:
    """The plan of least quality loss among the fastest that fit ``budget`` bytes a rank and lose at most ``quality``.

    start: a plan that does, than which the answer is no worse.  Raises UserError with what is missing if nothing fits.
    """
    fastest = _fastest(problem, budget, quality, start)
    found = least_loss(problem, budget, max(fastest.seconds), fastest)
    if found is None:
        return dataclasses.replace(fastest, loss_gap=1.0)
    return dataclasses.replace(found, gap=fastest.gap, status=worst(fastest.status, found.status))


def least_loss(problem: Problem, budget: int, seconds: float, start: Chosen) -> Chosen | None:
    """The plan of least quality loss that fits ``budget`` bytes and ``seconds`` on every rank; None if none is found.

    start: a plan that fits.
    """
    rows = _rows(problem, budget, np.inf)
    rows += [scaled(table, seconds * (1 + BUDGET_TOLERANCE)) for table in problem.seconds]
    least = problem.cost.min(axis=1, where=problem.allowed, initial=np.inf)
    answer = _answer(problem, Model(problem.by_option(problem.cost - least[:, None]) + _open(problem), rows), start)
    if answer is None:
        return None
    gap = 1 - answer.bound / answer.cost if answer.cost > 0 else 0.0
    return dataclasses.replace(_chosen(problem, answer), loss_gap=gap)


def separately(problem: Problem, budget: int, options: Ints) -> Chosen:
    """The fastest plan in which units take these options [U].  Raises UserError if none fits."""
    fixed = np.arange(problem.cost.shape[1]) == options[:, None]
    return _fastest(dataclasses.replace(problem, allowed=fixed, limits=()), budget, np.inf, None)


def _fastest(problem: Problem, budget: int, quality: float, start: Chosen | None) -> Chosen:
    """The plan of step 1."""
    rows, unit = _rows(problem, budget, quality), max(float(table.max()) for table in problem.seconds) or 1.0
    slowest = [Row(table / unit, 0.0, z=1.0) for table in problem.seconds]
    answer = _answer(problem, Model(_open(problem), [*rows, *slowest], longest=0.0), start)
    if answer is None:
        raise _short(problem, budget, quality)
    found = _chosen(problem, answer)
    if start is not None and max(start.seconds) < max(found.seconds):
        found = start  # within HiGHS's tolerance
    taken = max(found.seconds)
    return dataclasses.replace(found, gap=max(0.0, 1 - answer.bound * unit / taken) if taken > 0 else 0.0)


def _answer(problem: Problem, model: Model, start: Chosen | None = None) -> Answer | None:
    """HiGHS's answer; None if it has none that keeps all rows."""
    known = None if start is None else _columns(problem, start.options, start.blocks)
    answer = run_highs(model, Effort(_GAP, _NODES, _SECONDS, time.perf_counter()), known)
    return answer if answer is not None and model.fits(answer.choice) else None


def _open(problem: Problem) -> Floats:
    """[G, W]: 0 for columns that a plan may take, infinite for others."""
    table, choices = problem.by_option(np.where(problem.allowed, 0.0, np.inf), np.inf), problem.choices
    for row, one in zip(table[len(problem.cost) :], problem.inputs, strict=True):
        row[:] = np.inf
        for choice, all_sets in enumerate(one.matters):  # or else one set stands for all
            row[choice : (len(one.sets) if all_sets else 1) * choices : choices] = 0.0
    return table


def _links(problem: Problem) -> list[Row]:
    """Rows that make all groups of a block take one choice, and inputs keep the forms that their units need."""
    rows, (units, options) = [], problem.cost.shape
    block_of = [*problem.block.tolist(), *(one.block for one in problem.inputs)]
    for choice in range(problem.choices):
        chosen = np.arange(choice, problem.blank.shape[1], problem.choices)
        for group, block in enumerate(block_of):
            if choice and group != problem.first[block]:  # the first choice follows from the others
                row = problem.blank
                row[group, chosen], row[problem.first[block], chosen[:options]] = 1.0, -1.0
                rows.append(Row(row, 0.0, lower=0.0))
        for group, one in enumerate(problem.inputs, units):
            for form in set(one.forms) if one.matters[choice] else ():
                for u in one.units:
                    row = problem.blank
                    row[u, chosen[[o for o, kept in enumerate(one.forms) if kept == form]]] = 1.0
                    row[group, chosen[[k for k, held in enumerate(one.sets) if form in held]]] = -1.0
                    rows.append(Row(row, 0.0))
    return rows


def _rows(problem: Problem, budget: int, quality: float, z: float = 0.0) -> list[Row]:
    """All rows but those of seconds.  The quality loss and limits are those beyond the least of every unit.

    z: see `Peaks.rows`.
    """
    rows = _links(problem)
    for values, most in [(problem.cost, quality), *((limit.values, limit.most) for limit in problem.limits)]:
        least = values.min(axis=1, where=problem.allowed, initial=np.inf)
        beyond = np.where(problem.allowed, values - least[:, None], 0.0)
        if np.isfinite(most):
            rows.append(scaled(problem.by_option(beyond), max(0.0, most - float(least.sum()))))
    return rows + [row for peaks in problem.peaks for row in peaks.rows(budget, z)]


def _chosen(problem: Problem, answer: Answer) -> Chosen:
    options, choice = np.divmod(answer.choice[: len(problem.cost)], problem.choices)
    blocks = choice[problem.first]
    assert (choice == blocks[problem.block]).all(), "a block has one choice"
    ends = np.cumsum([rank.blocks.shape[1] for rank in problem.ranks])
    of_ranks = [part.tolist() for part in np.split(blocks, ends[:-1])]
    return dataclasses.replace(given(problem, options, of_ranks), status=answer.status)


def given(problem: Problem, options: Ints, blocks: Sequence[Sequence[int]]) -> Chosen:
    """What a plan takes: the options of units [U], and of each rank the choices of its blocks."""
    columns = _columns(problem, options, blocks)
    seconds = [float(table[np.arange(len(columns)), columns].sum()) for table in problem.seconds]
    quality = float(problem.cost[np.arange(len(options)), options].sum())
    peaks = tuple(one.of(columns)[0] for one in problem.peaks)
    return Chosen(options, tuple(map(tuple, blocks)), peaks, tuple(seconds), quality)


def _columns(problem: Problem, options: Ints, blocks: Sequence[Sequence[int]]) -> Ints:
    """[G]: the columns of a plan, see ``given``."""
    choice = np.concatenate([np.array(chosen, np.int64) for chosen in blocks])
    of_inputs = []
    for one in problem.inputs:
        needed = tuple(sorted({one.forms[options[u]] for u in one.units}))
        at = one.sets.index(needed) if one.matters[choice[one.block]] else 0
        of_inputs.append(at * problem.choices + choice[one.block])
    return np.array([*(options * problem.choices + choice[problem.block]), *of_inputs], np.int64)


def _short(problem: Problem, budget: int, quality: float) -> UserError:
    """The error for a budget that no plan fits."""
    answer = _answer(problem, Model(_open(problem), _rows(problem, 0, quality, z=1.0), longest=0.0))
    if answer is None:
        return UserError("no plan keeps all limits; raise one, or lower --snip-target")
    need, at = max((peak, at) for at, peak in enumerate(_chosen(problem, answer).peaks))
    if need <= budget + ROW_TOLERANCE * GIB:
        return UserError("the solver found no plan in time; raise --memory-gib, or allow fewer options")
    return UserError(
        f"--memory-gib is {budget / GIB:.2f}, and pipeline rank {problem.ranks[at].stage} needs at least "
        f"{need / GIB:.2f} GiB under any plan of this quality, {(need - budget) / GIB:.2f} more; raise it, shard more, "
        "or lower --micro-batch-size"
    )
