"""`--memory-plan auto`: dry runs with each choice, a program for each pipeline rank, and a dry run of the answer."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.model.recompute import CHOICES
from megatron_snip.model.stages import is_interleaved, stage_blocks
from megatron_snip.quant import LinearPrecision
from megatron_snip.runtime import Runtime
from megatron_snip.train.dry_run.counts import Measured
from megatron_snip.train.dry_run.measure import end_ranks, measure, measure_all, measure_phases, processes
from megatron_snip.train.health.memory import free_memory, held, host_shortage, local_stages
from megatron_snip.train.memory_plan.plan_file import (
    MemoryPlan,
    RankCost,
    host_units,
    made_for,
    precision_of,
    read_memory_plan,
)
from megatron_snip.train.memory_plan.program import GIB, Chosen, Peaks, Runs, host_peaks_of, peaks_of, solve
from megatron_snip.train.memory_plan.rates import Rates, rates_of

LOGGER = logging.getLogger("megatron_snip")
T = TypeVar("T")
MOST_PROCESSES = 8
#: How often the budget is lowered by what a dry run of the answer needs beyond it.
TRIES = 4
#: What to do if the host has too little memory; {} is the largest value that fits.
_AT_MOST = "give --memory-plan auto --host-memory-gib with at most {}, or use more machines"
_SHARE = "give --optimizer-offload-fraction with at most {}, or use more machines"


def held_blocks(config: Config) -> list[tuple[int, ...]]:
    """The blocks of each pipeline rank by global index, in order."""
    pp, stages = config.parallel.pipeline_model_parallel_size, stage_blocks(config.model.num_layers, config.parallel)
    return [tuple(block for stage in stages[rank::pp] for block in stage) for rank in range(pp)]


def measured_ranks(config: Config) -> list[int]:
    """Pipeline ranks whose runs are measured.  Those between the ends are alike but for the microbatches in flight."""
    pp = config.parallel.pipeline_model_parallel_size
    if pp <= 3 or is_interleaved(config.model.num_layers, config.parallel):
        return list(range(pp))
    return [0, 1, pp - 1]


def choices_of(config: Config) -> tuple[str, ...]:
    """The choices that a run may make: offload only if it is told how much of the host is its own.

    Joint plans are not told, because their program has no rows of the host.
    """
    left_out = {"selective"} if config.training.compile else set()
    left_out |= {"offload"} if config.dry_run.host_memory_gib is None else set()
    return tuple(choice for choice in CHOICES if choice not in left_out)


def measure_runs(
    config: Config, world_size: int, pool: ProcessPoolExecutor, precisions: Sequence[LinearPrecision | None] = (None,)
) -> list[list[Runs]]:
    """In each precision, the runs of each pipeline rank, measured or derived from the rank before it.

    precisions: see `measure_phases`; None is that of the config.
    """
    blocks, measured, choices = held_blocks(config), measured_ranks(config), choices_of(config)
    each, of_run = world_size // len(blocks), made_for(config, world_size)
    jobs = {
        (rank, choice, column): pool.submit(
            measure_phases, config, world_size, rank * each, MemoryPlan((choice,) * config.model.num_layers, of_run),
            precision,
        )
        for rank in measured
        for choice in choices
        for column, precision in enumerate(precisions)
    }  # fmt: skip
    may_move = config.dry_run.host_memory_gib is not None and config.training.optimizer_impl == "torch"
    wanted, found = host_units(config) if may_move else (), []
    for column in range(len(precisions)):
        ranks: list[Runs] = []
        for rank in range(len(blocks)):
            if rank in measured:
                by_choice = {choice: jobs[rank, choice, column].result() for choice in choices}
                states = tuple(unit for unit in by_choice[choices[0]][0][1].units.states if unit in wanted)
                ranks.append(Runs(rank, blocks[rank], by_choice, states=states))
            else:
                ranks.append(dataclasses.replace(ranks[1], stage=rank, microbatches_less=rank - 1))
        found.append(ranks)
    return found


def seconds_of(runs: Runs, config: Config, dp: int, rates: Rates) -> NDArray[np.float64]:
    """[R, O]: modelled seconds of an iteration that a block takes under each choice, and what further rows add."""
    stretch = 1 if config.precision.precision == "snip" else 0  # most iterations run under a plan
    # those whose backward begins a stage's; on the last stage nothing has left by then
    exposed = {stage[-1] for stage in stage_blocks(config.model.num_layers, config.parallel)[:-1] if stage}
    table = np.zeros((len(runs.blocks), len(runs.choices)))
    for column, of_choice in enumerate(runs.by_choice.values()):
        phases = of_choice[stretch][1]
        for row, block in enumerate(runs.blocks):
            forward = phases.forward_counts[block]
            backward = phases.counts[block] - forward
            times = config.num_microbatches(dp) / phases.forwards
            table[row, column] = rates.block_seconds(forward, backward, exposed=block in exposed) * times
    units = next(iter(runs.by_choice.values()))[stretch][1].units
    # what else may be chosen has two choices: 0 and 1
    more = np.full((len(runs.gathered) + len(runs.states), len(runs.choices)), np.inf)
    microbatches, states = config.num_microbatches(dp), [units.states[unit] for unit in runs.states]
    more[:, 0] = [*(units.sent[b] / rates.link * microbatches for b in runs.gathered), *(0.0 for _ in states)]
    more[:, 1] = [*(0.0 for _ in runs.gathered), *(rates.update_seconds(one.copied, one.touched) for one in states)]
    return np.concatenate([table, more])


class _Choices:
    """The choices of a plan, from those of its ranks."""

    def __init__(self, config: Config) -> None:
        self.choices, self.held = choices_of(config), held_blocks(config)
        self.blocks = ["keep"] * config.model.num_layers
        self.gathered: list[int] = []
        self.on_host: set[str] = set()

    def add(self, runs: Runs, choice: Sequence[int]) -> None:
        """Those of a rank [R], whose runs may be those of an earlier rank with other blocks."""
        here = dict(zip(runs.blocks, self.held[runs.stage], strict=True))
        names = {f"layers.{there}": f"layers.{block}" for there, block in here.items()}
        rows = iter(choice)
        for block in here.values():
            self.blocks[block] = self.choices[next(rows)]
        self.gathered += [here[block] for block in runs.gathered if next(rows)]
        self.on_host |= {names.get(unit, unit) for unit in runs.states if next(rows)}


class Planner:
    """The measurements of a run's ranks, from which it makes plans for any budget."""

    def __init__(self, config: Config, world_size: int, pool: ProcessPoolExecutor) -> None:
        self.config, self.world_size = config, world_size
        self.rates, dp = rates_of(config), config.data_parallel_size(world_size)
        (self.runs,) = measure_runs(config, world_size, pool)
        self.peaks: list[Peaks] = [peaks_of(runs) for runs in self.runs]
        self.host_peaks: list[Peaks] = [host_peaks_of(runs) for runs in self.runs]
        self.seconds = [seconds_of(runs, config, dp, self.rates) for runs in self.runs]

    def plan(self, gib: float, short: float = 0.0) -> MemoryPlan:
        """The fastest plan whose peaks stay within ``gib`` less ``short`` on every rank.  Raises UserError if none."""
        budget, host_gib = int((gib - short) * GIB), self.config.dry_run.host_memory_gib
        solved: dict[bytes, Chosen] = {}
        parts, found = _Choices(self.config), []
        for runs, peaks, host, seconds in zip(self.runs, self.peaks, self.host_peaks, self.seconds, strict=True):
            key = peaks.values.tobytes() + peaks.base.tobytes() + host.values.tobytes() + seconds.tobytes()
            if key not in solved:
                what = f"pipeline rank {runs.stage}"
                solved[key] = solve(peaks, seconds, budget, what, host, int((host_gib or 0) * GIB))
            found.append(solved[key])
            parts.add(runs, solved[key].choice)
        ranks = tuple(RankCost(rank, one.peak, one.seconds, one.host) for rank, one in enumerate(found))
        of_run = made_for(self.config, self.world_size)
        status = "optimal" if all(one.status == "optimal" for one in found) else "limit"
        return MemoryPlan(
            tuple(parts.blocks), of_run, gib, ranks, self.rates.name, status, max(one.gap for one in found),
            tuple(sorted(parts.gathered)), tuple(unit for unit in host_units(self.config) if unit in parts.on_host),
            precision_of(self.config),
        )  # fmt: skip


