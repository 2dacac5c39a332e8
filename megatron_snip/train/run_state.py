"""A run's parts, its position in the data and its outputs: what checkpoints keep, and how a run restores it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.fsdp import FSDPModule

from megatron_snip import runtime
from megatron_snip.checkpoint.manifest import Damaged, naming
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.config import Config
from megatron_snip.model.initial import draw_weights
from megatron_snip.train.health.guard import Guard
from megatron_snip.train.health.loss_spikes import LossWatch
from megatron_snip.train.health.rerun import Rerun
from megatron_snip.train.instruments import Instruments
from megatron_snip.train.memory_plan import plan_file
from megatron_snip.train.run.data_identity import settle_data
from megatron_snip.train.run.metrics import MetricsWriter, RunningMean, cut_back_ranks
from megatron_snip.train.run.run_folder import (
    Start,
    changed_options,
    earlier_start,
    open_run_folder,
    read_tensors,
    refuse_live_run_folder,
)
from megatron_snip.train.run.state_file import read_state
from megatron_snip.train.setup import Parts, agree_on

LOGGER = logging.getLogger("megatron_snip")


class RunState:
    """A run between iterations."""

    def __init__(self, config: Config, parts: Parts, start: Start) -> None:
        self.config, self.parts, self.start = config, parts, start
        self.iteration = start.iteration
        self.changed: list[str] = []  # options that differ from the checkpoint's
        self.nan_iterations = 0  # skipped iterations of the whole run
        self.nan_in_a_row = 0
        self.data_problem = ""  # a file that went bad, the same on every rank
        self.divergence = RunningMean()  # measured, for the current plan
        self.watch = LossWatch(config.training)
        self.rerun = Rerun(parts.stepper, self.watch, config.training.seed)
        if config.training.rerun_mode == "validate_results":
            parts.stepper.validate = self.rerun.validated
        self.consumed = 0  # samples read or skipped so far: start of the next batch
        self.consumed_valid = 0  # the same for validation data
        self.data_skipped = 0  # samples skipped by going back to checkpoints
        self.guard = self._make_guard() if config.snip.snip_guard else None
        self.instruments = Instruments(config, parts.mesh.rank, parts.stepper.pipeline.device)
        self.signal = runtime.StopSignal(config.training.exit_signal_handler)
        self.began = time.perf_counter()
        self.unlogged: list[float] = []  # seconds of the iterations since the last progress line
        self._planned = {name: linear.precision for name, linear in parts.linears.items()}
        self._load()
        loaders, state = (parts.train_loader, parts.valid_loader), self.start.state
        parts.data = settle_data(config, state, *loaders, parts.mesh, reads=parts.first_on_node)
        start = self.start
        self.writer = None
        if parts.mesh.rank == 0:
            refuse_live_run_folder(config)
        self.saver = Saver(config.save_dir, config.checkpoint, parts.mesh, start.run_id, start.iteration)
        parts.stepper.before_update = self.saver.wait_copied
        if parts.mesh.rank == 0:
            open_run_folder(config, start)
            if parts.memory_plan is not None:
                parts.memory_plan.save(Path(config.logging.run_dir) / plan_file.FILE)
            if parts.coordinator is not None:
                parts.coordinator.write_plan_in_force()
            unwritten = start.state["unwritten_rows"] if start.state else ()
            self.writer = MetricsWriter(config, start.run_id, start.iteration, unwritten=unwritten)
        parts.mesh.barrier()
        run_dir, rank = Path(config.logging.run_dir), parts.mesh.rank
        cut_back_ranks(run_dir, start.iteration, rank, parts.mesh.world_size)
        if rank > 0 and config.logging.log_all_ranks:
            self.writer = MetricsWriter(config, start.run_id, start.iteration, rank)

    def _make_guard(self) -> Guard:
        parts, patience = self.parts, self.config.snip.snip_guard_patience
        folders: dict[Path, int | None] = {self.config.save_dir: None}
        return Guard(patience, self.watch, parts.coordinator, parts.mesh, folders, lambda: self.saver.wait())

    def _save(self, *, last: bool) -> None:
        coordinator = self.parts.coordinator
        if self.guard is not None:
            self.guard.add_checkpoint(self.iteration)
        state = {
            "run_id": self.start.run_id,
            "iteration": self.iteration,
            "consumed_samples": self.consumed,
            "consumed_valid_samples": self.consumed_valid,
            "data_skipped": self.data_skipped,
            "optimizer_steps": self.parts.optimizer.steps,
            "scheduled_samples": self.parts.optimizer.samples,
            "nan_iterations": self.nan_iterations,
            "divergence": msgspec.to_builtins(self.divergence),
            "watch": self.watch.state(),
            "rerun": self.rerun.state(),
            "guard": self.guard.state() if self.guard else None,
            "config": self.config.to_dict(),
            "snip": coordinator.state() if coordinator else None,
            "plan_hash": self.parts.plan_hash,
            "memory_plan": self.parts.memory_plan.to_dict() if self.parts.memory_plan else None,
            "data": self.parts.data,
            "unwritten_rows": self.writer.unwritten if self.writer else [],
            "weights_alone": False,
        }
        self.saver.save(self.iteration, self.parts.tensors(), state, finite=self.nan_in_a_row == 0, last=last)

    def _load(self) -> None:
        """Read the checkpoint that the run starts from, or the newest earlier one that is not damaged."""
        while self.start.load is not None:
            start, tensors = self.start, self.parts.tensors()
            assert start.load is not None
            if start.state is None or self.config.checkpoint.no_load_optim:
                tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
            try:
                read_tensors(start, tensors)
            except Damaged as error:  # the same on every rank
                self.start = agree_on(self.config, earlier_start(self.config, start, error))
                continue
            return self._resume(start)
        draw_weights(self.parts.stages.values(), self.parts.optimizer.low_parts())
        LOGGER.info("starting from new weights at iteration 0")

    def _resume(self, start: Start) -> None:
        """Restore a checkpoint's state other than tensors; nothing for --finetune."""
        self.iteration = start.iteration
        state = start.state
        if state is None:
            return
        self.changed = changed_options(self.config, state)
        old, new = state["plan_hash"], self.parts.plan_hash
        if old and new and old != new:  # also if the file kept its name
            self.changed.append(f"precision_plan: plan {old} -> plan {new}")
        before, here = state.get("memory_plan"), self.parts.memory_plan
        hashes = before["hash"] if before else "none", here.hash if here is not None else "none"
        if hashes[0] != hashes[1]:
            LOGGER.info(f"memory plan: {hashes[0]} -> {hashes[1]}; losses do not depend on it")
        for change in self.changed:
            LOGGER.warning(f"this run continues with a changed option, {change}")
        anew = {"optimizer_steps": 0, "scheduled_samples": 0} if self.config.checkpoint.no_load_optim else {}
        self._take_state({**state, **anew})
        self.consumed, self.data_skipped = state["consumed_samples"], state["data_skipped"]
        if self.guard is not None:
            if state["guard"]:
                self.guard.load_state(state["guard"])
            assert start.load is not None
            self.guard.folders.setdefault(start.load, start.load_iteration)
            if not self.config.checkpoint.no_load_optim:
                self.guard.add_checkpoint(start.load_iteration)

    def _take_state(self, state: dict[str, Any]) -> None:
        """Restore counters, optimiser and plans from a checkpoint's state."""
        parts = self.parts
        parts.optimizer.set_steps(state["optimizer_steps"], state["scheduled_samples"])
        self.consumed_valid = state["consumed_valid_samples"]
        self.nan_iterations, self.nan_in_a_row = state["nan_iterations"], 0  # good checkpoints follow updates
        self.divergence = RunningMean(**state["divergence"])
        self.watch.load_state(state["watch"])
        self.rerun.load_state(state["rerun"])
        if parts.coordinator is not None and state["snip"]:
            parts.coordinator.load_state(state["snip"])
        for name, linear in parts.linears.items() if parts.coordinator is None else ():
            linear.precision = self._planned[name]  # the guard may go back to before the late switch


def go_back(parts: Parts, folder: Path, iteration: int) -> dict[str, Any]:
    """Load weights and moments of a checkpoint into a running run; returns its state without a pending solve.

    Raises UserError if it cannot be read.  Every rank must call it.
    """
    state = read_state(folder, iteration)
    with naming(folder, iteration):
        load_tensors(folder, iteration, parts.tensors())
    for stage in parts.stages.values():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # forward without backward, in a pipeline's validation, leaves old weights gathered
    empty: dict[str, Any] = {"plan": None, "history": [], "predictions": None, "unwritten": {}}
    return {**state, "snip": {**(state["snip"] or empty), "pending": None}}
