"""When to probe, solve and swap.  Each rank has a coordinator, and all of them act in step.

    before iteration i:       probe -> statistics, the same on every rank
                              quality_loss, efficiency -> rank 0 starts the solver in the background
    before iteration i + lag: rank 0 broadcasts the plan; a trial compares it with others (--snip-trials); all ranks
                              compare the hash of the best one; either all apply it or none

If a solve fails, is late or is infeasible, or a trial fails, the current plan stays in force.  Log and metrics say so.
A checkpoint includes a running solve: its matrices and the iteration at which the plan is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.faults.writes import FailedWrites
from megatron_snip.files.json import write_atomic
from megatron_snip.mesh import Mesh
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.curve import points_of, where_it_breaks
from megatron_snip.snip.max_loss import judgement, proposals
from megatron_snip.snip.measure.probe import PassRunner, Probe, ProbedLinear, ProbeFailed
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import NOMINAL, GemmTimes
from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.options import Choices, check_choices
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.program import Ints
from megatron_snip.snip.plan.solver import BackgroundSolver, SolveRequest, SolverKilled
from megatron_snip.snip.plan_metrics import (
    Metrics,
    divergence_metrics,
    plan_metrics,
    predicted_metrics,
    sampling_metrics,
    trial_metrics,
)
from megatron_snip.snip.planner import ask, pending_of
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import get_objective
from megatron_snip.snip.predict.sampling import LEAST_TOKENS, batches_of, suffices
from megatron_snip.snip.trial import TrialFailed, TrialRunner, Trials, try_plan

LOGGER = logging.getLogger("megatron_snip")
#: Plans and statistics kept in memory while they cannot be written.  One more in a row ends the run.
FILES_KEPT = 100


def check_snip(snip: SnipConfig, shapes: Sequence[LinearShape]) -> Choices:
    """The options that these linears may take.

    Raises UserError for an unknown objective, an invalid option, or a target out of reach.
    """
    get_objective(snip.snip_objective)
    try:
        LinearPrecision.parse(snip.snip_warmup_precision)
    except ValueError as error:
        raise UserError(f"--snip-warmup-precision {snip.snip_warmup_precision}: {error}") from None
    return check_choices(snip, shapes)


class Coordinator:
    """Plans the precision of this rank's ``linears``, together with all other ranks."""

    def __init__(
        self,
        snip: SnipConfig,
        shapes: Sequence[LinearShape],
        choices: Choices,
        probe: Probe,
        linears: Mapping[str, ProbedLinear],
        mesh: Mesh,
        run_dir: Path,
        seed: int,
        last_iteration: int | None = None,
        times: GemmTimes = NOMINAL,
        final: Final | None = None,
        decay: int | None = None,
    ) -> None:
        self.snip, self.shapes, self.choices, self.probe = snip, list(shapes), choices, probe
        self.options, self.times = list(choices.options), times
        self.linears, self.mesh, self.run_dir, self.seed = linears, mesh, run_dir, seed
        self.final, self.decay = final, decay  # the late switch; the iteration of one more probe
        if final is not None and not final.plans_fprop:  # after the switch, there is nothing left to plan
            last_iteration = final.start - 1
        self.last_iteration = last_iteration  # no probe if its plan would take effect only after the switch
        self.plan: Plan | None = None
        self.pending: Pending | None = None
        # {iteration, hash, achieved, changed} of every applied plan; changed: the precisions that differ from before
        self.history: list[dict[str, Any]] = []
        self.predictions: Predictions | None = None  # from the last statistics
        self._solver: BackgroundSolver | None = None
        self._unwritten: dict[str, str] = {}  # path in the run folder -> content
        self._failed = FailedWrites(f"plans and statistics in {run_dir}", limit=FILES_KEPT)

    def before_step(
        self,
        iteration: int,
        run_pass: PassRunner,
        zero_grad: Callable[[], None],
        trial_runner: Callable[[int], TrialRunner] | None = None,
    ) -> Metrics:
        """Apply a plan that is due, and probe if a probe is due.  Every rank calls it before every iteration.

        trial_runner: n -> a runner for a trial on data from the n-th batch after the coming one on.  It may raise
        ProbeFailed, on every rank.  Without it, plans are applied without a trial.
        """
        metrics = self._finish_if_due(iteration, trial_runner)
        since = iteration - self.snip.snip_start
        in_time = self.last_iteration is None or iteration + self.snip.snip_apply_lag <= self.last_iteration
        if since >= 0 and (since % self.snip.snip_interval == 0 or iteration == self.decay) and in_time:
            metrics |= self._begin(iteration, run_pass, zero_grad)
            metrics |= self._finish_if_due(iteration, trial_runner)  # lag 0
        metrics |= self._switch(iteration)
        return {**metrics, "snip/plan_hash": self.plan.hash if self.plan else ""}

    def close(self) -> None:
        """Cancel a running solve, and write the files that could not be written before."""
        self._cancel()
        if self._unwritten:
            self._failed.attempt(self._write_all)

    def _cancel(self) -> None:
        if self._solver is not None:
            self._solver.cancel()
            self._solver = None

    @property
    def reason(self) -> str | None:
        """Why the run must end: too many failed writes in a row.  None while it may continue."""
        return self._failed.reason

    def state(self) -> dict[str, Any]:
        """State for a checkpoint.  It includes files not written yet, or a resumed run would lack them."""
        return {
            "unwritten": dict(self._unwritten),
            "plan": self.plan.to_dict() if self.plan else None,
            "pending": self.pending.to_dict() if self.pending else None,
            "history": self.history,
            "predictions": msgspec.to_builtins(self.predictions),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore ``state`` and restart a running solve.  A state that cannot be read changes and writes nothing."""
        plan = Plan.from_dict(state["plan"], "checkpoint") if state["plan"] else None
        if plan:
            plan.check_names((shape.name for shape in self.shapes), "checkpoint")
        pending = Pending.from_dict(state["pending"]) if state["pending"] else None
        predictions = Predictions(**state["predictions"]) if state["predictions"] else None
        self._cancel()
        self.history, self.plan, self.pending, self.predictions = list(state["history"]), plan, None, predictions
        for name, linear in self.linears.items():
            linear.precision = plan.linears[name] if plan else LinearPrecision.parse(self.snip.snip_warmup_precision)
        self._unwritten = dict(state["unwritten"]) if self.mesh.rank == 0 else {}
        if self._unwritten:
            self._failed.attempt(self._write_all)
        if pending:
            self._start(pending)

    def write_plan_in_force(self) -> None:
        """On rank 0, write the current plan to a run folder that lacks it."""
        if self.plan and not (self.run_dir / f"plans/iter_{self.plan.iteration:07d}.json").exists():
            self._write(self.plan, "plans", self.plan.iteration)

    def fall_back(self, plan: Plan, why: str) -> Metrics:
        """Apply a plan without a solve, and cancel a running one.  Every rank calls it with the same plan."""
        self._cancel()
        self.pending = None
        self._write(plan, "plans", plan.iteration)
        metrics = self._apply(plan)
        self.history[-1]["guard"] = why
        of_a_solve = ("target", "objective", "bound", "gap", "solver_seconds", "solve_failed")
        return {name: value for name, value in metrics.items() if name.removeprefix("snip/") not in of_a_solve}

    def measure(
        self, iteration: int, run_pass: PassRunner, zero_grad: Callable[[], None], batches: int
    ) -> Statistics | None:
        """Probe what the objective needs; None if it needs nothing.  May raise ProbeFailed, on every rank."""
        objective = get_objective(self.snip.snip_objective)
        if not objective.needs_stats:
            return None
        everything = objective.needs_operands or self.snip.snip_weight > 0
        enough = self._suffices if self.snip.snip_probe_tokens == "auto" else None
        return self.probe.run(run_pass, zero_grad, iteration, batches, updates=everything, enough=enough)

    def _suffices(self, stats: Statistics, tokens: int) -> bool:
        """Whether this many tokens determine the plan's cost; the same on every rank."""
        try:
            return tokens >= LEAST_TOKENS and suffices(stats, self.options, self._ask(stats)[0])
        except ValueError:  # `_begin` gets the same error and reports it
            return True

    def _ask(self, stats: Statistics | None) -> tuple[SolveRequest, Ints]:
        """The solver's request, and the options at which linears are held.  UserError if Q cannot be computed."""
        of = self.snip, self.shapes, self.choices, stats
        return ask(*of, times=self.times, seed=self.seed, current=self.plan)

    def _begin(self, iteration: int, run_pass: PassRunner, zero_grad: Callable[[], None]) -> Metrics:
        """Measure, and start a solve.  Errors here are the same on every rank."""
        start = time.perf_counter()
        try:
            stats = self.measure(iteration, run_pass, zero_grad, self._batches(iteration))
        except ProbeFailed as error:
            return {"snip/probe_seconds": time.perf_counter() - start} | self._keep(iteration, str(error))
        metrics: Metrics = {"snip/probe_seconds": time.perf_counter() - start}
        if stats is not None:
            self.predictions = Predictions.of(stats)
            metrics |= divergence_metrics(stats, self.options)
            self._write(stats, "stats", iteration)
        try:
            request, held = self._ask(stats)
        except ValueError as error:
            return metrics | self._keep(iteration, f"the objective cannot be computed: {error}")
        if stats is not None:
            metrics |= sampling_metrics(stats, self.options, request, self.probe.seen)
        columns = zip(self.shapes, held, self.choices.fixed)
        if named := ", ".join(shape.name for shape, option, fixed in columns if option >= 0 > fixed):
            LOGGER.warning(f"iteration {iteration}: held at the base option, as statistics are not finite: {named}")
        self._start(pending_of(self.snip, self.choices, request, iteration, self.snip.snip_apply_lag))
        return metrics

    def _batches(self, iteration: int) -> int:
        """Number of batches for a probe: enough for --snip-probe-tokens, at most what is left of the run."""
        wanted = batches_of(self.snip, self.probe.tokens)
        return wanted if self.last_iteration is None else min(wanted, self.last_iteration - iteration + 1)

    def _start(self, pending: Pending) -> None:
        self._cancel()
        self.pending = pending
        if self.mesh.rank == 0:
            try:
                self._solver = BackgroundSolver(pending.request)
            except Exception as error:  # no disk or no threads, for example; when due, all ranks learn of it
                LOGGER.warning(f"iteration {pending.probed}: {error}")

    def _finish_if_due(self, iteration: int, trial_runner: Callable[[int], TrialRunner] | None) -> Metrics:
        if self.pending is None or self.pending.due != iteration:
            return {}
        pending, self.pending = self.pending, None
        answer: list[Any] = [self._answer(pending) if self.mesh.rank == 0 else None]
        dist.broadcast_object_list(answer, src=0, group=self.mesh.world, device=self.probe.device)
        waited, solved = answer[0]
        metrics: Metrics = {"snip/wait_seconds": waited}
        start = time.perf_counter()
        if isinstance(solved, str):
            metrics |= self._keep(iteration, solved)
        else:
            plan: Plan | None = Plan.from_dict(solved, "plan from rank 0")
            assert plan is not None
            may = trial_runner is not None and self.snip.snip_trials > 1 and self.predictions is not None
            if may or pending.max_loss is not None:
                plan, tried = self._try(pending, plan, trial_runner)
                metrics |= tried
            start = time.perf_counter()
            if plan is not None:
                metrics |= self._take(plan)
        return metrics | {"snip/apply_seconds": time.perf_counter() - start}

    def _try(
        self, pending: Pending, plan: Plan, trial_runner: Callable[[int], TrialRunner] | None
    ) -> tuple[Plan | None, Metrics]:
        """Run a trial.  Returns the best plan, None if the current one stays, and the metrics."""
        begin, propose = time.perf_counter(), None
        try:
            if trial_runner is None:
                raise TrialFailed(f"--snip-max-loss {pending.max_loss:g}, and --snip-trials is 0")
            ahead = max(0, pending.probed + self._batches(pending.probed) - plan.iteration)
            trials = Trials(trial_runner(ahead), self.linears, self.mesh, self.probe.device)
            if self.mesh.rank == 0:
                propose = proposals(pending, plan, self.shapes, self.times.hardware, self.plan)
            tried, best = try_plan(trials, propose, self.snip.snip_trials, plan, self.predictions, pending.max_loss)
        except (TrialFailed, ProbeFailed) as error:
            return None, self._keep(plan.iteration, f"the trial failed: {error}")
        metrics = trial_metrics(tried, trials.tokens, trials.passes, time.perf_counter() - begin)
        if best is None:
            return None, metrics | self._keep(plan.iteration, "no plan has a finite loss in the trial")
        assert best.trial is not None
        if pending.max_loss is not None:
            LOGGER.info(f"iteration {plan.iteration}: {best.trial.name!r} is {judgement(tried, pending.max_loss)}")
            LOGGER.info(f"iteration {plan.iteration}: {where_it_breaks(points_of(tried, self.predictions))}")
        if best.trial.name == "in_force":
            return None, metrics | {"snip/solve_failed": 0, "snip/churn": 0.0}
        return best, metrics

    def _take(self, plan: Plan) -> Metrics:
        """Apply a plan if all ranks hold the same one."""
        plan = plan if self.final is None else self.final.plan(plan, self.shapes, plan.iteration)
        if not self._agreed(plan):
            return self._keep(plan.iteration, "the plan's hash differs between ranks")
        self._write(plan, "plans", plan.iteration)
        return self._apply(plan)

    def _switch(self, iteration: int) -> Metrics:
        """Apply the late switch to the precisions in force, once it is due."""
        if self.final is None or iteration < self.final.start:
            return {}
        now, row = self.plan or Plan(iteration, self._linears()), {"snip/final_precision": str(self.final)}
        if (plan := self.final.plan(now, self.shapes, iteration)) is now:
            return row
        LOGGER.info(f"iteration {iteration}: the last iterations run in {self.final}")
        self._write(plan, "plans", iteration)
        return self._apply(plan) | row

    def _linears(self) -> Mapping[str, LinearPrecision]:
        """The precisions in force."""
        warmup = LinearPrecision.parse(self.snip.snip_warmup_precision)
        return self.plan.linears if self.plan else dict.fromkeys((shape.name for shape in self.shapes), warmup)

    def _write(self, what: Statistics | Plan, kind: str, iteration: int) -> None:
        """On rank 0, write a file for people to read.  If that fails, retry with the next file."""
        if self.mesh.rank == 0:
            self._unwritten[f"{kind}/iter_{iteration:07d}.json"] = what.to_json()
            self._failed.attempt(self._write_all)

    def _write_all(self) -> None:
        for name, text in list(self._unwritten.items()):
            write_atomic(self.run_dir / name, text)
            del self._unwritten[name]

    def _answer(self, pending: Pending) -> tuple[float, dict[str, Any] | str]:
        """On rank 0: seconds that training waited for the solver, and the plan or why there is none.

        The wait is 0.0 if the answer is already there, even if reading it takes a while.
        """
        solver, self._solver = self._solver, None
        if solver is None:
            return 0.0, "the solver's process did not start"
        is_late, start = not solver.done(), time.perf_counter()
        solved = self._solved(solver, pending)
        return time.perf_counter() - start if is_late else 0.0, solved

    def _solved(self, solver: BackgroundSolver, pending: Pending) -> dict[str, Any] | str:
        """The plan as plain values, or why there is none."""
        try:
            solution = self._solution(solver, pending)
            return pending.plan_of(solution, self.shapes, self.times.hardware).to_dict()
        except Exception as error:  # must not be raised: the other ranks are blocked in the broadcast
            return str(error) or repr(error)
        finally:
            solver.cancel()

    def _solution(self, solver: BackgroundSolver, pending: Pending) -> Solution:
        """The solver's answer.  If the solver was killed, solve again; the plan is the same."""
        end = time.monotonic() + self.snip.snip_solve_timeout
        try:
            return solver.result(self.snip.snip_solve_timeout)
        except SolverKilled as error:
            LOGGER.warning(f"iteration {pending.due}: {error}; solving again")
            with BackgroundSolver(pending.request) as again:
                return again.result(max(0.0, end - time.monotonic()))

    def _agreed(self, plan: Plan) -> bool:
        """Whether all ranks have the same plan.  Every rank must call it."""
        number = int(plan.hash[:15], 16)  # 60 bits fit an int64
        pair = torch.tensor([number, -number], device=self.probe.device)
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.mesh.world)
        return bool(pair[0] == number and pair[1] == -number)

    def _apply(self, plan: Plan) -> Metrics:
        churn = self.plan.churn(plan) if self.plan else 1.0
        before = self.plan.linears if self.plan else {}
        changed = {name: str(precision) for name, precision in plan.linears.items() if before.get(name) != precision}
        for name, linear in self.linears.items():
            linear.precision = plan.linears[name]
        self.plan = plan
        about = {"iteration": plan.iteration, "hash": plan.hash, "achieved": plan.achieved}
        self.history.append({**about, "changed": changed})
        metrics = plan_metrics(plan, self.shapes, self.choices.measure, self.times, churn, len(self.history))
        LOGGER.info(
            f"iteration {plan.iteration}: plan {plan.hash} takes effect, {plan.achieved:.1%} of the linears' FLOPs "
            f"in FP4, {churn:.0%} of linears changed, solver {plan.solver.status} in {plan.solver.seconds:.2f} s"
        )
        return metrics | self.predicted_metrics()

    def predicted_metrics(self) -> Metrics:
        """What the last statistics predict for the precisions in force.  Leaves out what they do not cover."""
        return predicted_metrics(self.predictions, self._linears())

    def _keep(self, iteration: int, why: str) -> Metrics:
        """Keep the current plan, and say why."""
        LOGGER.warning(f"iteration {iteration}: no new plan, keeping the current one: {why}")
        return {"snip/solve_failed": 1, "snip/solve_error": why}
