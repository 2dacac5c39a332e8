"""The training loop, on one screen, and everything around it: start, validate, log, end."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetError
from megatron_snip.data.loader import Batch
from megatron_snip.errors import UserError
from megatron_snip.faults.ending import Ending
from megatron_snip.model.flops import iteration_flops
from megatron_snip.snip.measure.probe import ProbeFailed
from megatron_snip.snip.trial import TrialRunner, samples_of
from megatron_snip.train.check_casts import check_casts_of
from megatron_snip.train.health.memory import warn_about_memory
from megatron_snip.train.instruments import peak_tflops
from megatron_snip.train.memory_plan.auto import plan_of_run
from megatron_snip.train.preflight import preflight
from megatron_snip.train.report.run_summary import format_summary
from megatron_snip.train.report.sections import write_report
from megatron_snip.train.run.data_identity import agreed
from megatron_snip.train.run.metrics import progress_line, validation_line
from megatron_snip.train.run.run_folder import advice, drop_later_plans, find_start
from megatron_snip.train.run_state import RunState, go_back
from megatron_snip.train.setup import agree_on, build, check
from megatron_snip.train.step import StepResult
from megatron_snip.train.validate import check_restarts

LOGGER = logging.getLogger("megatron_snip")
#: Options of SNIP that do not affect what a plan contains.  All others do: if one changes, the plan in force after a
#: resume still comes from its old value.
_NOT_OF_A_PLAN = (
    "snip_interval", "snip_start", "snip_apply_lag", "snip_warmup_precision", "snip_solve_timeout", "snip_guard",
    "snip_bf16_eval_interval",
)  # fmt: skip


class Trainer(RunState):
    """One run."""

    def run(self) -> None:
        """Train to the last iteration, or until asked to stop."""
        t, parts = self.config.training, self.parts
        self._warn_about_unreachable()
        if (device := parts.stepper.pipeline.device).type == "cuda":
            check_casts_of(parts, self.config.precision.linear_impl, device)
        if self.iteration == 0 and t.preflight:
            preflight(self.config, parts)
        self._validate_new_weights()
        self._end_if_data_failed()
        while self.iteration < t.train_iters:
            begin = time.perf_counter()
            iteration = self.iteration + 1
            self.instruments.before_step(iteration)
            runtime.seed_iteration(t.seed, iteration)
            batch = parts.train_loader.batch(self.consumed)
            row: dict[str, Any] = {"iteration": iteration}
            row |= self._fixed_precision(iteration)
            if self.guard is not None:
                row |= self.guard.before_step(iteration)
            size = parts.train_loader.size(self.consumed)
            if parts.coordinator is not None:
                parts.coordinator.probe.tokens = size * self.config.model.seq_length
                run_pass = parts.stepper.pass_runner(batch, iteration, self._later_batch)
                run_trial = self._trial_runner if self.config.snip.snip_trials else None
                row |= parts.coordinator.before_step(iteration, run_pass, parts.optimizer.zero_grad, run_trial)
            every = self.config.snip.snip_bf16_eval_interval
            bf16_loss = parts.stepper.bf16_loss(batch, iteration) if every and iteration % every == 0 else None
            result = parts.stepper.step(batch, iteration, stop=self._asked_to_stop())
            self.iteration, self.consumed = iteration, self.consumed + size
            row |= self._measured_divergence(bf16_loss, result, row.get("snip/plan_hash", ""))
            suspicious = self.watch.add(result.loss, result.grad_norm)
            row |= self.rerun.row() | self.instruments.after_step(iteration)
            self.nan_iterations += result.skipped
            self.nan_in_a_row = self.nan_in_a_row + 1 if result.skipped else 0
            row |= self._row(result, size, time.perf_counter() - begin)
            if self._due(self.config.logging.eval_interval) or iteration == t.train_iters:
                row |= self._validate()
            self._log(row, result)
            if self._rewound(result, suspicious):
                continue
            self._end_if_never_finite()
            self._share_data_problem(result.stop)
            leave = result.stop or self._due(t.exit_interval) or bool(self.data_problem)
            if self._due(self.config.checkpoint.save_interval) or leave or iteration == t.train_iters:
                self._save(last=leave or iteration == t.train_iters)
            self._end_if_data_failed()
            if leave:
                LOGGER.info(f"ending after iteration {iteration}, as requested")
                break
        if (reason := self._failed_writes()) is not None:
            raise UserError(reason)

    def _warn_about_unreachable(self) -> None:
        """Warn about everything in the options that this run's iterations or data will never reach."""
        t, log, snip, planner = self.config.training, self.config.logging, self.config.snip, self.parts.coordinator
        first, last = self.iteration + 1, t.train_iters
        if first > last:
            LOGGER.warning(
                f"nothing is left to train: iteration {self.iteration} is done, and --train-iters is {last}; raise it"
            )
            return
        later = max(0, -(-(first - snip.snip_start) // snip.snip_interval))
        probe, lag = snip.snip_start + later * snip.snip_interval, snip.snip_apply_lag
        if planner is not None and not (planner.plan or planner.pending):
            warmup, due = snip.snip_warmup_precision, f"a probe is due at iteration {probe}, its plan {lag} later"
            if probe + lag > last:
                way_out = "raise --train-iters" if first + lag > last else f"give --snip-start {first}"
                LOGGER.warning(
                    f"no plan will take effect: {due}, and the last iteration is {last}; all linears stay in {warmup}, "
                    f"unless you {way_out if first > snip.snip_start else 'lower --snip-start'}"
                )
            elif probe > first > snip.snip_start:  # --precision snip is new, and the run is past --snip-start
                LOGGER.warning(
                    f"no plan is in force: {due}; all linears are in {warmup} until then, unless you give "
                    f"--snip-start {first}"
                )
        of_snip = [line for line in self.changed if line.startswith(("snip_", "gemm_times"))]
        changed = [line for line in of_snip if not line.startswith(_NOT_OF_A_PLAN)]
        if planner is not None and (planner.plan or planner.pending) and changed and probe > first:
            LOGGER.warning(
                f"a plan from before the change ({'; '.join(changed)}) holds until iteration {probe + lag}; "
                f"give --snip-start {first} to plan at once"
            )
        if log.eval_interval and log.eval_iters and self.parts.valid_loader is None:
            LOGGER.warning(
                f"--eval-interval is {log.eval_interval}, but there is no validation data; "
                "give --valid-data-path, or --split a second number above 0"
            )
        if log.profile and not first <= log.profile_step_start <= last:
            LOGGER.warning(
                f"no profile will be written: --profile-step-start is {log.profile_step_start}, "
                f"but this run makes iterations {first} to {last}"
            )

    def close(self, *, report: bool) -> None:
        """Close files, threads and the solver; write the report if asked."""
        if self.parts.coordinator is not None:
            self.parts.coordinator.close()
        self.parts.train_loader.close()
        self.instruments.close(self.iteration)
        self.saver.close()
        if self.writer is not None:
            self.writer.close()
        if self.parts.mesh.rank == 0 and report:
            run_dir = Path(self.config.logging.run_dir)
            try:
                path = write_report(run_dir)
                print(f"\n{format_summary(run_dir)}\nreport: {path}", flush=True)
            except Exception as error:  # a full disk, for example; the run itself is fine
                LOGGER.warning(f"no report was written to {run_dir}: {error}")

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.iteration % interval == 0

    def _asked_to_stop(self) -> bool:
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.perf_counter() - self.began > 60.0 * minutes
        return self.signal.received or late or self._failed_writes() is not None or bool(self._check_batch(1))

    def _failed_writes(self) -> str | None:
        """Why this rank must end the run: too many failed writes.  None while it may continue."""
        return next((part.reason for part in (self.writer, self.parts.coordinator) if part and part.reason), None)

    def _check_batch(self, ahead: int) -> str:
        """The problem that this rank has with a coming batch; "" for none."""
        loader, there_is = self.parts.train_loader, self.iteration + ahead < self.config.training.train_iters
        return loader.problem(loader.cursor(self.consumed, ahead)) if there_is else ""

    def _share_data_problem(self, stopped: bool) -> None:
        """If some rank asked to stop, find out whether a bad file is the reason."""
        if stopped and not self.data_problem:
            _, self.data_problem = self.parts.mesh.first_problem(self._check_batch(0))

    def _end_if_data_failed(self) -> None:
        if self.data_problem:
            saved = f" (iteration {self.iteration} is saved)" if self.iteration > self.start.iteration else ""
            raise UserError(self.data_problem + saved)

    def _end_if_never_finite(self) -> None:
        limit = self.config.training.max_skipped_iterations
        if self.nan_in_a_row >= limit:
            raise UserError(
                f"loss or gradient was not finite in {limit} iterations in a row, up to iteration {self.iteration}; "
                "lower --lr or raise precision, and continue from the last checkpoint"
            )

    def _row(self, result: StepResult, batch_size: int, seconds: float) -> dict[str, Any]:
        pace = {"throughput": self._tflops(batch_size, seconds)} if self.config.logging.log_throughput else {}
        return {
            "lm loss": result.loss if math.isfinite(result.loss) else None,
            "grad-norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "learning-rate": result.lr,
            "batch-size": batch_size,
            "consumed-samples": self.consumed,
            "skipped": self.nan_iterations,
            "iteration-time": seconds,
            **pace,
            **result.lost,
        }

    def _tflops(self, batch_size: int, seconds: float) -> float:
        """Model TFLOP/s per rank for an iteration of this duration."""
        return iteration_flops(self.config.model, batch_size) / seconds / self.parts.mesh.world_size / 1e12

    def _later_batch(self, ahead: int) -> Batch:
        """The batch that is ``ahead`` iterations after the next one, with the next one's size.  Read synchronously."""
        size = self.parts.train_loader.size(self.consumed)
        return self._read(self.consumed + ahead * size, size)

    def _trial_runner(self, ahead: int) -> TrialRunner:
        """Runner for a trial on sequences from batch ``ahead`` on."""
        c, parts = self.config, self.parts
        together = c.training.micro_batch_size * parts.mesh.dp.size
        samples = samples_of(c.snip.snip_trial_tokens, c.model.seq_length, together, parts.mesh.pp.size)
        first = parts.train_loader.cursor(self.consumed, ahead)
        return parts.stepper.trial_runner(self._read(first, samples), self.iteration + 1)

    def _read(self, first: int, samples: int) -> Batch:
        """A batch of the training data.  Raises ProbeFailed on every rank if a file is bad on any."""
        try:
            return agreed(partial(self.parts.train_loader.make, first, samples), self.parts.mesh)
        except IndexedDatasetError as error:  # training will meet it too
            raise ProbeFailed(str(error)) from None

    def _rewound(self, result: StepResult, suspicious: bool) -> bool:
        """Let the guard judge this iteration.  Returns whether the run went back to a checkpoint."""
        if self.guard is None:
            return False
        step = self.guard.after_step(self.iteration, result.loss, result.grad_norm, suspicious)
        if step is None:
            return False
        LOGGER.warning(f"iteration {step.iteration}: {step.text}")
        if self.writer is not None:
            self.writer.alert("the loss broke", step.text, step.iteration)
        if step.kind != "none":
            self.nan_in_a_row = 0
        if step.checkpoint is None:
            return False
        back = step.checkpoint  # no save is in progress: it may copy what this overwrites
        state = go_back(self.parts, self.guard.folder(back) or self.config.save_dir, back)
        self._take_state(state)
        self.guard.went_back(back)
        self.iteration = back
        self.unlogged = []
        self.data_skipped = self.consumed - state["consumed_samples"] + state["data_skipped"]
        if self.writer is not None:
            self.writer.go_back(back)
        if self.parts.mesh.rank == 0:
            drop_later_plans(self.config, back)
        return True

    def _fixed_precision(self, iteration: int) -> dict[str, Any]:
        """Without a planner: the plan of a file, and the late switch once it is due."""
        parts, final = self.parts, self.parts.final
        row: dict[str, Any] = {} if parts.plan_hash is None else {"snip/plan_hash": parts.plan_hash}
        if final is None or parts.coordinator is not None or iteration < final.start:
            return row
        if parts.switch():
            LOGGER.info(f"iteration {iteration}: the last iterations run in {final}")
        return row | {"snip/plan_hash": final.hash(parts.plan_hash), "snip/final_precision": str(final)}

    def _measured_divergence(self, bf16_loss: float | None, result: StepResult, plan: str) -> dict[str, Any]:
        """Cost of low precision for this batch and on average under this plan, with the statistics' prediction."""
        if bf16_loss is None:
            return {}
        coordinator, divergence = self.parts.coordinator, result.loss - bf16_loss
        self.divergence = self.divergence.following(plan, divergence)
        measured = {"snip/bf16_loss": bf16_loss, "snip/measured_loss_divergence": divergence}
        measured |= {f"snip/measured_loss_divergence_{key}": v for key, v in self.divergence.summary().items()}
        return measured | (coordinator.predicted_metrics() if coordinator else {})

    def _validate(self) -> dict[str, Any]:
        """Mean loss over the next validation batches.  Before training, they are those of the first validation."""
        loader, log = self.parts.valid_loader, self.config.logging
        if loader is None or not log.eval_interval or log.eval_iters < 1:
            return {}
        size = self.config.training.global_batch_size
        losses, start = [], self.consumed_valid
        for i in range(log.eval_iters):
            try:
                batch = agreed(partial(loader.batch, start + i * size), self.parts.mesh)
            except IndexedDatasetError as error:  # on every rank
                self.data_problem = str(error)
                return {}
            losses.append(self.parts.stepper.evaluate(batch, self.iteration))
        if self.iteration > 0:
            self.consumed_valid = start + log.eval_iters * size
        loss = sum(losses) / len(losses)
        if self._is_last_rank():
            runtime.say(validation_line(self.iteration, loss))
        return {"lm loss validation": loss, "lm loss validation ppl": math.exp(min(loss, 20.0))}

    def _validate_new_weights(self) -> None:
        """Validate the initial weights, and write the result as the row of iteration 0."""
        if self.iteration == 0 and (row := self._validate()) and self.writer is not None:
            self.writer.write({"iteration": 0, **row})

    def _is_last_rank(self) -> bool:
        return self.parts.mesh.rank == self.parts.mesh.world_size - 1

    def _log(self, row: dict[str, Any], result: StepResult) -> None:
        if self.writer is not None:
            planner = self.parts.coordinator if "snip/achieved" in row else None
            self.writer.write(row, *((planner.plan, planner.predictions) if planner is not None else ()))
        self.unlogged.append(row["iteration-time"])
        if not self._due(self.config.logging.log_interval):
            return
        seconds, self.unlogged = sum(self.unlogged) / len(self.unlogged), []
        if self._is_last_rank():
            throughput = self.config.logging.log_throughput
            tflops = self._tflops(row["batch-size"], seconds) if throughput else None
            peak = peak_tflops(self.instruments.device) if throughput else None
            shown = {**row, "lm loss": result.loss, "grad-norm": result.grad_norm, "iteration-time": seconds}
            total, tokens = self.config.training.train_iters, row["batch-size"] * self.config.model.seq_length
            done = max(1, self.iteration - self.start.iteration)
            # so far, with probes, validations and saves
            left = (time.perf_counter() - self.began) / done * (total - self.iteration)
            numbers = {"nan_iterations": self.nan_iterations, "tokens": tokens, "left": left}
            runtime.say(progress_line(shown, total, **numbers, tflops=tflops, peak=peak))


def train(config: Config, ending: Ending | None = None) -> None:
    """Run `pretrain_llama.py` with these options.  Every rank must call it.  Raises UserError for bad input.

    ending: from `runtime.report_errors`; errors then say how to continue the run.
    """
    began, p, stacks = time.perf_counter(), config.parallel, Path(config.logging.run_dir) / "stacks"
    kind = runtime.resolve_backend(p.distributed_backend, p.device)[1]
    # first, since `check` queries the GPU, and CUDA's allocator then reads its settings
    runtime.prepare_environment(kind, deterministic=config.training.deterministic_mode, stacks=stacks)
    config, plan = check(config, runtime.environment_world_size())
    check_restarts(config, runtime.environment_restarts(), runtime.environment_requeues())
    config = config.with_defaults()
    start = find_start(config)
    if ending is not None:
        ending.folder, ending.advice = stacks, partial(advice, config)
    here = runtime.start(p.distributed_backend, p.distributed_timeout_minutes, ending, p.device)
    start = agree_on(config, start)
    memory_plan = plan_of_run(config, here)
    warn_about_memory(config, here, plan=memory_plan)
    parts = build(config, here, plan, False, memory_plan=memory_plan)
    trainer = Trainer(config, parts, start)
    trainer.began = began  # --exit-duration-in-mins includes startup, as a job's time limit does
    if ending is not None:
        ending.open()
    try:
        trainer.run()
    except BaseException:
        trainer.close(report=False)  # the error must be the first and only report
        raise
    trainer.close(report=True)
    if ending is not None:
        ending.close()
    runtime.stop()
