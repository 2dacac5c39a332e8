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
from megatron_snip.snip.plan.program import Floats, Ints
from megatron_snip.snip.planner import Planner
from megatron_snip.train.dry_run.phases import OUTSIDE, Phases
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import held_blocks, measure_runs, seconds_of
from megatron_snip.train.memory_plan.program import Bytes, Runs, aligned
from megatron_snip.train.memory_plan.rates import rates_of


def tables(
    config: Config, world_size: int, planner: Planner, unit: Ints, pool: ProcessPoolExecutor
) -> list[joint.Rank]:
    """The tables of each pipeline rank, from its own dry runs or from those of a rank that is alike.

    config: with --precision snip.  unit: of each linear of the planner.
    """
    by_option = measure_runs(config, world_size, pool, planner.choices.options)
    return [_Rank(config, world_size, planner, unit, runs).table() for runs in zip(*by_option, strict=True)]


def forms_of(options: Sequence[LinearPrecision]) -> tuple[int, ...]:
    """[O]: a number of the form in which wgrad's input is kept, the same for options that keep the same."""
    firsts = [option.sources.get(("wgrad", "input"), "wgrad") for option in options]
    kept = [(first, getattr(option, first)) for first, option in zip(firsts, options, strict=True)]
    return tuple(list(dict.fromkeys(kept)).index(one) for one in kept)


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank.  runs [O]: with each option everywhere, maybe of another rank that is alike."""

    config: Config
    world_size: int
    planner: Planner
    unit: Ints
    runs: Sequence[Runs]

    @cached_property
    def phases(self) -> list[list[Phases]]:
        """[O, C]."""
        return [[stretches[0][1] for stretches in one.by_choice.values()] for one in self.runs]

    @property
    def blocks(self) -> tuple[int, ...]:
        """[B]: in the runs."""
        return self.runs[0].blocks

    @cached_property
    def linears(self) -> list[LinearShape]:
        """[L]: in the runs."""
        return [shape for block in self.blocks for shape in self.planner.shapes if shape.block == block]

    @cached_property
    def place(self) -> Ints:
        """[L]: the row of B of each linear's block."""
        return np.array([self.blocks.index(shape.block) for shape in self.linears], np.int64)

    @property
    def microbatches(self) -> int:
        """Of an iteration."""
        return self.config.num_microbatches(self.config.data_parallel_size(self.world_size))

    def table(self) -> joint.Rank:
        stage, shapes = self.runs[0].stage, self.planner.shapes
        own = [row for b in held_blocks(self.config)[stage] for row, shape in enumerate(shapes) if shape.block == b]
        members, unit = np.unique(self.unit[own], return_inverse=True)
        seconds, of_linears = self._seconds()
        block, of_unit = np.zeros(len(members), np.int64), np.zeros((len(members), *of_linears.shape[1:]))
        block[unit] = self.place
        np.add.at(of_unit, unit, of_linears)
        inputs, alone, kept = self._inputs(unit)
        base, of_blocks, weights, flight, names = self._phases(kept)
        of_units = np.zeros((len(base), *of_unit.shape), np.int64)
        for row, u in enumerate(unit.tolist()):
            of_units[:, u] += weights[:, row] + flight[:, self.place[row], None, None] * alone[row]
        return joint.Rank(stage, members, block, base, of_blocks, of_units, inputs, flight, seconds, of_unit, names)

    def _inputs(self, unit: Ints) -> tuple[list[joint.Input], Bytes, Bytes]:
        """Inputs of several units; bytes kept per microbatch of others, by linear [L, O, C], and of all [O, B, C]."""
        forms, row_of = forms_of(self.planner.choices.options), {s.name: row for row, s in enumerate(self.linears)}
        options, choices, link, found = len(self.phases), len(self.phases[0]), rates_of(self.config).link, []
        alone = np.zeros((len(unit), options, choices), np.int64)
        kept = np.zeros((options, len(self.blocks), choices), np.int64)
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
                gathers = self.microbatches * np.where(sizes[0] == 0, 3, 2)
                more = gathers * (one.rows - each.max(axis=1).mean()) / link
            found.append(joint.Input(int(self.place[row]), units, forms, each, mixed, more))
        return found, alone, kept

    def _phases(self, inputs: Bytes) -> tuple[Bytes, Bytes, Bytes, Bytes, tuple[str, ...]]:
        """base [P], blocks [P, B, C] without inputs [O, B, C], weights [P, L, O, C], flight [P, B], and names [P]."""
        found = []
        for by_option in zip(*map(aligned, self.runs), strict=True):
            first, block = by_option[0].phases[0], by_option[0].block
            name = by_option[0].stretch.partition(",")[0] + (f", block {block}" if block != OUTSIDE else "")
            flight = np.array([first.flight.get(b, 0) - self.runs[0].microbatches_less for b in self.blocks], np.int64)
            every = [[(one.peak, sum(one.kept.values()), one.weights) for one in some.phases] for some in by_option]
            own = np.array([[peak - kept - sum(sizes.values()) for peak, kept, sizes in some] for some in every])
            weights = np.array([[[sizes.get(s.name, 0) for s in self.linears] for *_, sizes in some] for some in every])
            rest = (np.array([some.kept for some in by_option]) - flight[:, None] * inputs).max(axis=0)
            if block != OUTSIDE:
                rest[self.blocks.index(block)] += own.max(axis=0)
            base = own.max() if block == OUTSIDE else 0
            found.append((base, rest, np.moveaxis(weights, -1, 0), flight, name))
        *arrays, names = zip(*found, strict=True)
        base, rest, weights, flight = map(np.array, arrays)
        return base, rest, weights, flight, names

    def _seconds(self) -> tuple[Floats, Floats]:
        """Of an iteration: blocks [B, C], and linears [L, O, C]."""
        config, rates, blocks = self.config, rates_of(self.config), len(self.blocks)
        p, dp = config.parallel, config.data_parallel_size(self.world_size)
        tokens = config.training.global_batch_size * config.model.seq_length
        per_rank = tokens / (dp * p.context_parallel_size * p.tensor_model_parallel_size)
        again = {
            linear: np.array([phases.inputs[name].kept == 0 for phases in self.phases[0]])
            for name, one in self.phases[0][0].inputs.items()
            for linear in one.linears
        }
        flops = np.array([shape.gemm_flops for shape in self.linears])
        gemm = np.zeros((len(flops), len(self.phases), len(self.phases[0])))
        for row, shape in enumerate(self.linears):
            for o, option in enumerate(self.planner.choices.options):
                times = [
                    self.planner.times.of(getattr(option, one), one, shape.out_features, shape.in_features)
                    for one in GEMMS
                ]
                gemm[row, o] = sum(times) + times[0] * again[shape.name]
        gemm *= flops[:, None, None] * per_rank / rates.bf16
        plain = config.replace(precision="bf16")  # the runs have one stretch
        beyond = np.zeros((blocks, *gemm.shape[1:]))
        for o, runs in enumerate(self.runs if blocks else ()):
            beyond[:, o] = seconds_of(runs, plain, dp, rates)[:blocks]  # rows of blocks alone
        np.subtract.at(beyond, self.place, gemm)
        share = flops / np.bincount(self.place, flops)[self.place]
        return beyond[:, 0], gemm + share[:, None, None] * (beyond - beyond[:, :1])[self.place]
