"""How long processes of a pipeline stand idle, counted from schedules and FLOPs, for the examples' layouts.

    python benchmarks/bubble.py            # llama_7b and llama_70b; --json FILE keeps the figures

Counted, not measured: an operation takes its FLOPs, communication nothing, and an operation starts when its process is
free and what it reads is there.  1F1B's order is written out here; the others' is what torch's own schedule classes
make.  A linear's dgrad and wgrad take as long as its fprop, attention's backward twice its forward, all of it before
the gradient goes on; what is recomputed is too.  Idle is the share of all processes' time: of equal stages without
output layer, which is the schedule's own bubble; of the model's, whose last stage has it; and of those where three
quarters of the linears are in FP4 and the others in FP8, at the nominal times of a quarter and half of BF16's: of each
stage's linears, or as --snip-stage-constraint makespan deals them out.  "held" are the blocks whose activations of a
microbatch the fullest process keeps at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megatron_snip.arguments import parse
from megatron_snip.config import Config
from megatron_snip.model.llama import LLAMA
from megatron_snip.model.stages import stage_blocks
from megatron_snip.snip.plan.cost import by_stage
from megatron_snip.snip.plan.options import read_choices, solve_request
from megatron_snip.train.setup import snip_shapes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: An operation: its kind (F forward, B backward, I and W its halves), stage and microbatch.
Op = tuple[str, int, int]
PLANNED = 0.75 / 4 + 0.25 / 2  # time of a linear by BF16's, on average, at --snip-target 0.75


@dataclass(frozen=True)
class Costs:
    """Time of a stage's operations, in any unit; those of the last stage may differ."""

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: str) -> float:
        """Of an operation of this kind."""
        parts = {"F": (self.forward,), "I": (self.backward_input,), "W": (self.backward_weight,)}
        return sum(parts.get(kind, (self.backward_input, self.backward_weight)))


