"""Runs whose solver on rank 0 is late or goes wrong; importable, so that forked ranks find it."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.config import Config
from megatron_snip.snip import coordinator
from megatron_snip.snip.coordinator import Coordinator
from megatron_snip.snip.measure.linear_probe import LinearProbe
from megatron_snip.snip.measure.probe import Probe
from megatron_snip.snip.plan.solver import BackgroundSolver, SolveRequest
from megatron_snip.train import loop
from tests.dist.helpers.faults import SMALL

#: Iteration -> precision of each linear of a rank once `before_step` is done.
Held = dict[int, dict[str, str]]


def python(code: str) -> list[str]:
    """Code in the solver's place."""
    return [sys.executable, "-c", code]


def train(options: dict[str, Any]) -> None:
    """The program, every process writing its metrics."""
    options = {**SMALL, "global_batch_size": 2, "precision": "snip", "snip_trials": 0, "log_all_ranks": True, **options}
    loop.train(Config().replace(**options, preflight=False))  # whose probe would be the first


def record_precisions(step: Callable[..., Any] = Coordinator.before_step) -> Held:
    """What this rank's linears run in, filled in as it trains.  Call it last: it wraps `before_step`."""
    seen: Held = {}

    def before_step(self: Coordinator, iteration: int, *args: Any) -> Any:
        metrics = step(self, iteration, *args)
        seen[iteration] = {name: str(linear.precision) for name, linear in self.linears.items()}
        return metrics

    Coordinator.before_step = before_step  # type: ignore[method-assign]
    return seen


class LateSolver(BackgroundSolver):
    """The real solver, which begins only when a file is there.  `result` lets it go: it is waited for then."""

    def __init__(self, request: SolveRequest, gate: Path) -> None:
        self.gate = gate
        super().__init__(request, command=python(
            f"import os, sys, time\nparent = os.getppid()\nwhile not os.path.exists({str(gate)!r}):\n"
            "    time.sleep(0.01 if os.getppid() == parent else sys.exit(3))\n"
            "from megatron_snip.snip.plan import solver\nsolver.main()"
        ))  # fmt: skip

    def result(self, timeout: float | None = None) -> Any:
        """Let go, and wait."""
        self.gate.touch()
        return super().result(timeout)


def late_solves(options: dict[str, Any], folder: Path, answered: int) -> tuple[list[int], Held]:
    """The first solve's answer is in before iteration `answered`, later ones are begun when they are due.

    Returns the iterations before which rank 0's solver was at work without an answer, and the precisions.
    """
    number, at_work, step = iter(range(99)), [], Coordinator.before_step
    coordinator.BackgroundSolver = lambda request: LateSolver(request, folder / f"gate_{next(number)}")  # type: ignore

    def before_step(self: Coordinator, iteration: int, *args: Any) -> Any:
        solver = self._solver
        if solver is not None:
            if iteration == answered:
                solver.gate.touch()  # type: ignore[attr-defined]
                end = time.monotonic() + 60
                while not solver.done():
                    assert time.monotonic() < end
                    time.sleep(0.01)
            if not solver.done():
                at_work.append(iteration)
        return step(self, iteration, *args)

    seen = record_precisions(before_step)
    train(options)
    return at_work, seen


def _killed(request: SolveRequest) -> BackgroundSolver:
    solver = BackgroundSolver(request, command=python("import time; time.sleep(60)"))
    os.kill(solver.pid, signal.SIGKILL)
    return solver


class _Impatient(BackgroundSolver):
    def result(self, timeout: float | None = None) -> Any:
        return super().result(0.3)


def _no_disk(request: SolveRequest) -> BackgroundSolver:
    raise OSError(28, "No space left on device")


#: What becomes of one solve after another on rank 0, and a part of the reason that every rank must tell.
SOLVES: dict[str, tuple[Callable[[SolveRequest], BackgroundSolver], str]] = {
    "good": (BackgroundSolver, ""),
    "killed": (_killed, "killed by signal 9"),
    "hanging": (lambda r: _Impatient(r, command=python("import time; time.sleep(60)")), "no answer within 0.3 seconds"),
    "raising": (lambda r: BackgroundSolver(r, command=python("raise SystemExit('no licence')")), "no licence"),
    "nonsense": (lambda r: BackgroundSolver(r, command=python("print('gibberish')")), "gibberish"),
    "infeasible": (lambda r: BackgroundSolver(dataclasses.replace(r, target=1.5)), "1.5"),
    "not started": (_no_disk, "the solver's process did not start"),
    "nan": (BackgroundSolver, ""),
    "good again": (BackgroundSolver, ""),
}


def solves_gone_wrong(options: dict[str, Any]) -> tuple[str, list[str], Held]:
    """One probe after another, each with the next of SOLVES; at "nan" rank 1 alone adds a NaN to a linear's statistics.

    That linear is the last one that the plan in force has in FP4.  Returns its name, what this rank's log told, and the
    precisions.
    """
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    coordinator.LOGGER.addHandler(handler)
    step, reduce, poisoned, probes = Coordinator.before_step, Probe._reduce, [], []
    cases = list(SOLVES.values())  # one that is killed is killed again when it is solved again
    coordinator.BackgroundSolver = lambda request: cases[len(probes) - 1][0](request)  # type: ignore

    def before_step(self: Coordinator, *args: Any) -> Any:
        if self.plan is not None and not poisoned:
            poisoned.append([name for name, p in self.plan.linears.items() if str(p) == "fp4"][-1])
        return step(self, *args)

    def reduced(self: Probe, found: dict[str, LinearProbe], *args: Any, **more: Any) -> Any:
        probes.append(None)
        if list(SOLVES)[len(probes) - 1] == "nan" and dist.get_rank() == 1:
            sums = found[poisoned[0]].sums
            assert math.isfinite(sums.read(["token/fp4"]))
            sums.add("token/fp4", torch.tensor(math.nan))
        return reduce(self, found, *args, **more)

    Probe._reduce = reduced  # type: ignore[method-assign]
    seen = record_precisions(before_step)
    train(options)
    return poisoned[0], told, seen
