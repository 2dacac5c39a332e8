"""Precision and memory planned together, one after the other, and by flags: modelled seconds and quality loss.

    python benchmarks/joint_plan.py --case 1b --stats stats.json --output results.json

Bytes are those of dry runs of the case's model; seconds are FLOPs at data-sheet rates.  No statistics of these models
exist.  The quality loss is that of another model's statistics (--stats, with mxfp8 and nvfp4): block b of n takes the
rows of the block at the same relative depth, linear by linear.  It stands for a table with the spread of a real one,
and says nothing about these models' losses.

Quality loss is relative to mxfp8 everywhere.  ``at equal quality`` is the joint plan; ``at equal time`` is the plan of
least quality loss in the seconds of precision first and then memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_snip.arguments import parse
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.plan.options import check_choices, read_times, solve_request
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.planner import Planner
from megatron_snip.train.dry_run.measure import processes, without_files
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import choices_of
from megatron_snip.train.memory_plan.joint_plan import JointPlanner
from megatron_snip.train.memory_plan.program import GIB
from megatron_snip.train.setup import snip_shapes

#: Case -> options of the run, ranks, and GiB a rank.
CASES = {
    "1b": (
        "--config examples/llama_1b/llama_1b.toml --data-parallel-sharding-strategy no_shard --global-batch-size 8",
        1,
        (24.0,),
    ),
    "1b_4096": (
        "--config examples/llama_1b/llama_1b.toml --data-parallel-sharding-strategy no_shard --global-batch-size 8 "
        "--seq-length 4096",
        1,
        (24.0,),
    ),
    "1b_collage": (
        "--config examples/llama_1b/llama_1b.toml --data-parallel-sharding-strategy no_shard --global-batch-size 8 "
        "--optimizer-precision collage-plus",
        1,
        (20.0, 22.0, 24.0),
    ),
    "smollm2": (
        "--num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9 --num-query-groups 3 "
        "--kv-channels 64 --vocab-size 49152 --seq-length 2048 --micro-batch-size 16 --global-batch-size 64 --bf16 "
        "--train-iters 1000 --lr 1e-3 --data-parallel-sharding-strategy no_shard",
        1,
        (8.0, 10.0, 12.0, 14.0),
    ),
    "7b_batch_4": ("--config examples/llama_7b/llama_7b.toml --micro-batch-size 4", 8, (50.0, 60.0, 70.0, 78.0)),
    "7b": ("--config examples/llama_7b/llama_7b.toml", 8, (30.0, 32.0, 34.0, 36.0)),
    "70b": ("--config examples/llama_70b/llama_70b.toml", 64, (80.0,)),
    "70b_batch_4": ("--config examples/llama_70b/llama_70b.toml --micro-batch-size 4", 64, (80.0,)),
}


@dataclasses.dataclass(frozen=True)
class Borrowed(Planner):
    """A planner whose quality loss is that of another model.  The statistics only stand in for their iteration."""

    loss: Any = None

    def request(self, objective: str, seed: int = 0) -> SolveRequest:
        """The request with the borrowed quality loss."""
        return solve_request(self.config.snip, self.shapes, self.choices, self.loss, times=self.times)


def borrowed(config: Config, path: Path) -> Borrowed:
    """The planner of a case."""
    stats = Statistics.load(path)
    own = Planner(config, stats, stats.shapes, check_choices(config.snip, stats.shapes), read_times(config.snip))
    table = own.request("snip").quality_loss
    rows = {(shape.block, shape.kind): table[row] for row, shape in enumerate(stats.shapes)}
    shapes, last = snip_shapes(config), max(shape.block for shape in stats.shapes)
    depth = max(shape.block for shape in shapes)
    loss = np.array([rows[round(shape.block * last / depth), shape.kind] for shape in shapes])
    return Borrowed(config, stats, shapes, check_choices(config.snip, shapes), read_times(config.snip), loss)


class Case:
    """A model, its measurements, and the plans that are compared."""

    def __init__(self, name: str, target: float, stats: Path, pool: Any) -> None:
        words, world, _ = CASES[name]
        options = f"{words} --mock-data --precision snip --snip-options mxfp8,nvfp4 --snip-target {target}"
        options += " --snip-stage-constraint none --snip-granularity linear"
        begin = time.perf_counter()
        self.joint = JointPlanner(borrowed(without_files(parse(options.split())), stats), world, pool)
        self.seconds, self.problem = time.perf_counter() - begin, self.joint.problem

    def alone(self) -> Any:
        """The options of units in the plan of precision alone."""
        options = np.zeros(len(self.problem.cost), np.int64)
        options[self.joint.program.group] = self.joint.alone.choice
        return options

    def everywhere(self, option: int) -> Any:
        """One option in all units."""
        return np.full(len(self.problem.cost), option)

    def told(self, found: joint.Chosen) -> dict[str, Any]:
        """A plan as numbers."""
        names, planner = choices_of(self.joint.config), self.joint.planner
        chosen = [names[c] for rank in found.blocks for c in rank]
        options = found.options[self.joint.program.group].tolist()
        linears = {s.name: planner.choices.options[o] for s, o in zip(planner.shapes, options, strict=True)}
        return {
            "seconds": max(found.seconds), "quality_loss": found.quality, "peak_gib": max(found.peaks) / GIB,
            "fp4_share": achieved(planner.shapes, linears), "blocks": {n: chosen.count(n) for n in names},
            "status": found.status, "gap": found.gap, "loss_gap": found.loss_gap,
        }  # fmt: skip

    def plans(self, gib: float) -> dict[str, Any]:
        """Name -> plan, for one budget."""
        budget, found = int(gib * GIB), {}
        for choice, flag in enumerate(choices_of(self.joint.config)):
            blocks = [[choice] * len(rank) for rank in self.blocks()]
            for said, options in (
                ("mxfp8", self.everywhere(0)), ("nvfp4", self.everywhere(1)), ("precision plan", self.alone())
            ):  # fmt: skip
                one = joint.given(self.problem, options, blocks)
                if max(one.peaks) <= budget:
                    found[f"{said}, {flag} for all"] = one
        try:
            first = joint.separately(self.problem, budget, self.everywhere(0))
            found["memory first"] = joint.given(self.problem, self.alone(), first.blocks)
        except UserError as error:
            print(f"memory first: {error}", flush=True)
        begin = time.perf_counter()
        apart = self.joint.apart(budget)
        together = joint.solve(self.problem, budget, self.joint.alone.objective, apart)
        took = time.perf_counter() - begin
        if apart is not None:
            found["precision first"] = apart
            if (least := joint.least_loss(self.problem, budget, max(apart.seconds), apart)) is not None:
                found["together, at equal time"] = least
        found["together, at equal quality"] = together
        made = self.joint.measured(*self.joint.files(together, gib))
        return {
            "plans": {name: self.told(one) for name, one in found.items()},
            "measured_peak_gib": max(one.worst.total for one in made) / GIB,
            "solver_seconds": took,
        }

    def blocks(self) -> list[tuple[int, ...]]:
        """Blocks of each rank, only for their number."""
        return [tuple(range(rank.blocks.shape[1])) for rank in self.problem.ranks]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--gib", type=float, nargs="*")
    parser.add_argument("--output", type=Path, required=True)
    own = parser.parse_args()
    with processes(min(8, len(os.sched_getaffinity(0)))) as pool:
        case = Case(own.case, own.target, own.stats, pool)
        result: dict[str, Any] = {
            "case": own.case, "options": CASES[own.case][0], "ranks": CASES[own.case][1], "target": own.target,
            "dry_run_seconds": case.seconds, "precision_alone": case.joint.alone.objective,
            "budgets": {},
        }  # fmt: skip
        for gib in own.gib or CASES[own.case][2]:
            try:
                result["budgets"][f"{gib:g}"] = found = case.plans(gib)
            except UserError as error:
                print(f"{gib:g} GiB: {error}", flush=True)
                continue
            print(f"{gib:g} GiB, dry run of the joint plan {found['measured_peak_gib']:.2f}", flush=True)
            for name, one in found["plans"].items():
                said = f"{one['seconds']:.5g} s, loss {one['quality_loss']:.4g}, {one['peak_gib']:.2f} GiB"
                more = f"FP4 {one['fp4_share']:.1%}, {one['blocks']}, {one['status']} {one['gap']:.1e}"
                print(f"  {name:30} {said}, {more}", flush=True)
        own.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
