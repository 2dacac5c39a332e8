"""The numbers of the joint program: dry runs with each choice and each option everywhere, taken apart by linear.

A uniform run with choice c and option o gives the bytes at each phase's peak.  Taken apart (see `dry_run.by_linear`):

    peak = own + sum_b kept by block b + sum_l bytes of the weight of linear l and its casts
    kept by block b = rest[b] + microbatches x sum_i kept casts of input i

Casts depend on o.  The rest and ``own`` hardly do: if runs with different options differ, the largest counts.
Seconds: each GEMM takes the time of its format, fprop again where it runs again; the rest of a block's seconds is that
of `auto.seconds_of`, and what depends on formats apart from GEMMs (tp's gathers of codes) is spread over linears.
Where an input's linears differ in format, tp gathers its rows in place of codes of the mean size, in forward, in
backward, and once more where forward runs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_snip.config import Config
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import GemmTimes
from megatron_snip.snip.plan.program import Floats, Ints
from megatron_snip.train.dry_run.by_linear import Input
from megatron_snip.train.dry_run.counts import Stretch
from megatron_snip.train.dry_run.measure import measure_formats
from megatron_snip.train.dry_run.phases import OUTSIDE, Phase, Phases
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import choices_of, held_blocks, measured_ranks, seconds_of
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, made_for
from megatron_snip.train.memory_plan.program import Bytes, Runs
from megatron_snip.train.memory_plan.rates import Rates, rates_of

#: (choice, option) -> a uniform run of a rank.
Uniform = Mapping[tuple[str, int], tuple[Stretch, Phases]]


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

    def linears(self, block: int) -> list[int]:
        """The linears of a block, as rows of ``shapes``."""
        return [row for row, shape in enumerate(self.shapes) if shape.block == block]

    def forms(self) -> tuple[int, ...]:
        """[O]: a number of the form in which wgrad's input is kept, the same for options that keep the same."""
        kept = [
            (None, option.wgrad) if first is None else (first, getattr(option, first))
            for option in self.options
            for first in [option.sources.get(("wgrad", "input"))]
        ]
        return tuple(list(dict.fromkeys(kept)).index(one) for one in kept)


