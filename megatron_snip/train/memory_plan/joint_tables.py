"""The numbers of the joint program: dry runs with each choice and each option everywhere, taken apart by linear.

A uniform run with choice c and option o gives the bytes at each phase's peak.  Taken apart (see `dry_run.by_linear`):

    peak = own + sum_b kept by block b + sum_l bytes of the weight of linear l and its casts
    kept by block b = rest[b] + microbatches x sum_i kept casts of input i

Casts depend on o.  The rest and ``own`` hardly do: if runs with different options differ, the largest counts.
Seconds: each GEMM takes the time of its format, fprop again where it runs again; the rest of a block's seconds is that
of `auto.seconds_of`, and what depends on formats apart from GEMMs (tp's gathers of codes) is spread over linears.
Where an input's linears differ in format, tp gathers its rows in place of codes of the mean size, in forward, in
backward, and once more where forward runs again.

Convention: L linears of a rank, U of its units, O options, C choices, B blocks, P phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_snip.config import Config
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import GemmTimes
from megatron_snip.snip.plan.program import Floats, Ints
from megatron_snip.train.dry_run.phases import OUTSIDE, Phases
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import choices_of, held_blocks, measure_runs, seconds_of
from megatron_snip.train.memory_plan.program import Bytes, Runs, aligned
from megatron_snip.train.memory_plan.rates import rates_of


@dataclass(frozen=True)
class Model:
    """What the tables are about.  config: with --precision snip.  unit [L]: the unit of each linear of ``shapes``."""

    config: Config
    world_size: int
    shapes: Sequence[LinearShape]
    unit: Ints
    options: Sequence[LinearPrecision]
    times: GemmTimes

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices of a block."""
        return choices_of(self.config)

    @property
    def forms(self) -> tuple[int, ...]:
        """[O]: a number of the form in which wgrad's input is kept, the same for options that keep the same."""
        kept = [
            (None, option.wgrad) if first is None else (first, getattr(option, first))
            for option in self.options
            for first in [option.sources.get(("wgrad", "input"))]
        ]
        return tuple(list(dict.fromkeys(kept)).index(one) for one in kept)

    def linears(self, blocks: Sequence[int]) -> list[int]:
        """The linears of some blocks, as rows of ``shapes``."""
        return [row for block in blocks for row, shape in enumerate(self.shapes) if shape.block == block]