def make_plan(config: Config, world_size: int, gib: float) -> tuple[MemoryPlan, list[Measured]]:
    """The plan for ``gib`` GiB a rank, and the dry run under it.  Raises UserError if no plan fits."""
    workers = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with processes(workers) as pool:
        planner = Planner(config, world_size, pool)
        short = 0.0
        for _ in range(TRIES):
            plan = planner.plan(gib, short)
            ends = end_ranks(config, world_size)
            jobs = [pool.submit(measure, config, world_size, rank, plan) for rank in ends]
            measured = [job.result() for job in jobs]
            over = max(one.worst.total for one in measured) / GIB - gib
            if over <= 0:
                return plan, measured
            short += over
    raise UserError(
        f"--memory-plan auto: after {TRIES} plans, dry runs still need {over:.2f} GiB more than the {gib:.2f} of "
        "--memory-gib; raise it, shard more, or lower --micro-batch-size"
    )


def budget_of(config: Config, device: torch.device | None) -> float:
    """GiB of --memory-gib, or what is free on this GPU.  Raises UserError without either."""
    if config.dry_run.memory_gib is not None:
        return config.dry_run.memory_gib
    if device is None or device.type != "cuda":
        raise UserError("--memory-plan auto needs the memory of a rank, and there is no GPU here; give --memory-gib")
    free = free_memory(device)
    assert free is not None
    return free / GIB


