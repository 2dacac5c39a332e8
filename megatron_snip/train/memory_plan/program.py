"""The integer program of a pipeline rank: a choice for each block that fits the memory and takes the least time.

A dry run with the same choice c everywhere gives, for each phase p (see `dry_run.phases`), the bytes at its peak
P[c, p], and the bytes K[c, p, b] that block b keeps meanwhile for later backwards.  A plan x mixes them: in a phase of
block b(p),

    peak[p] = P[x_b(p), p] - sum_b K[x_b(p), p, b] + sum_b K[x_b, p, b]

This is linear in one-hot columns, so each phase is a row: peak[p] <= the memory.  Outside of blocks the first two terms
do not depend on x; the largest counts.  Nothing is estimated, and there is no safety factor.  What blocks keep on the
host in a phase is a row of the same form, with nothing but K.

Further rows of the choice have two options, no or yes, in the first two columns:

    gathered   a block is not resharded after forward: adds its whole parameters G_b to each phase in which it waits for
               its backward, unless FSDP gathers it in that phase anyway.  This is a bound: FSDP's buffers are a little
               smaller where nothing is gathered.
    states     a unit's AdamW state lies on the host: takes its bytes from every phase, and adds them to each there

Ranks do not share memory, and a rank's time depends on its own blocks alone.  So each rank is a program of its own, and
the plan that is fastest on each rank has the least time on the slowest one, too.
Convention: B blocks of the rank, O choices; R rows are its blocks, gathered blocks and units.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_snip.errors import UserError
from megatron_snip.snip.plan.milp import Answer, Effort, Model, Row, run_highs, scaled
from megatron_snip.snip.plan.program import Ints
from megatron_snip.train.dry_run.counts import Stretch
from megatron_snip.train.dry_run.phases import OUTSIDE, Phase, Phases
from megatron_snip.train.dry_run.units import Units

Bytes = NDArray[np.int64]
GIB = 2**30
_NODES, _SECONDS = 20_000, 30.0


@dataclass(frozen=True)
class Runs:
    """Dry runs of one pipeline rank, one for each choice, and the rank's blocks by global index.

    microbatches_less: how many microbatches fewer are in flight than in these runs, for a later rank that is otherwise
    the same.  states: units whose states may lie on the host.
    """

    stage: int
    blocks: tuple[int, ...]
    by_choice: Mapping[str, Sequence[tuple[Stretch, Phases]]]
    microbatches_less: int = 0
    states: tuple[str, ...] = ()

    @property
    def units(self) -> Units:
        """What its units take."""
        return next(iter(self.by_choice.values()))[0][1].units

    @property
    def gathered(self) -> tuple[int, ...]:
        """The blocks that may stay gathered."""
        return tuple(self.units.gathered)

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices, in the order of columns."""
        return tuple(self.by_choice)


@dataclass(frozen=True, eq=False)
class Peaks:
    """Bytes of each phase: base [P] + sum_r values[p, r, x_r], values [P, R, O]; and the stretch of each, [P]."""

    base: Bytes
    values: Bytes
    stretch: tuple[str, ...]

    def of(self, choice: Sequence[int] | Ints) -> tuple[int, str]:
        """Bytes at the highest peak of a plan [R], and its stretch."""
        totals = self.base + self.values[:, np.arange(len(choice)), list(choice)].sum(axis=1)
        at = int(totals.argmax())
        return int(totals[at]), self.stretch[at]

    @property
    def unit(self) -> float:
        """The bytes that rows are divided by."""
        return float(np.abs(self.values).max()) or 1.0

    def rows(self, budget: int, z: float = 0.0) -> list[Row]:
        """Rows that keep every phase within the budget; with ``z``, their GiB beyond it are bound by the longest."""
        unit, each = self.unit, zip(self.values, self.base.tolist(), strict=True)
        return [Row(values / unit, (budget - base) / unit, z=z * GIB / unit) for values, base in each]


class Alike(NamedTuple):
    """A phase in the runs with each choice.  kept, host [B, O]: bytes that blocks keep for later backwards.

    units: what they take in its stretch.
    """

    stretch: str
    block: int
    units: Units
    phases: Sequence[Phase]
    kept: Bytes
    host: Bytes


def aligned(runs: Runs) -> Iterator[Alike]:
    """The phases of all stretches, but those of a later rank's first microbatches, which keep less than others."""
    less = runs.microbatches_less

    def by_block(now: Mapping[int, int], each: Mapping[int, int]) -> list[int]:
        return [now.get(b, 0) - less * each.get(b, 0) for b in runs.blocks]

    for of_choices in zip(*runs.by_choice.values(), strict=True):
        for alike in zip(*(phases.order for _, phases in of_choices), strict=True):
            assert len({phase.block for phase in alike}) == 1, "dry runs differ in their phases"
            if min(phase.whole for phase in alike) >= less:
                both = [(phase, phases) for phase, (_, phases) in zip(alike, of_choices, strict=True)]
                kept = np.array([by_block(phase.kept, phases.each) for phase, phases in both], np.int64).T
                host = np.array([by_block(phase.host, phases.each_host) for phase, phases in both], np.int64).T
                yield Alike(of_choices[0][0].name, alike[0].block, of_choices[0][1].units, alike, kept, host)