def one_f_one_b(pp: int, microbatches: int) -> list[list[Op]]:
    """Megatron-LM's and torch's schedule without interleaving, a list of operations a process."""
    orders = []
    for rank in range(pp):
        ahead = min(microbatches, pp - rank)
        order: list[Op] = [("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("B", rank, m))
            if m + ahead < microbatches:
                order.append(("F", rank, m + ahead))
        orders.append(order)
    return orders


def of_torch(schedule: Any, pp: int, microbatches: int, chunks: int) -> list[list[Op]]:
    """What a schedule class of torch's makes each process do."""
    stages = [
        SimpleNamespace(
            group_size=pp, group_rank=0, num_stages=pp * chunks, stage_index=c * pp, is_last=False, submod=nn.Module()
        )
        for c in range(chunks)
    ]
    order = schedule(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    # as they are written, such as 3F12: the words for kinds differ between versions of torch
    words = [
        [re.fullmatch(r"(\d+)([FBIW])(\d+)", str(op)) for op in order[rank] if op is not None] for rank in range(pp)
    ]
    assert all(word is not None for of_rank in words for word in of_rank)
    return [[(word[2], int(word[1]), int(word[3])) for word in of_rank if word] for of_rank in words]


def run(orders: Sequence[Sequence[Op]], costs: Sequence[Costs], blocks: Sequence[int]) -> tuple[float, int]:
    """(share of idle time, most blocks' activations that a process holds) of orders, with costs and blocks by stage."""
    done: dict[Op, float] = {}
    at, clock, held, most = [0] * len(orders), [0.0] * len(orders), [0] * len(orders), 0
    last = len(costs) - 1

    def needs(op: Op) -> list[tuple[Op, ...]]:
        kind, stage, m = op
        if kind == "F":
            return [(("F", stage - 1, m),)] if stage else []
        if kind == "W":
            return [(("I", stage, m),)]
        above = [(("B", stage + 1, m), ("I", stage + 1, m))] if stage < last else []
        return [(("F", stage, m),), *above]

    while any(place < len(order) for place, order in zip(at, orders)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                op = order[at[rank]]
                ready = [next((done[one] for one in any_of if one in done), None) for any_of in needs(op)]
                if None in ready:
                    break
                clock[rank] = done[op] = max([clock[rank], *(r for r in ready if r is not None)]) + costs[op[1]].of(
                    op[0]
                )
                at[rank] += 1
                held[rank] += {"F": 1, "I": 0}.get(op[0], -1) * blocks[op[1]]
                most = max(most, held[rank])
        assert sum(at) > before, "the schedule waits for itself"
    busy = sum(costs[stage].of(kind) for order in orders for kind, stage, _ in order)
    return 1.0 - busy / (len(orders) * max(clock)), most


def dealt_out(config: Config) -> list[float]:
    """Mean time of a linear of each process, by BF16's, under a plan of --snip-stage-constraint makespan."""
    shapes = snip_shapes(config)
    options = {"snip_options": "fp8,fp4", "snip_granularity": "linear", "snip_target": 0.75}
    snip = config.replace(snip_stage_constraint="makespan", **options).snip
    choices = read_choices(snip, shapes)
    worse = np.outer([shape.gemm_flops for shape in shapes], [0.0, 1.0])  # so that no more than the target is in FP4
    found = solve_request(snip, shapes, choices, worse).solve()
    plan = {shape.name: choices.options[option] for shape, option in zip(shapes, found.choice)}
    return [0.5 - 0.25 * share for share, _ in by_stage(shapes, plan).values()]


def costs_of(config: Config, lengths: Sequence[int], *, head: bool, linear: Sequence[float] = (1.0,)) -> list[Costs]:
    """FLOPs of a token in each stage of so many blocks; head: with the output layer.

    linear: what a linear of each process, or of all, takes by its time in BF16.
    """
    m = config.model
    whole = sum(shape.gemm_flops for shape in LLAMA.linear_shapes(m)) / m.num_layers
    attention = 2 * 2 * m.num_attention_heads * m.head_dim * m.seq_length / 2
    again = config.training.recompute_granularity == "full"
    costs = []
    for stage, n in enumerate(lengths):
        linears = whole * linear[stage % len(linear)]
        logits = 2 * m.padded_vocab_size * m.hidden_size * (head and stage == len(lengths) - 1)
        forward = n * (linears + attention) + logits
        costs.append(
            Costs(forward, n * (linears + 2 * attention) + logits + again * (forward - logits), n * linears + logits)
        )
    return costs


def rows(config: Config, pp: int, microbatches: int, last: int) -> list[tuple[str, float, float, float, float, int]]:
    """(schedule, four shares of idle time, held), where chunks are whole blocks.

    Idle: of equal stages, of the model, of the model under a plan with as much FP4 in each stage, and by makespan.

    last: blocks of the last process for a row of unequal stages.
    """
    m, found = config.model, []
    tried: list[tuple[str, Any, int, int | None]] = [
        ("1F1B", None, 1, None),
        (f"1F1B, {last} blocks last", None, 1, last),
    ]
    for name, schedule in (
        ("interleaved", ScheduleInterleaved1F1B), ("interleaved zero bubble", ScheduleInterleavedZeroBubble)
    ):  # fmt: skip
        tried += [(f"{name}, {v} chunks", schedule, v, None) for v in (2, 4, 5) if m.num_layers // pp % v == 0]
    tried += [("ZBV", ScheduleZBVZeroBubble, 2, None)]
    for name, schedule, chunks, of_last in tried:
        orders = of_torch(schedule, pp, microbatches, chunks) if schedule is not None else one_f_one_b(pp, microbatches)
        split = config.replace(
            decoder_last_pipeline_num_layers=of_last,
            num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        )
        lengths = [len(blocks) for blocks in stage_blocks(m.num_layers, split.parallel)]
        bubble, held = run(orders, costs_of(config, [1] * len(lengths), head=False), lengths)
        whole, _ = run(orders, costs_of(config, lengths, head=True), lengths)
        planned, _ = run(orders, costs_of(config, lengths, head=True, linear=[PLANNED]), lengths)
        dealt, _ = run(orders, costs_of(config, lengths, head=True, linear=dealt_out(split)), lengths)
        found.append((name, bubble, whole, planned, dealt, held))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    for name, gpus, changes, last in (
        ("llama_70b", 64, {}, 17),
        ("llama_70b", 512, {}, 17),
        ("llama_7b", 64, {"pipeline_model_parallel_size": 2}, 15),
    ):
        config = parse(["--config", str(EXAMPLES / name / f"{name}.toml")]).replace(**changes)
        pp, dp = config.parallel.pipeline_model_parallel_size, config.data_parallel_size(gpus)
        microbatches = config.num_microbatches(dp)
        layout = f"{name} on {gpus} GPUs, pp {pp}, {microbatches} microbatches"
        print(f"\n{layout}\n\n| schedule | idle: equal stages | the model | under a plan | by makespan | blocks held |")
        print("|---|---|---|---|---|---|")
        for schedule, *idle, held in rows(config, pp, microbatches, last):
            print(f"| {schedule} | {' | '.join(f'{share:.2%}' for share in idle)} | {held} |")
            found[f"{layout}, {schedule}"] = {"idle": idle, "held": held}
    if args.json:
        about = {"counted": "no measurement", "idle": "equal stages, the model, under a plan, by makespan"}
        Path(args.json).write_text(json.dumps({"about": about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
