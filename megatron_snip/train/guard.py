"""The loss guard (--snip-guard): when the loss breaks, fall back step by step.

The loss breaks when --snip-guard-patience iterations in a row, under one plan, are suspicious: a spike (see watch.py)
or a skipped update.  Then, each step only if the one before did not help and only where there is something to it:

    plan         the last plan that was in force without trouble, from the next iteration on
    base         FP8, or the base option, for all linears, from the next iteration on
    checkpoint   back to the last checkpoint of before the loss broke: weights, moments, counters, plan; the samples
                 read since then are skipped, and the base option holds

A solve under way is dropped with each step, so a plan that caused trouble comes back only if a new probe chooses it.
Planning goes on at the next probe, and a plan of its own is judged from the first step on again.  Where no step is
left, log and metrics say so, what is in force stays, and the last losses are forgotten.

Everything follows from reduced values and from the checkpoint, so all processes decide alike; only which checkpoints
are there rank 0 tells the others, when one is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megatron_snip.checkpoint.manifest import Damaged, check, naming
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.mesh import Mesh
from megatron_snip.snip.coordinator import Coordinator
from megatron_snip.snip.fallback import base_plan, plan_before
from megatron_snip.snip.plan import Plan
from megatron_snip.train.setup import Parts
from megatron_snip.train.state_file import read_state
from megatron_snip.train.watch import LossWatch

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step of the guard; told in metrics at the iteration from which it holds."""

    kind: str  # plan, base, checkpoint or none
    iteration: int  # after which it was taken
    why: str
    checkpoint: int | None = None  # the iteration gone back to

    @property
    def text(self) -> str:
        """What it does, for people."""
        to = {
            "plan": "falling back to the last plan without trouble",
            "base": "falling back to the base option for all linears",
            "checkpoint": f"going back to the checkpoint of iteration {self.checkpoint}, past the samples read since",
            "none": "no step is left, so the current precision stays",
        }
        return f"{self.why}: {to[self.kind]}"