def peaks_of(runs: Runs) -> Peaks:
    """The peaks of all phases of all stretches; those that others dominate are left out."""
    bases, values, names = [], [], []
    for alike in aligned(runs):
        others = np.array([phase.peak - sum(phase.kept.values()) for phase in alike.phases])
        base, of_phase = 0, alike.kept.copy()
        if alike.block == OUTSIDE:
            base = int(others.max())
        else:
            of_phase[runs.blocks.index(alike.block)] += others
        bases.append(base)
        values.append(np.concatenate([of_phase, *_further(runs, alike.units, alike.phases[0])]))
        names.append(alike.stretch)
    return undominated(Peaks(np.array(bases), np.array(values), tuple(names)))


def _further(runs: Runs, units: Units, phase: Phase) -> Sequence[Bytes]:
    """Bytes of the further rows in a phase, [1, O] each.  units: what they take in its stretch."""
    added = [units.gathered[b] * (b in phase.waiting) for b in runs.gathered]
    added += [-units.states[unit].device for unit in runs.states]
    return [_yes(size, len(runs.choices)) for size in added]


def _yes(size: int, options: int) -> Bytes:
    return np.array([[0, *[size] * (options - 1)]], dtype=np.int64)


def host_peaks_of(runs: Runs) -> Peaks:
    """Bytes on the host in each phase; those that others dominate are left out."""
    added = [0 for _ in runs.gathered] + [runs.units.states[unit].host for unit in runs.states]
    further = [_yes(size, len(runs.choices)) for size in added]
    values = [np.concatenate([alike.host, *further]) for alike in aligned(runs)]
    names = [alike.stretch for alike in aligned(runs)]
    return undominated(Peaks(np.zeros(len(values), dtype=np.int64), np.array(values), tuple(names)))


def undominated(peaks: Peaks) -> Peaks:
    """Without phases that another exceeds in every plan, comparing entry by entry."""
    flat = np.column_stack([peaks.base, peaks.values.reshape(len(peaks.base), -1)])
    flat, first = np.unique(flat, axis=0, return_index=True)
    order = np.argsort(-flat.sum(axis=1), kind="stable")
    left: list[int] = []
    for row in order:
        if not left or not (flat[left] >= flat[row]).all(axis=1).any():
            left.append(int(row))
    kept = np.sort(first[left])
    return Peaks(peaks.base[kept], peaks.values[kept], tuple(peaks.stretch[i] for i in kept))


@dataclass(frozen=True)
class Chosen:
    """A plan of one rank [R], its peak in bytes, the seconds of its blocks, HiGHS's status and relative gap.

    host: bytes on the host at most.
    """

    choice: tuple[int, ...]
    peak: int
    seconds: float
    status: str
    gap: float
    host: int = 0


def solve(
    peaks: Peaks,
    seconds: NDArray[np.float64],
    budget: int,
    what: str,
    host: Peaks | None = None,
    host_budget: int = 0,
) -> Chosen:
    """The plan that fits ``budget`` bytes, and ``host_budget`` of the host's, in the least time.

    seconds [R, O]: inf for options that a row lacks.
    what: the rank in messages.  Raises UserError with what is missing if no plan fits.
    """
    if not peaks.values.shape[1]:  # only the embedding or the output layer
        choice: tuple[int, ...] = ()
        if peaks.of(choice)[0] > budget:
            raise _short(peaks, choice, budget, what)
        return Chosen(choice, peaks.of(choice)[0], 0.0, "optimal", 0.0)
    cost = seconds - seconds.min(axis=1, keepdims=True)
    on_host = [] if host is None else [scaled(v.astype(float), host_budget) for v in host.values]
    answer = run_highs(Model(cost, [*peaks.rows(budget), *on_host]), Effort(0.0, _NODES, _SECONDS, time.perf_counter()))
    if answer is None or peaks.of(answer.choice)[0] > budget + peaks.unit * 1e-8:
        raise _short(peaks, least(peaks, cost, on_host), budget, what)
    return _chosen(answer, peaks, seconds, host)


def _chosen(answer: Answer, peaks: Peaks, seconds: NDArray[np.float64], host: Peaks | None) -> Chosen:
    choice = tuple(int(one) for one in answer.choice)
    taken = float(seconds[np.arange(len(choice)), list(choice)].sum())
    gap = (answer.cost - answer.bound) / answer.cost if answer.cost > 0 else 0.0
    there = 0 if host is None else host.of(choice)[0]
    return Chosen(choice, peaks.of(choice)[0], taken, answer.status, max(0.0, gap), there)


def least(peaks: Peaks, cost: NDArray[np.float64], on_host: Sequence[Row] = ()) -> tuple[int, ...]:
    """The plan with the lowest peak that keeps the host's rows."""
    free, rows = np.where(np.isinf(cost), np.inf, 0.0), [*peaks.rows(0, z=1.0), *on_host]
    answer = run_highs(Model(free, rows, longest=0.0), Effort(0.0, _NODES, _SECONDS, time.perf_counter()))
    assert answer is not None, "some plan has the lowest peak"
    return tuple(int(one) for one in answer.choice)


def _short(peaks: Peaks, choice: Sequence[int], budget: int, what: str) -> UserError:
    need, stretch = peaks.of(choice)
    return UserError(
        f"--memory-plan auto: {what} needs at least {need / GIB:.2f} GiB ({stretch}), and --memory-gib is "
        f"{budget / GIB:.2f}, {(need - budget) / GIB:.2f} GiB short; raise it, shard more, or lower --micro-batch-size"
    )
