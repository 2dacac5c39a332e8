"""Whole runs in which something breaks: a device, the data or a plan; importable, so that forked ranks find it."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip import runtime
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.config import Config
from megatron_snip.data.sampling import MockDataset
from megatron_snip.model import attention, llama
from megatron_snip.parallel.data import local_of
from megatron_snip.parallel.tensor import ColumnParallelLinear
from megatron_snip.quant import StepContext
from megatron_snip.snip import coordinator
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.train import loop
from megatron_snip.train.setup import Parts
from tests.dist.helpers.faults import SMALL


@dataclass
class Trouble:
    """What breaks in a run.

    forward: what the last norm gives, times `factor`, and times 2 with each time.  backward: NaN in the gradient of the
    first linear's output.  plan: the output of linears in FP4 times `factor` under
    plans of `iterations`.  data: noise in place of the tokens that
    a run without a rewind reads in `iterations`.
    """

    kind: str
    iterations: range = range(0)
    rank: int = 0  # of forward and backward
    times: int = 1_000_000  # how often: a microbatch each
    factor: float = 1e3

    def __post_init__(self) -> None:
        self.done = 0

    def now(self, iteration: int) -> bool:
        """Whether it breaks here, which is then counted."""
        if iteration not in self.iterations or self.done >= self.times:
            return False
        self.done += 1
        return True

    def put_into(self, parts: Parts) -> None:
        """Before the run starts."""
        first, last = parts.stages[min(parts.stages)], parts.stages[max(parts.stages)]
        if self.kind == "plan":
            self.coordinator = parts.coordinator
            for linear in parts.linears.values():
                self._change_output(linear, partial(self._planned, linear))
        elif self.kind == "backward" and dist.get_rank() == self.rank:
            self._change_output(next(iter(first.linears().values())), self._poisoned)
        elif self.kind == "forward" and dist.get_rank() == self.rank:
            last.register_forward_pre_hook(self._note_iteration, with_kwargs=True)
            last.norm.register_forward_hook(lambda module, given, y: self._scaled(y))

    def _note_iteration(self, stage: Any, given: Any, named: dict[str, Any]) -> None:
        self.iteration = named["context"].iteration

    def _change_output(self, linear: Any, change: Callable[[Tensor, StepContext], Tensor]) -> None:
        """Of a linear that shares its input with others, as it leaves the function that runs them together."""
        if isinstance(linear, ColumnParallelLinear):
            plain = llama.linears_of_one_input

            def changed(linears: Any, x: Tensor, context: Any) -> list[Tensor]:
                ys = plain(linears, x, context)
                return [change(y, context) if one is linear else y for one, y in zip(linears, ys, strict=True)]

            attention.linears_of_one_input = llama.linears_of_one_input = changed
            return
        plain_one = linear.forward
        linear.forward = lambda x, context, *up: change(plain_one(x, context, *up), context)

    def _planned(self, linear: Any, y: Tensor, context: StepContext) -> Tensor:
        plan, precision = self.coordinator.plan, str(context.precision or linear.precision)
        breaks = plan is not None and plan.iteration in self.iterations and precision == "fp4"
        return y * self.factor if breaks else y

    def _poisoned(self, y: Tensor, context: StepContext) -> Tensor:
        if y.requires_grad and self.now(context.iteration):
            y.register_hook(lambda grad: torch.full_like(grad, float("nan")))
        return y

    def _scaled(self, y: Tensor) -> Tensor:
        return y * self.factor * 2.0**self.done if y.requires_grad and self.now(self.iteration) else y


class SolverHere:
    """In place of the solver's process, whose start takes longer than these runs."""

    def __init__(self, request: SolveRequest) -> None:
        self.request = request

    def done(self) -> bool:
        return True

    def result(self, timeout: float) -> Solution:
        return self.request.solve()

    def cancel(self) -> None:
        pass


def break_data(samples: range) -> None:
    """Tokens that are noise in some samples."""
    plain = MockDataset.__getitem__

    def broken(self: MockDataset, index: int) -> Any:
        sample = plain(self, index)
        return np.random.RandomState(index).randint(0, self.vocab_size, len(sample)) if index in samples else sample

    MockDataset.__getitem__ = broken  # type: ignore[method-assign]


def let_targets_grow(parts: Parts, until: int) -> None:
    """Plans probed before iteration `until` put a quarter in FP4, later ones what the options say."""
    planner = parts.coordinator
    if planner is None:
        return
    begin, snip = planner._begin, planner.snip

    def begin_with_target(iteration: int, *args: Any) -> Any:
        planner.snip = dataclasses.replace(snip, snip_target=0.25) if iteration < until else snip
        return begin(iteration, *args)

    planner._begin = begin_with_target  # type: ignore[method-assign]


def troubled_run(options: dict[str, Any], *troubles: Trouble) -> dict[str, Any]:
    """The program with troubles: the error that ended it, what was logged, and the tensors that it leaves."""
    config = Config().replace(**{**SMALL, "exit_signal_handler": False, "preflight": False, **options})
    kept: list[Parts] = []
    build = loop.build

    def broken_build(*args: Any, **how: Any) -> Parts:
        parts = build(*args, **how)
        let_targets_grow(parts, 4)
        for trouble in troubles:
            trouble.put_into(parts)
        kept.append(parts)
        return parts

    size = config.training.global_batch_size
    plain = MockDataset.__getitem__
    for trouble in troubles:
        if trouble.kind == "data":
            break_data(range((trouble.iterations.start - 1) * size, (trouble.iterations.stop - 1) * size))
    loop.build, coordinator.BackgroundSolver = broken_build, SolverHere  # type: ignore[assignment,misc]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loop.LOGGER.addHandler(handler)
    level = loop.LOGGER.level
    loop.LOGGER.setLevel(logging.INFO)
    stop, runtime.stop = runtime.stop, lambda: None
    report, loop.write_report = loop.write_report, lambda run_dir: run_dir
    error = ""
    try:
        loop.train(config)
    except (ValueError, runtime.SuspectDevice) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        loop.build, runtime.stop, loop.write_report = build, stop, report
        MockDataset.__getitem__ = plain  # type: ignore[method-assign]
        loop.LOGGER.removeHandler(handler)
        loop.LOGGER.setLevel(level)
    tensors = {name: local_of(tensor).clone() for name, tensor in kept[0].tensors().items()}
    precisions = {name: str(linear.precision) for name, linear in kept[0].linears.items()}
    return {"error": error, "log": messages, "tensors": tensors, "precisions": precisions}


def slow_disk_run(options: dict[str, Any], *troubles: Trouble) -> dict[str, Any]:
    """`troubled_run` whose saves in the background take many iterations."""
    publish = Saver._publish

    def late(*args: Any) -> None:
        time.sleep(1.0)
        publish(*args)

    Saver._publish = late  # type: ignore[method-assign]
    try:
        return troubled_run({**options, "async_save": True}, *troubles)
    finally:
        Saver._publish = publish  # type: ignore[method-assign]


def troubled_program(options: dict[str, Any], folder: str, *troubles: Trouble) -> None:
    """`troubled_run` as the program ends it, by an exit status and a line in <folder>/err<rank>."""
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/err{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    train = loop.train

    def ending(config: Config) -> None:
        with runtime.report_errors():
            train(config)

    loop.train = ending
    troubled_run(options, *troubles)