class Guard:
    """Judges each iteration and takes the steps; every process makes one and calls it alike."""

    def __init__(
        self,
        patience: int,
        watch: LossWatch,
        coordinator: Coordinator | None,
        mesh: Mesh,
        folders: dict[Path, int | None],
        wait_saved: Callable[[], None],
    ) -> None:
        self.wait_saved = wait_saved  # until a save in the background has ended
        self.patience, self.watch, self.coordinator, self.mesh = patience, watch, coordinator, mesh
        self.folders = folders  # of this run's checkpoints -> the one iteration that counts in it, None for all
        self.broke: int | None = None  # first of the suspicious iterations up to now
        self.in_a_row = 0  # suspicious ones since the last step or plan
        self.level = 0  # steps that the plan in force stands for: 0 a plan of a solve, 1 plan, 2 base
        self.plan = ""  # hash of the plan in force
        self.blamed: list[str] = []  # hashes of plans in force when the loss broke
        self.saved: list[int] = []  # checkpoints that lie on the way to here
        self.rewound_to = -1
        self.due: Step | None = None  # taken, to be applied and told before the next iteration
        self.steps: list[dict[str, Any]] = []  # all of the run, those before a rewind included

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        names = ("broke", "in_a_row", "level", "plan", "blamed", "saved", "rewound_to", "steps")
        return {**{name: getattr(self, name) for name in names}, "due": asdict(self.due) if self.due else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self.due = Step(**state["due"]) if state["due"] else None

    def add_checkpoint(self, iteration: int) -> None:
        """A checkpoint of this iteration is written or was loaded."""
        self.saved = [*(one for one in self.saved if one != iteration), iteration]

    def before_step(self, iteration: int) -> Metrics:
        """Apply the step that is due before the coordinator does anything, and tell of it."""
        step, self.due = self.due, None
        if step is None:
            return {}
        metrics: Metrics = {"snip/guard": step.kind, "snip/guard_why": step.text, "snip/guard_steps": len(self.steps)}
        plan = self._plan("base" if step.kind == "checkpoint" else step.kind, iteration)
        if plan is not None and self.coordinator is not None:
            metrics |= self.coordinator.fall_back(plan, step.text)
        self.plan = self._hash()
        return metrics

    def after_step(self, iteration: int, loss: float, grad_norm: float, suspicious: bool) -> Step | None:
        """Judge an iteration that has been counted; the step to take if the loss has broken.

        A step "checkpoint" is the caller's to take, by `go_back`; the others are applied by `before_step`.
        """
        if self.plan != (plan := self._hash()):
            self.plan, self.level, self.in_a_row = plan, 0, 0
        if not suspicious:
            self.broke, self.in_a_row = None, 0
            return None
        self.broke = iteration if self.broke is None else self.broke
        self.in_a_row += 1
        if self.in_a_row < self.patience:
            return None
        why = f"broken since iteration {self.broke}, loss {loss:.6g}, gradient norm {grad_norm:.6g}"
        self.due = step = self._next(iteration, why)
        self.steps.append(asdict(step))
        return step

    def _next(self, iteration: int, why: str) -> Step:
        """The next step that there is something to."""
        self.in_a_row = 0
        if self.plan:
            self.blamed.append(self.plan)
        for level, kind in ((1, "plan"), (2, "base")):
            if self.level < level and self._plan(kind, iteration + 1) is not None:
                self.level = level
                return Step(kind, iteration, why)
        if (good := self._good_checkpoint()) is not None:
            return Step("checkpoint", iteration, why, good)
        self.broke = None
        self.watch.begin_anew()
        return Step("none", iteration, why)

    def _hash(self) -> str:
        return self.coordinator.plan.hash if self.coordinator is not None and self.coordinator.plan else ""

    def _plan(self, kind: str, iteration: int) -> Plan | None:
        """The plan to fall back to; None if there is none, it is in force already, or none is in force."""
        one = self.coordinator
        if one is None or one.plan is None or kind == "none":
            return None
        if kind == "base":
            plan: Plan | None = base_plan(one.choices, one.shapes, iteration)
        else:
            plan = plan_before(one.history, one.shapes, self.blamed, iteration)
        return plan if plan is not None and plan.linears != one.plan.linears else None

    def _good_checkpoint(self) -> int | None:
        """The last checkpoint of before the loss broke, unless it was gone back to already; every process calls it."""
        assert self.broke is not None
        self.wait_saved()  # else how long it takes would decide
        before = [one for one in self.saved if self.rewound_to < one < self.broke]
        there = [max((one for one in before if self.folder(one) is not None), default=None)]
        dist.broadcast_object_list(there, src=0, group=self.mesh.world)
        return there[0]

    def folder(self, iteration: int) -> Path | None:
        """The folder of checkpoints that has this one."""
        for folder, only in self.folders.items():
            with contextlib.suppress(Damaged):
                if only in (None, iteration):
                    check(folder, iteration)
                    return folder
        return None

    def went_back(self, iteration: int) -> None:
        """The run is back at a checkpoint, with the step that took it there still to be told."""
        self.saved = [one for one in self.saved if one <= iteration]
        self.rewound_to, self.broke, self.in_a_row, self.level = iteration, None, 0, 2


def go_back(parts: Parts, folder: Path, iteration: int) -> dict[str, Any]:
    """Load weights and moments of a checkpoint into a run under way; returns its state, without a solve under way.

    UserError if it cannot be read.  Every process calls it.
    """
    state = read_state(folder, iteration)
    with naming(folder, iteration):
        load_tensors(folder, iteration, parts.tensors())
    for stage in parts.stages.values():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a pipeline's forward without a backward, a validation, leaves old weights gathered
    empty: Metrics = {"plan": None, "history": [], "predictions": None, "unwritten": {}}
    return {**state, "snip": {**(state["snip"] or empty), "pending": None}}
