"""The loss guard (--snip-guard): when the loss breaks, fall back step by step.

The loss breaks when --snip-guard-patience consecutive iterations under one plan are suspicious: a spike
(loss_spikes.py) or a skipped update.  The guard then takes the next of these steps that changes anything:

    plan         the last plan that ran without trouble, from the next iteration on
    base         FP8, or the base option, for all linears, from the next iteration on
    checkpoint   back to the last checkpoint before the loss broke: weights, moments, counters, plan; the samples read
                 since then are skipped, and the base option takes effect

Each step drops a solve in progress, so a plan that caused trouble returns only if a new probe chooses it.  The next
probe resumes planning, and its plan is judged from the first step on.  When no step is left, log and metrics say so,
the current precision stays, and the loss history is cleared.

Decisions use only reduced values and checkpointed state, so all ranks agree.  The list of checkpoints is the exception:
rank 0 broadcasts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from megatron_snip.checkpoint.manifest import Damaged, check
from megatron_snip.files.json import Samples, Text
from megatron_snip.mesh import Mesh
from megatron_snip.snip.coordinator import Coordinator
from megatron_snip.snip.fallback import base_plan, plan_before
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.health.loss_spikes import LossWatch

Metrics = dict[str, Any]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the guard, reported in metrics at the iteration where it takes effect."""

    kind: Literal["plan", "base", "checkpoint", "none"]
    iteration: Samples  # after which it was taken
    why: Text
    checkpoint: Samples | None = None  # the iteration of the checkpoint

    @property
    def text(self) -> str:
        """Description of the step for users."""
        to = {
            "plan": "falling back to the last plan without trouble",
            "base": "falling back to the base option for all linears",
            "checkpoint": f"going back to the checkpoint of iteration {self.checkpoint}, past the samples read since",
            "none": "no step is left, so the current precision stays",
        }
        return f"{self.why}: {to[self.kind]}"


class Guard:
    """Judges each iteration and takes the steps.  Every rank makes one and calls it in the same way."""

    def __init__(
        self,
        patience: int,
        watch: LossWatch,
        coordinator: Coordinator | None,
        mesh: Mesh,
        folders: dict[Path, int | None],
        wait_saved: Callable[[], None],
    ) -> None:
        self.wait_saved = wait_saved  # waits for a background save
        self.patience, self.watch, self.coordinator, self.mesh = patience, watch, coordinator, mesh
        self.folders = folders  # of this run's checkpoints -> the only iteration that counts in it, or None for all
        self.broke: int | None = None  # first of the current suspicious iterations
        self.in_a_row = 0  # suspicious iterations since the last step or plan
        self.level = 0  # of the current plan: 0 from a solve, 1 from step plan, 2 from step base
        self.plan = ""  # hash of the current plan
        self.blamed: list[str] = []  # hashes of plans in force when the loss broke
        self.saved: list[int] = []  # checkpoints on the path to the current iteration
        self.rewound_to = -1
        self.due: Step | None = None  # to be applied and reported before the next iteration
        self.steps: list[dict[str, Any]] = []  # all steps of the run, including those before a rewind

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        names = ("broke", "in_a_row", "level", "plan", "blamed", "saved", "rewound_to", "steps")
        return {**{name: getattr(self, name) for name in names}, "due": msgspec.to_builtins(self.due)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self.due = Step(**state["due"]) if state["due"] else None

    def add_checkpoint(self, iteration: int) -> None:
        """Record that a checkpoint of this iteration was written or loaded."""
        self.saved = [*(one for one in self.saved if one != iteration), iteration]

    def before_step(self, iteration: int) -> Metrics:
        """Apply and report the step that is due, before the coordinator acts."""
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
        """Judge an iteration that has been counted; returns a step if the loss has broken.

        The caller takes a step "checkpoint", with `go_back`; `before_step` applies the others.
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
        self.steps.append(msgspec.to_builtins(step))
        return step

    def _next(self, iteration: int, why: str) -> Step:
        """The next step that changes something."""
        self.in_a_row = 0
        if self.plan:
            self.blamed.append(self.plan)
        kinds: tuple[Literal["plan", "base"], ...] = ("plan", "base")
        for level, kind in enumerate(kinds, 1):
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
        """The plan to fall back to; None if there is none, if it is in force already, or if no plan is in force."""
        one = self.coordinator
        if one is None or one.plan is None or kind == "none":
            return None
        if kind == "base":
            plan: Plan | None = base_plan(one.choices, one.shapes, iteration, one.final)
        else:
            plan = plan_before(one.history, one.shapes, self.blamed, iteration, one.final)
        return plan if plan is not None and plan.linears != one.plan.linears else None

    def _good_checkpoint(self) -> int | None:
        """The last checkpoint before the loss broke, unless already tried.  Every rank must call it."""
        assert self.broke is not None
        self.wait_saved()  # otherwise the result would depend on its speed
        before = [one for one in self.saved if self.rewound_to < one < self.broke]
        there = [max((one for one in before if self.folder(one) is not None), default=None)]
        dist.broadcast_object_list(there, src=0, group=self.mesh.world)
        return there[0]

    def folder(self, iteration: int) -> Path | None:
        """The folder with a good checkpoint of this iteration, or None."""
        for folder, only in self.folders.items():
            with contextlib.suppress(Damaged):
                if only in (None, iteration):
                    check(folder, iteration)
                    return folder
        return None

    def went_back(self, iteration: int) -> None:
        """Update the guard after a return to a checkpoint; the step remains to be reported."""
        self.saved = [one for one in self.saved if one <= iteration]
        self.rewound_to, self.broke, self.in_a_row, self.level = iteration, None, 0, 2
