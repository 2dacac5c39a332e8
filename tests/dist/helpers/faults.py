"""Runs in which one rank goes wrong; importable, so that forked ranks find it."""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.cli.__main__ import main
from megatron_snip.config import Config
from megatron_snip.parallel.data import local_of
from megatron_snip.quant import Casts, LinearCall, LinearPrecision, Operands, StepContext
from megatron_snip.snip import coordinator
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train import loop
from megatron_snip.train.setup import Parts
from tests.dist.helpers.runs import TINY, make

PROGRAM = Path(__file__).resolve().parents[3] / "pretrain_llama.py"
SMALL = {**TINY, "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2}


class Poison:
    """An observer that puts one NaN into its linear's output gradient."""

    def __call__(self, operands: Operands) -> None:
        operands.grad_output[0, 0] = float("nan")


def poison(parts: Parts, rank: int, iterations: set[int]) -> None:
    """On one rank, into the first linear that backward reaches last, so that no other weight of it is touched."""
    if dist.get_rank() == rank:
        linear = next(iter(parts.stages[min(parts.stages)].linears().values()))
        plain = linear.linear_call

        def poisoned(context: StepContext) -> LinearCall:
            call = plain(context)
            return call._replace(observer=Poison()) if context.iteration in iterations else call

        linear.linear_call = poisoned  # type: ignore[method-assign]


def poisoned_steps(options: dict[str, Any], rank: int, bad: set[int], iterations: int) -> dict[str, Any]:
    """Train with a NaN on one rank: what each step told, whether weights or moments moved in it, updates made."""
    config, parts = make({**SMALL, **options})
    poison(parts, rank, bad)
    told, moved = [], []
    for i in range(1, iterations + 1):
        before = {name: local_of(tensor).clone() for name, tensor in parts.tensors().items()}
        batch = parts.train_loader.batch((i - 1) * config.training.global_batch_size)
        told.append(dataclasses.astuple(parts.stepper.step(batch, i))[:-1])
        moved.append(any(not torch.equal(before[name], local_of(t)) for name, t in parts.tensors().items()))
        assert all(p.grad is None for p in parts.optimizer.parameters.values())
    parts.train_loader.close()
    return {"told": told, "moved": moved, "updates": parts.optimizer.steps}


def poisoned_run(options: dict[str, Any], rank: int, bad: set[int]) -> str:
    """The program with a NaN on one rank; the error that ended it on this rank."""
    build = loop.build

    def poisoned_build(*args: Any, **how: Any) -> Parts:
        parts = build(*args, **how)
        poison(parts, rank, bad)
        return parts

    loop.build = poisoned_build
    try:
        loop.train(Config().replace(**{**SMALL, **options}))
    except ValueError as error:
        return str(error)
    return ""


def run_on_files(options: dict[str, Any], cut: tuple[str, int] | None = None) -> str:
    """The program on data of its own; the error that ended it on this rank.  cut: a file to cut in an iteration."""
    seed = runtime.seed_iteration

    def seed_and_cut(number: int, iteration: int) -> None:
        if cut and iteration == cut[1] and dist.get_rank() == 0:
            os.truncate(cut[0], 100)
        seed(number, iteration)

    runtime.seed_iteration = seed_and_cut
    try:
        loop.train(Config().replace(**{**SMALL, "mock_data": False, **options}))
    except ValueError as error:
        return str(error)
    return ""


def differing_plans(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Two solves, the first of which reaches rank 1 changed: what each application told, and the precisions then."""
    snip = {"precision": "snip", "snip_granularity": "linear", "snip_start": 1, "snip_interval": 2}
    _, parts = make({**SMALL, **snip, **options})
    assert parts.coordinator is not None
    read = coordinator.Plan.from_dict

    class Changed(Plan):
        @classmethod
        def from_dict(cls, values: dict[str, Any], source: str = "plan") -> Plan:
            plan = read(values, source)
            if dist.get_rank() == 1 and plan.iteration == 2:
                name = next(iter(plan.linears))
                plan = dataclasses.replace(plan, linears={**plan.linears, name: LinearPrecision.parse("fp4/fp8/fp4")})
            return plan

    coordinator.Plan = Changed
    out = []
    for i in range(1, 5):
        batch = parts.train_loader.batch((i - 1) * 4)
        metrics = parts.coordinator.before_step(i, parts.stepper.pass_runner(batch, i), parts.optimizer.zero_grad)
        if i in (2, 4):
            precisions = {name: str(linear.precision) for name, linear in parts.linears.items()}
            out.append({"metrics": metrics, "precisions": precisions})
    parts.train_loader.close()
    parts.coordinator.close()
    return out


def store_host(port: int, pipe: Any) -> None:
    """Hold a store at a port, which the pipe tells, until the process is killed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(600)


def train(words: list[str]) -> None:
    """What pretrain_llama.py does with these words, in this process."""
    loop.train(parse(words))


def program(words: list[str], folder: str) -> None:
    """Become `python pretrain_llama.py words`, with its output in <folder>/out and <folder>/err."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    torch.set_num_threads(1)
    sys.argv = [str(PROGRAM), *words]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def command(words: list[str], log: str) -> None:
    """Become `megatron-snip words`, with its output at the end of a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    torch.set_num_threads(1)
    sys.exit(main(words))