def plan_of_run(config: Config, here: Runtime) -> MemoryPlan | None:
    """The plan of --memory-plan, which for auto rank 0 makes; None for none.  Every rank must call it.

    Raises UserError on all ranks, also if a machine lacks the memory that its ranks will hold on the host.
    """
    plan = _auto_plan(config, here) if config.training.memory_plan == "auto" else _plan_of_file(config, here)
    by_stage, t = host_bytes(config, here, plan), config.training
    needed = [by_stage[stage] for stage in local_stages(config, here)]
    if plan is not None and (plan.on_host or "offload" in plan.blocks):
        what, way_out, most = f"--memory-plan {t.memory_plan}", _AT_MOST, sum(needed) / len(needed) / GIB
    else:
        what, way_out, most = "--optimizer-cpu-offload", _SHARE, t.optimizer_offload_fraction
    errors = [host_shortage(needed, what, way_out, most)] * here.world_size
    if any(by_stage):  # before any rank takes its part
        dist.all_gather_object(errors, errors[0])
    if found := [error for error in errors if error]:
        raise UserError(found[0])
    return plan


def _plan_of_file(config: Config, here: Runtime) -> MemoryPlan | None:
    plan, path = read_memory_plan(config, here.world_size), config.training.memory_plan
    if plan is not None and plan.precision not in ("", now := precision_of(config)):
        LOGGER.warning(
            f"--memory-plan {path} was made for the precision {plan.precision}, this run's is {now}, and it may need "
            "more memory than planned; --dry-run shows how much, and --memory-plan auto makes a plan for this precision"
        )
    return plan


