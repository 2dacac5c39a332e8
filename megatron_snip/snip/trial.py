"""Trials: run several plans before one takes effect, and apply the one that measures best.

    BF16                  the reference
    the solver's plan     the cheapest by the probe's sum of single linears
    the plan in force, low precision everywhere, and rules that measure nothing
    then plans that hold linears: solve again with one more linear held at its best precision, starting with the one
    of the highest predicted cost; the linear stays held if the new plan measures better than the one without it

Each is a forward pass without gradients over the same tokens, which the probe did not use.  The probe predicts plans
well as long as the errors of single linears add up.  They do not in models with large outliers at high shares of FP4.
There, only a measurement shows the cost.  Trials compare losses token by token, which removes what all plans share.

The first-order part of a loss change is luck, and vanishes with further training.  Early in a run it exceeds the cost
of low precision, and some plan always measures below BF16.  The trial therefore ends after the solver's plan if that
costs no more than predicted, within ``CERTAIN`` standard errors.  Another plan must be better by as many standard
errors.  If a plan measures below its prediction, the prediction counts: a measurement counts against a plan, but never
for it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.mesh import Mesh
from megatron_snip.quant import LinearPrecision, LinearShape, StepContext
from megatron_snip.snip.measure.probe import ProbedLinear
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.plan.ilp import Solution, keeps
from megatron_snip.snip.plan.plan_file import UNSOLVED, Plan, TrialRecord, TriedRecord
from megatron_snip.snip.plan.program import Ints
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import ObjectiveInputs, quality_loss

LOGGER = logging.getLogger("megatron_snip")

#: A plan must measure better by this many standard errors.
CERTAIN = 2.0
_BF16 = StepContext(precision=LinearPrecision.uniform("bf16"))
#: Runs the trial's tokens forward, by default in the linears' own precision, or in a `StepContext`: losses [T] of this
#: rank's tokens, float32 nats; empty on ranks without the loss.
TrialRunner = Callable[..., Tensor]


@dataclass(frozen=True)
class Tried:
    """A plan that was run: its loss above BF16's and the standard error in nats, NaN if the loss is not finite."""

    name: str
    plan: Plan
    increase: float
    error: float
    taken: bool  # better than the best before it
    improves: bool  # better than the plan it was made from
    predicted: float | None = None  # by the probe's sum of single linears, nats

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite."""
        return math.isfinite(self.increase)

    @property
    def counted(self) -> float:
        """The increase that it counts with: the predicted one where it measures less, which is luck."""
        return self.increase if self.predicted is None or self.predicted <= self.increase else self.predicted

    @property
    def record(self) -> TriedRecord:
        """What a plan file keeps of it."""
        increase, error, predicted = (
            value if value is not None and math.isfinite(value) else None
            for value in (self.increase, self.error, self.predicted)
        )
        return TriedRecord(self.name, increase, error, predicted)

    def __str__(self) -> str:
        predicted = "" if self.predicted is None else f" (predicted {self.predicted:.4g})"
        return f"{self.name} {self.increase:.4g} +- {self.error:.2g}{predicted}"


@dataclass(frozen=True)
class Proposal:
    """A plan to run next."""

    name: str
    plan: Plan
    made_from: str = ""  # name of the plan it should improve on


#: The plans tried so far -> the next one, or None to stop.
Propose = Callable[[Sequence[Tried]], Proposal | None]
#: A plan -> its predicted increase over BF16 in nats; None if nothing predicts it.
Predict = Callable[[Plan], float | None]


class TrialFailed(RuntimeError):
    """A trial failed.  Every rank raises it, with the same message."""


class Trials:
    """Runs plans on this rank's ``linears``.  Every rank makes one, and makes the same calls."""

    def __init__(self, run: TrialRunner, linears: Mapping[str, ProbedLinear], mesh: Mesh, device: torch.device) -> None:
        self._run, self._linears, self._mesh, self._device = run, linears, mesh, device
        self._bf16 = run(_BF16)
        self.tokens, loss, _ = self._sums(self._bf16)
        self.passes = 1
        if not self.tokens:
            raise TrialFailed("no token of its sequences counts in the loss")
        if not math.isfinite(loss):
            raise TrialFailed(f"the loss in BF16 is {loss}")

    def run(
        self, propose: Propose | None, passes: int, predict: Predict | None = None, *, to_the_end: bool = False
    ) -> list[Tried]:
        """Run rank 0's proposals until there are no more or ``passes`` passes are done.  Returns them in order.

        The last plan in the list with ``taken`` is the best.
        predict: on rank 0.  The trial then ends after the first plan if that costs no more than predicted, unless
        ``to_the_end``.  Without ``predict``, only measurements count.
        """
        tried: list[Tried] = []
        known: dict[str, Tensor] = {}
        best: Tensor | None = None
        while self.passes < passes:
            if (proposed := self._proposed(propose, tried, predict)) is None:
                break
            name, plan, made_from, predicted = proposed
            losses = self._losses(plan)
            increase, error = self._difference(losses, self._bf16)
            if predicted is not None and predicted > increase:
                losses = losses + (predicted - increase)
            known[name] = losses
            taken = self._is_better(losses, best)
            improves = self._is_better(losses, known.get(made_from))
            best = losses if taken else best
            tried.append(Tried(name, plan, increase, error, taken, improves, predicted))
            if len(tried) == 1 and not to_the_end and predicted is not None and increase <= predicted + CERTAIN * error:
                break
        return tried

    def _is_better(self, losses: Tensor, others: Tensor | None) -> bool:
        """Whether losses are finite, and below others beyond noise if those are finite too."""
        if not math.isfinite(self._sums(losses)[1]):
            return False
        if others is None or not math.isfinite(self._sums(others)[1]):
            return True
        gained, error = self._difference(losses, others)
        return gained < -CERTAIN * error

    def _proposed(
        self, propose: Propose | None, tried: Sequence[Tried], predict: Predict | None
    ) -> tuple[str, Plan, str, float | None] | None:
        """Broadcast rank 0's next proposal: name, plan, made_from and predicted increase.

        Raises TrialFailed on every rank if an error prevents rank 0 from proposing.
        """
        answer: list[Any] = [None]
        if propose is not None:
            try:
                if (found := propose(tried)) is not None:
                    predicted = None if predict is None else predict(found.plan)
                    answer = [(found.name, found.plan.to_dict(), found.made_from, predicted)]
            except Exception as error:  # must not be raised here: the other ranks are blocked in the broadcast
                answer = [str(error) or repr(error)]
        if self._mesh.world_size > 1:
            dist.broadcast_object_list(answer, src=0, group=self._mesh.world, device=self._device)
        if isinstance(answer[0], str):
            raise TrialFailed(answer[0])
        if answer[0] is None:
            return None
        name, plan, made_from, predicted = answer[0]
        return name, Plan.from_dict(plan, "plan from rank 0"), made_from, predicted

    def _losses(self, plan: Plan) -> Tensor:
        before = {name: linear.precision for name, linear in self._linears.items()}
        self.passes += 1
        try:
            for name, linear in self._linears.items():
                linear.precision = plan.linears[name]
            return self._run()
        finally:
            for name, linear in self._linears.items():
                linear.precision = before[name]

    def _difference(self, losses: Tensor, others: Tensor) -> tuple[float, float]:
        """Mean of losses - others over the tokens of all ranks, and its standard error."""
        count, total, square = self._sums(losses.double() - others.double())
        mean = total / count
        variance = square / count - mean * mean
        return mean, math.sqrt((0.0 if variance < 0 else variance) / count)  # rounding may make it negative

    def _sums(self, values: Tensor) -> tuple[int, float, float]:
        """Count, sum and sum of squares over all ranks."""
        values = values.double()
        sums = torch.stack([values.new_tensor(float(values.numel())), values.sum(), values.square().sum()])
        if self._mesh.world_size > 1:
            dist.all_reduce(sums, group=self._mesh.world)
        count, total, square = sums.tolist()
        return int(count), total, square


