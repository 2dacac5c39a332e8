"""Both plans of a run from statistics: dry runs of all formats and choices, the joint program, a dry run of the answer.

The run that takes them: --precision plan --precision-plan FILE --memory-plan FILE.  Its iterations are all alike.
Under --precision snip, probes in BF16 keep more than any plan does, so `auto` plans for those.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_snip.config import TrainingConfig
from megatron_snip.errors import UserError
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.program import Program, checked
from megatron_snip.snip.planner import Planner
from megatron_snip.train.dry_run.counts import Measured
from megatron_snip.train.dry_run.measure import end_ranks, measure, processes, without_files
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import MOST_PROCESSES, TRIES, choices_of, held_blocks
from megatron_snip.train.memory_plan.joint_tables import tables
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, RankCost, made_for
from megatron_snip.train.memory_plan.program import GIB
from megatron_snip.train.memory_plan.rates import rates_of
from megatron_snip.train.validate import validate


@dataclass(frozen=True)
class Together:
    """Plans of precision and memory, and the dry runs under both.

    apart: the plan of precision first, and then of memory for it; None if none was found.  found: the joint one.
    """

    precision: Plan
    memory: MemoryPlan
    measured: Sequence[Measured]
    found: joint.Chosen
    apart: joint.Chosen | None

    @property
    def told(self) -> str:
        """One line: seconds of the slowest rank and quality loss, against planning one after the other."""
        seconds = max(self.found.seconds)
        said = (
            f"{self.memory.told}; {seconds:.4g} s an iteration by {self.memory.rates} rates, at most "
            f"{self.found.gap:.2%} above the least"
        )
        if self.apart is None:
            return f"{said}; no plan of precision first and then memory was found"
        first = max(self.apart.seconds)
        return (
            f"{said}, {1 - seconds / first:.2%} less than {first:.4g} of precision first and then memory; "
            f"quality loss {self.found.quality:.4g} instead of {self.apart.quality:.4g}"
        )


class JointPlanner:
    """The measurements from which joint plans for any budget come.  planner: statistics and SNIP's options."""

    def __init__(self, planner: Planner, world_size: int, pool: ProcessPoolExecutor) -> None:
        config = planner.config.replace(
            precision="snip", precision_plan=None, memory_plan="none", recompute_granularity="none",
            recompute_method=None, recompute_num_layers=None, recompute_modules=TrainingConfig().recompute_modules,
            dry_run=True, host_memory_gib=None, host_bandwidth=None,
        )  # fmt: skip
        self.config, self.planner, self.world_size, self.pool = without_files(config), planner, world_size, pool
        validate(self.config, world_size)
        request = planner.request(config.snip.snip_objective)
        self.alone: Solution = request.solve()
        self.program: Program = checked(request)
        ranks = tables(self.config, world_size, planner, self.program.group, pool)
        self.problem = joint.Problem(ranks, self.program.cost, self.program.allowed, self.program.limits)

    def plan(self, gib: float) -> Together:
        """Both plans for ``gib`` GiB a rank, checked by a dry run.  Raises UserError if nothing fits."""
        short = 0.0
        for _ in range(TRIES):
            budget = int((gib - short) * GIB)
            apart = self.apart(budget)
            found = joint.solve(self.problem, budget, self.alone.objective, apart)
            made = self.files(found, gib)
            measured = self.measured(*made)
            over = max(one.worst.total for one in measured) / GIB - gib
            if over <= 0:
                return Together(*made, measured, found, apart)
            short += over
        raise UserError(
            f"--memory-gib: after {TRIES} plans, dry runs still need {over:.2f} GiB more than the {gib:.2f} given; "
            "raise it, shard more, or lower --micro-batch-size"
        )

    def apart(self, budget: int) -> joint.Chosen | None:
        """Precision first, and then memory for it; None if no such plan is found."""
        options = np.zeros(len(self.program.cost), np.int64)
        options[self.program.group] = self.alone.choice
        try:
            return joint.separately(self.problem, budget, options)
        except UserError:
            return None

    def files(self, found: joint.Chosen, gib: float | None) -> tuple[Plan, MemoryPlan]:
        """A joint plan as the two that a run takes.  The gap of each is that of what it is about: loss and seconds."""
        least = float(self.program.cost.min(axis=1, where=self.program.allowed, initial=np.inf).sum())
        bound = found.quality - found.loss_gap * (found.quality - least)
        options = found.options[self.program.group]
        solution = Solution(options, found.quality, bound, found.loss_gap, found.status, 0.0)
        snip = self.planner.config.snip
        blocks, names = ["keep"] * self.config.model.num_layers, choices_of(self.config)
        for held, chosen in zip(held_blocks(self.config), found.blocks, strict=True):
            for block, choice in zip(held, chosen, strict=True):
                blocks[block] = names[choice]
        ranks = [RankCost(r, *cost) for r, cost in enumerate(zip(found.peaks, found.seconds, strict=True))]
        memory = MemoryPlan(
            tuple(blocks), made_for(self.config, self.world_size), gib, tuple(ranks), rates_of(self.config).name,
            found.status, found.gap,
        )  # fmt: skip
        return self.planner.plan(solution, snip.snip_objective, snip.snip_target), memory

    def measured(self, precision: Plan, memory: MemoryPlan) -> list[Measured]:
        """Dry runs of the pipeline's ends under both plans."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            precision.save(path)
            config = self.config.replace(precision="plan", precision_plan=str(path))
            ends = end_ranks(config, self.world_size)
            jobs = [self.pool.submit(measure, config, self.world_size, rank, memory) for rank in ends]
            return [job.result() for job in jobs]


def plan_together(planner: Planner, world_size: int, gib: float) -> Together:
    """Both plans of a run of ``world_size`` ranks with ``gib`` GiB each.  Raises UserError if nothing fits."""
    with processes(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        return JointPlanner(planner, world_size, pool).plan(gib)