def tables(model: Model, pool: ProcessPoolExecutor) -> list[joint.Rank]:
    """The tables of each pipeline rank, from its own dry runs or from those of a rank that is alike."""
    config, world, rates = model.config, model.world_size, rates_of(model.config)
    blocks, measured, of_run = held_blocks(config), measured_ranks(config), made_for(config, world)
    jobs = {
        (rank, choice, column): pool.submit(
            measure_formats, config, world, rank * (world // len(blocks)),
            MemoryPlan((choice,) * config.model.num_layers, of_run), option,
        )
        for rank in measured
        for choice in model.choices
        for column, option in enumerate(model.options)
    }  # fmt: skip
    runs = {rank: {(c, o): job.result() for (at, c, o), job in jobs.items() if at == rank} for rank in measured}
    found = []
    for rank in range(len(blocks)):
        like = rank if rank in measured else 1
        found.append(_Rank(model, rank, blocks[rank], blocks[like], rank - like).table(runs[like], rates))
    return found


@dataclass(frozen=True)
class _Rank:
    """Pipeline rank ``stage`` with ``blocks``, like one whose blocks are ``source``, with ``less`` microbatches fewer
    in flight.
    """

    model: Model
    stage: int
    blocks: tuple[int, ...]
    source: tuple[int, ...]
    less: int

    def table(self, runs: Uniform, rates: Rates) -> joint.Rank:
        rows = [self.model.linears(block) for block in self.blocks]
        members = np.unique(self.model.unit[[row for some in rows for row in some]]) if rows else np.zeros(0, np.int64)
        local = {unit: place for place, unit in enumerate(members.tolist())}
        block = np.zeros(len(members), np.int64)
        unit_of: dict[str, int] = {}  # linear's name in the runs -> unit
        for b, (own, there) in enumerate(zip(rows, self.source, strict=True)):
            for row, other in zip(own, self.model.linears(there), strict=True):
                unit_of[self.model.shapes[other].name] = local[int(self.model.unit[row])]
                block[unit_of[self.model.shapes[other].name]] = b
        kept = self._kept(runs)
        base, of_blocks, of_units, flight, stretch = self._phases(runs, unit_of, kept)
        inputs = []
        for name, (linears, sizes, mixed) in kept.items():
            units = tuple(sorted({unit_of[one] for one in linears}))
            b, forms = int(block[unit_of[name]]), self.model.forms()
            if len(units) == 1:  # its option decides alone
                of_units[:, units[0]] += flight[:, b, None, None] * sizes
            else:
                each = np.array([sizes[forms.index(form)] for form in range(max(forms) + 1)])
                more = None if mixed is None else self._more(runs, rates, name, each)
                inputs.append(joint.Input(b, units, forms, each, mixed, more))
        of_block, of_unit = self._seconds(runs, rates, unit_of, len(members))
        return joint.Rank(
            self.stage, members, block, base, of_blocks, of_units, inputs, flight, of_block, of_unit, stretch
        )

    def _kept(self, runs: Uniform) -> dict[str, tuple[tuple[str, ...], Bytes, Bytes | None]]:
        """First linear of an input -> all of them; bytes kept per microbatch [O, C], and of the rows [C] or None."""
        choices, options = self.model.choices, range(len(self.model.options))
        some: Mapping[str, Input] = runs[choices[0], 0][1].inputs
        found: dict[str, tuple[tuple[str, ...], Bytes, Bytes | None]] = {}
        for name, one in some.items():
            sizes = np.array([[runs[c, o][1].inputs[name].kept for c in choices] for o in options])
            mixed = np.where(sizes.any(axis=0), one.rows, 0) if one.gathers else None
            found[name] = (one.linears, sizes, mixed)
        return found

    def _more(self, runs: Uniform, rates: Rates, name: str, kept: Bytes) -> Floats:
        """[C]: seconds of an iteration that the gathers of an input's rows take beyond those of codes.  kept [F, C]."""
        config, choices = self.model.config, self.model.choices
        microbatches = config.num_microbatches(config.data_parallel_size(self.model.world_size))
        gathers = np.array([2 + runs[choice, 0][1].inputs[name].again for choice in choices])
        beyond = runs[choices[0], 0][1].inputs[name].rows - kept.max(axis=1).mean()
        return microbatches * gathers * beyond / rates.link

    def _phases(
        self, runs: Uniform, unit_of: Mapping[str, int], kept: Mapping[str, tuple[tuple[str, ...], Bytes, Bytes | None]]
    ) -> tuple[Bytes, Bytes, Bytes, Bytes, tuple[str, ...]]:
        """base [P], blocks [P, B, C], units [P, U, O, C] without kept inputs, flight [P, B], and names [P]."""
        choices, options, units = self.model.choices, len(self.model.options), 1 + max(unit_of.values(), default=-1)
        inputs = np.zeros((len(self.blocks), options, len(choices)), np.int64)
        for name, (_, sizes, _) in kept.items():
            inputs[self._place(name)] += sizes
        order = list(zip(*(phases.order for _, phases in runs.values()), strict=True))
        order = [alike for alike in order if min(phase.whole for phase in alike) >= self.less]
        base = np.zeros(len(order), np.int64)
        own = np.zeros((len(order), len(choices), options), np.int64)
        rest = np.zeros((len(order), len(self.blocks), len(choices), options), np.int64)
        weights = np.zeros((len(order), units, options, len(choices)), np.int64)
        flight = np.zeros((len(order), len(self.blocks)), np.int64)
        for p, alike in enumerate(order):
            assert len({phase.block for phase in alike}) == 1, "dry runs differ in their phases"
            flight[p] = [alike[0].flight.get(b, 0) - self.less for b in self.source]
            for phase, ((choice, o), (_, phases)) in zip(alike, runs.items(), strict=True):
                c = choices.index(choice)
                own[p, c, o] = phase.peak - sum(phase.kept.values()) - sum(phase.weights.values())
                for b, there in enumerate(self.source):
                    kept_here = phase.kept.get(there, 0) - self.less * phases.each.get(there, 0)
                    rest[p, b, c, o] = kept_here - flight[p, b] * inputs[b, o, c]
                for name, size in phase.weights.items():
                    weights[p, unit_of[name], o, c] += size
        of_blocks = rest.max(axis=3)
        for p, alike in enumerate(order):
            if alike[0].block == OUTSIDE:
                base[p] = own[p].max()
            else:
                of_blocks[p, self.source.index(alike[0].block)] += own[p].max(axis=1)
        name = next(iter(runs.values()))[0].name.partition(",")[0]
        return base, of_blocks, weights, flight, tuple(_where(name, alike[0]) for alike in order)

    def _place(self, linear: str) -> int:
        """The row of B of the block of a linear of the runs."""
        block = next(shape.block for shape in self.model.shapes if shape.name == linear)
        return self.source.index(block)

    def _seconds(self, runs: Uniform, rates: Rates, unit_of: Mapping[str, int], units: int) -> tuple[Floats, Floats]:
        """Of an iteration: blocks [B, C], and units [U, O, C]."""
        model, config = self.model, self.model.config
        choices, dp = model.choices, config.data_parallel_size(model.world_size)
        shape_of = {shape.name: shape for shape in model.shapes}
        tokens = config.training.global_batch_size * config.model.seq_length
        per_rank = tokens / (dp * config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size)
        again = {
            (name, choice): one.again
            for choice in choices
            for one in runs[choice, 0][1].inputs.values()
            for name in one.linears
        }
        gemm = np.zeros((len(unit_of), len(model.options), len(choices)))
        block, flops = np.zeros(len(unit_of), np.int64), np.zeros(len(unit_of))
        for row, name in enumerate(unit_of):
            shape, block[row] = shape_of[name], self._place(name)
            flops[row], size = shape.gemm_flops, (shape.out_features, shape.in_features)
            for o, option in enumerate(model.options):
                each = [model.times.of(getattr(option, one), one, *size) for one in GEMMS]
                for c, choice in enumerate(choices):
                    gemm[row, o, c] = sum(each) + each[0] * again[name, choice]
            gemm[row] *= shape.gemm_flops * per_rank / rates.bf16
        plain = config.replace(precision="bf16")  # the runs have one stretch
        by_option = [
            Runs(self.stage, self.source, {c: [runs[c, o]] for c in choices}) for o in range(len(model.options))
        ]
        total = np.zeros((0, len(model.options), len(choices)))
        if self.source:  # rows of blocks alone
            total = np.stack([seconds_of(one, plain, dp, rates)[: len(self.source)] for one in by_option], axis=1)
        beyond = total - np.stack([gemm[block == b].sum(axis=0) for b in range(len(self.source))] or [*total])
        of_unit = np.zeros((units, len(model.options), len(choices)))
        for row, name in enumerate(unit_of):
            share = flops[row] / flops[block == block[row]].sum()
            of_unit[unit_of[name]] += gemm[row] + share * (beyond[block[row]] - beyond[block[row], :1])
        return beyond[:, 0], of_unit


def _where(name: str, phase: Phase) -> str:
    return f"{name}, block {phase.block}" if phase.block != OUTSIDE else name