class Proposals:
    """Rank 0's proposals: first given plans, then plans that hold linears.

    first: yields the given plans lazily.  request: the request that the solver's plan solves.  plan_of: solution ->
    plan.
    """

    def __init__(
        self,
        first: Callable[[], Iterable[tuple[str, Plan]]],
        request: SolveRequest,
        shapes: Sequence[LinearShape],
        options: Sequence[LinearPrecision],
        plan_of: Callable[[Solution], Plan],
    ) -> None:
        self._first, self._request, self._plan_of = iter(first()), request, plan_of
        self._names, self._options = [shape.name for shape in shapes], list(options)
        self._asked: set[int] = set()
        self._holds: dict[str, tuple[int, ...]] = {}  # proposal -> rows that it holds

    def __call__(self, tried: Sequence[Tried]) -> Proposal | None:
        """The next plan, or None if there are no more."""
        known = [one.plan.linears for one in tried]
        return next((proposal for proposal in self._rest(tried) if proposal.plan.linears not in known), None)

    def _rest(self, tried: Sequence[Tried]) -> Iterator[Proposal]:
        for name, plan in self._first:
            yield Proposal(name, plan)
        base = next(
            one for one in reversed(tried) if one.name == "solver" or (one.name in self._holds and one.improves)
        )
        held = self._holds.get(base.name, ())
        for row in self._costliest(base.plan):
            self._asked.add(row)
            fixed = self._fixed((*held, row))
            try:
                solution = dataclasses.replace(self._request, fixed=fixed).solve()
            except UserError:  # infeasible: the target needs this linear
                continue
            name = f"hold {self._names[row]}"
            self._holds[name] = (*held, row)
            yield Proposal(name, self._plan_of(solution), base.name)

    def _costliest(self, plan: Plan) -> list[int]:
        """Rows not held in any proposal yet, in order of falling predicted cost."""
        quality = self._request.quality_loss
        column = {option: index for index, option in enumerate(self._options)}
        cost = np.zeros(len(quality))
        for row, name in enumerate(self._names):
            option = column.get(plan.linears[name])
            is_free = self._request.fixed is None or self._request.fixed[row] < 0
            if option is not None and is_free and row not in self._asked:
                cost[row] = quality[row, option] - quality[row, self._best(row)]
        return [int(row) for row in np.argsort(-cost, kind="stable") if cost[row] > 0]

    def _best(self, row: int) -> int:
        """The allowed option with the lowest quality loss; of several, as in plans by GEMM, the one that saves most."""
        allowed = self._request.quality_loss[row].copy()
        if self._request.reserved is not None:
            allowed[self._request.reserved] = np.inf
        lowest = np.flatnonzero(allowed == allowed.min())
        return int(lowest[self._request.efficiency[row, lowest].argmax()])

    def _fixed(self, rows: Sequence[int]) -> Ints:
        fixed = np.full(len(self._names), -1, np.int64) if self._request.fixed is None else self._request.fixed.copy()
        ties = self._request.ties
        for row in rows:
            together = [row] if ties is None or ties[row] < 0 else np.flatnonzero(ties == ties[row])
            fixed[together] = self._best(row)
        return fixed