def host_bytes(config: Config, here: Runtime, plan: MemoryPlan | None) -> list[int]:
    """Bytes that a rank of each pipeline rank will hold on the host.  Every rank must call it.

    What blocks send there is the plan's own prediction.  Of a plan without one for this precision, as if written by
    hand, rank 0 makes a dry run.
    """
    of_states = held(config, here.world_size, plan=plan, page_locked=here.device.type == "cuda")
    states, pp = [host for _, host in of_states], config.parallel.pipeline_model_parallel_size
    if plan is None or "offload" not in plan.blocks:
        return states
    if len(plan.ranks) == pp and plan.precision == precision_of(config):
        return [rank.host + more * (not plan.on_host) for rank, more in zip(plan.ranks, states, strict=True)]

    def dry_run() -> dict[int, int]:
        ranks = [here.world_size // pp * stage for stage in measured_ranks(config)]
        measured = measure_all(config, here.world_size, ranks, plan)
        return {one.stage: max(stretch.host for stretch in one.stretches) for one in measured}

    found = _made_by_rank_0(here, "host bytes", dry_run)
    return [found[stage if stage in found else 1] for stage in range(pp)]


def _made_by_rank_0(here: Runtime, what: str, make: Callable[[], T]) -> T:
    """What rank 0 makes, on all ranks.  Takes as long as it must, where a collective would time out.

    what: a name of its own.  If rank 0 dies meanwhile, the heartbeat ends the others.
    """
    told: list[T | None] = [None]
    store = PrefixStore(what, _get_default_store())
    if here.rank == 0:
        try:
            told = [make()]
        finally:
            store.set("made", "")
    while not store.check(["made"]):
        time.sleep(0.05)
    dist.broadcast_object_list(told, src=0)
    return cast(T, told[0])


def _auto_plan(config: Config, here: Runtime) -> MemoryPlan:
    """The plan that rank 0 makes.  Raises UserError on all ranks."""

    def make() -> MemoryPlan | UserError:
        try:
            return _checked_plan(config, here)
        except UserError as error:
            return error

    plan = _made_by_rank_0(here, "memory plan", make)
    if isinstance(plan, UserError):
        raise plan
    LOGGER.info(f"memory plan {plan.hash} for {plan.memory_gib:.4g} GiB: {plan.told}")
    return plan


def _checked_plan(config: Config, here: Runtime) -> MemoryPlan:
    if config.dry_run.host_memory_gib is not None:
        needed = [config.dry_run.host_memory_gib * GIB] * runtime.environment_local_world_size()
        if error := host_shortage(needed, "--host-memory-gib", _AT_MOST, config.dry_run.host_memory_gib):
            raise UserError(error)
    return make_plan(config, here.world_size, budget_of(config, here.device))[0]


def as_lines(plan: MemoryPlan) -> list[str]:
    """The plan for display: the choices by pipeline rank, predicted peaks and modelled seconds."""
    pp = len(plan.ranks)
    made = "" if plan.memory_gib is None else f" for {plan.memory_gib:g} GiB ({plan.status}, gap {plan.gap:.2g})"
    lines = [f"memory plan {plan.hash}{made}: {plan.told}"]
    for rank in plan.ranks:
        host = f" and {rank.host / GIB:.2f} GiB on the host" if rank.host else ""
        lines.append(
            f"  pipeline rank {rank.stage} of {pp}: predicted peak {rank.peak / GIB:.2f} GiB{host}, blocks take "
            f"{rank.seconds:.4g} s an iteration by {plan.rates} rates"
        )
    return [*lines, *(f"  {line}" for line in _spans(plan.blocks))]


def _spans(blocks: Sequence[str]) -> list[str]:
    """Stretches of blocks of one choice."""
    spans: list[tuple[int, int, str]] = []
    for index, choice in enumerate(blocks):
        if spans and spans[-1][2] == choice:
            spans[-1] = (spans[-1][0], index, choice)
        else:
            spans.append((index, index, choice))
    words = [f"{a}: {choice}" if a == b else f"{a}-{b}: {choice}" for a, b, choice in spans]
    return [f"blocks {', '.join(words)}"]