def tables(model: Model, pool: ProcessPoolExecutor) -> list[joint.Rank]:
    """The tables of each pipeline rank, from its own dry runs or from those of a rank that is alike."""
    by_option = measure_runs(model.config, model.world_size, pool, model.options)
    return [_Rank(model, runs).table() for runs in zip(*by_option, strict=True)]


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank.  runs [O]: with each option everywhere, maybe of another rank that is alike."""

    model: Model
    runs: Sequence[Runs]

    @cached_property
    def phases(self) -> list[list[Phases]]:
        """[O, C]."""
        return [[stretches[0][1] for stretches in one.by_choice.values()] for one in self.runs]

    @cached_property
    def linears(self) -> list[LinearShape]:
        """[L]: in the runs."""
        return [self.model.shapes[row] for row in self.model.linears(self.runs[0].blocks)]

    @cached_property
    def place(self) -> Ints:
        """[L]: the row of B of each linear's block."""
        return np.array([self.runs[0].blocks.index(shape.block) for shape in self.linears], np.int64)

    def table(self) -> joint.Rank:
        stage, config = self.runs[0].stage, self.model.config
        own = self.model.linears(held_blocks(config)[stage])
        members, unit = np.unique(self.model.unit[own], return_inverse=True)
        block, of_unit = np.zeros(len(members), np.int64), np.zeros((len(members), *self._shape))
        block[unit] = self.place
        seconds, of_linears = self._seconds()
        np.add.at(of_unit, unit, of_linears)
        inputs, alone, kept = self._inputs(unit)
        base, of_blocks, weights, flight, names = self._phases(kept)
        of_units = np.zeros((len(base), *of_unit.shape), np.int64)
        np.add.at(of_units, (slice(None), unit), weights + flight[:, self.place, None, None] * alone)
        return joint.Rank(
            stage, members, block, base, of_blocks, of_units, inputs, flight, seconds, of_unit, tuple(names)
        )

    @property
    def _shape(self) -> tuple[int, int]:
        """Options and choices."""
        return len(self.model.options), len(self.model.choices)

    def _inputs(self, unit: Ints) -> tuple[list[joint.Input], Bytes, Bytes]:
        """Inputs of several units; bytes kept per microbatch of others, by linear [L, O, C], and of all [O, B, C]."""
        config, forms = self.model.config, self.model.forms
        microbatches = config.num_microbatches(config.data_parallel_size(self.model.world_size))
        row_of, found = {shape.name: row for row, shape in enumerate(self.linears)}, []
        alone = np.zeros((len(unit), *self._shape), np.int64)
        kept = np.zeros((len(alone[0]), len(self.runs[0].blocks), len(self.model.choices)), np.int64)
        for name, one in self.phases[0][0].inputs.items():
            sizes = np.array([[phases.inputs[name].kept for phases in some] for some in self.phases])
            row, units = row_of[name], tuple(sorted({int(unit[row_of[linear]]) for linear in one.linears}))
            kept[:, self.place[row]] += sizes
            if len(units) == 1:  # its option decides alone
                alone[row] = sizes
                continue
            each, mixed, more = np.array([sizes[forms.index(form)] for form in range(max(forms) + 1)]), None, None
            if one.gathers:
                mixed = np.where(sizes.any(axis=0), one.rows, 0)
                gathers = microbatches * np.where(sizes[0] == 0, 3, 2)
                more = gathers * (one.rows - each.max(axis=1).mean()) / rates_of(config).link
            found.append(joint.Input(int(self.place[row]), units, forms, each, mixed, more))
        return found, alone, kept

    def _phases(self, inputs: Bytes) -> tuple[Bytes, Bytes, Bytes, Bytes, list[str]]:
        """base [P], blocks [P, B, C] without inputs [O, B, C], weights [P, L, O, C], flight [P, B], and names [P]."""
        blocks, found = self.runs[0].blocks, []
        for by_option in zip(*map(aligned, self.runs), strict=True):
            first, block = by_option[0].phases[0], by_option[0].block
            flight = np.array([first.flight.get(b, 0) - self.runs[0].microbatches_less for b in blocks], np.int64)
            each = [[(phase, phase.kept, phase.weights) for phase in one.phases] for one in by_option]
            own = np.array([[p.peak - sum(kept.values()) - sum(w.values()) for p, kept, w in some] for some in each])
            weights = np.array([[[w.get(s.name, 0) for s in self.linears] for _, _, w in some] for some in each])
            rest = (np.array([one.kept for one in by_option]) - flight[:, None] * inputs).max(axis=0)
            if block != OUTSIDE:
                rest[blocks.index(block)] += own.max(axis=0)
            name = by_option[0].stretch.partition(",")[0] + (f", block {block}" if block != OUTSIDE else "")
            base = own.max() if block == OUTSIDE else 0
            found.append((base, rest, np.moveaxis(weights, -1, 0), flight, name))
        base, rest, weights, flight, names = zip(*found, strict=True)
        return np.array(base), np.array(rest), np.array(weights), np.array(flight), list(names)

    def _seconds(self) -> tuple[Floats, Floats]:
        """Of an iteration: blocks [B, C], and linears [L, O, C]."""
        model, config, rates = self.model, self.model.config, rates_of(self.model.config)
        p, dp, blocks = config.parallel, config.data_parallel_size(model.world_size), len(self.runs[0].blocks)
        tokens = config.training.global_batch_size * config.model.seq_length
        per_rank = tokens / (dp * p.context_parallel_size * p.tensor_model_parallel_size)
        again = {
            linear: [phases.inputs[name].kept == 0 for phases in self.phases[0]]
            for name, one in self.phases[0][0].inputs.items()
            for linear in one.linears
        }
        flops, gemm = np.array([shape.gemm_flops for shape in self.linears]), np.zeros((len(self.linears), *self._shape))
        for row, shape in enumerate(self.linears):
            for o, option in enumerate(model.options):
                size = (shape.out_features, shape.in_features)
                each = [model.times.of(getattr(option, one), one, *size) for one in GEMMS]
                gemm[row, o] = sum(each) + each[0] * np.array(again[shape.name])
        gemm *= flops[:, None, None] * per_rank / rates.bf16
        plain = config.replace(precision="bf16")  # the runs have one stretch
        beyond = np.zeros((blocks, *self._shape))
        for o, one in enumerate(self.runs if blocks else ()):
            beyond[:, o] = seconds_of(one, plain, dp, rates)[:blocks]  # rows of blocks alone
        np.subtract.at(beyond, self.place, gemm)
        share = flops / np.bincount(self.place, flops)[self.place]
        return beyond[:, 0], gemm + share[:, None, None] * (beyond - beyond[:, :1])[self.place]