def samples_of(tokens: int, seq_length: int, together: int, stages: int) -> int:
    """Number of sequences with at least this many tokens, in full microbatches, whose number the stages divide.

    together: sequences in a microbatch of all dp ranks.
    """
    microbatches = -(-tokens // (seq_length * together))
    return together * -(-microbatches // stages) * stages


def first_plans(
    solved: Plan,
    request: SolveRequest,
    shapes: Sequence[LinearShape],
    options: Sequence[LinearPrecision],
    plan_of: Callable[[Solution], Plan],
    in_force: Plan | None,
) -> Iterator[tuple[str, Plan]]:
    """Yield the solver's plan and its rivals by name.  All save what the request asks for.

    Rules are solved lazily, because most trials end with the first plan.
    """
    column = {option: index for index, option in enumerate(options)}
    yield "solver", solved
    if in_force is not None:
        choice = [column.get(in_force.linears[shape.name], -1) for shape in shapes]
        if min(choice) >= 0 and keeps(request, np.array(choice)):
            yield "in_force", in_force
    lowest = _lowest(request)
    if all(limit.holds(lowest) for limit in request.limits):
        low = {shape.name: options[option] for shape, option in zip(shapes, lowest, strict=True)}
        saved = achieved(shapes, low)
        yield "lowest", dataclasses.replace(solved, linears=low, achieved=saved, objective="lowest", solver=UNSOLVED)
    for rule in ("layer_id", "layer_type"):
        try:
            quality, _ = quality_loss(rule, ObjectiveInputs(shapes, options))
            solution = dataclasses.replace(request, quality_loss=quality, current=None, churn=0.0).solve()
        except UserError:  # a rule that knows nothing of these linears
            continue
        yield rule, dataclasses.replace(plan_of(solution), objective=rule)


def _lowest(request: SolveRequest) -> Ints:
    """[L] of each linear, the allowed option that saves most."""
    saved = request.efficiency.copy()
    if request.reserved is not None:
        saved[:, request.reserved] = -np.inf
    choice = saved.argmax(axis=1)
    return choice if request.fixed is None else np.where(request.fixed >= 0, request.fixed, choice)


def with_record(tried: Sequence[Tried], tokens: int) -> Plan | None:
    """The best plan, with the measurements of all plans attached; None if no plan has a finite loss."""
    best = next((one for one in reversed(tried) if one.taken), None)
    if best is None:
        return None
    record = TrialRecord(best.name, best.increase, best.error, tokens, [one.record for one in tried])
    return dataclasses.replace(best.plan, trial=record)


def stays_below(one: Tried, nats: float) -> bool:
    """Whether the increase that a plan counts with is below so many nats beyond doubt; NaN is not."""
    return one.is_finite and one.counted + CERTAIN * one.error < nats


def judged(tried: Sequence[Tried], nats: float) -> list[Tried]:
    """Mark one plan as taken: the largest share that stays below, or else the first plan, which saves nothing."""
    below = [one for one in tried if stays_below(one, nats)]
    best = max(below, key=lambda one: one.plan.target) if below else next(iter(tried), None)
    return [dataclasses.replace(one, taken=one is best and one.is_finite) for one in tried]


def try_plan(
    trials: Trials,
    propose: Propose | None,
    passes: int,
    solved: Plan,
    predictions: Predictions | None,
    nats: float | None = None,
) -> tuple[list[Tried], Plan | None]:
    """Run rank 0's proposals, the solver's plan first.  Returns all of them, and the best one with its record.

    nats: runs all proposals, and takes the largest share that stays below (`judged`), not the lowest loss.
    The best is None if no plan has a finite loss.  Every rank must call it.  Raises TrialFailed on every rank.
    """

    def predict(plan: Plan) -> float | None:
        return None if predictions is None else predictions.total_loss_divergence(plan.linears)

    tried = trials.run(propose, passes, predict, to_the_end=nats is not None)
    tried = tried if nats is None else judged(tried, nats)
    best = with_record(tried, trials.tokens)
    if best is not None:
        taken = next(one for one in reversed(tried) if one.taken)
        which = f"{'best' if nats is None else 'taken'} of {len(tried)} plans" if len(tried) > 1 else "one plan"
        LOGGER.info(
            f"iteration {solved.iteration}: {which} tried on {trials.tokens} tokens, in nats above BF16: {taken}"
        )
        if len(tried) > 1:
            LOGGER.info(f"iteration {solved.iteration}: all plans tried: {', '.join(map(str, tried))}")
    return tried, best
