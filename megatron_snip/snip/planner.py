"""Plans from statistics apart from a run: one plan, and the trade-off between what is saved and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_snip.config import Config
from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import GemmTimes, achieved
from megatron_snip.snip.plan.ilp import InfeasibleTarget, Solution, solve_pareto
from megatron_snip.snip.plan.options import Choices, solve_request
from megatron_snip.snip.plan.plan_file import Plan, build_plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import ObjectiveInputs, get_objective, quality_loss

BASELINES = ("abs_err", "rel_err", "layer_id", "layer_type")
POINTS = 21  # of the frontier
DRAWS = 16  # plans of a regret


@dataclass(frozen=True)
class Planner:
    """Statistics and what plans of them must keep."""

    config: Config
    stats: Statistics
    shapes: Sequence[LinearShape]
    choices: Choices
    times: GemmTimes

    @property
    def baselines(self) -> list[str]:
        """Those that the statistics are enough for: a probe of the loss divergence alone sees fprop's operands only."""
        return [name for name in BASELINES if self.stats.has_updates or not get_objective(name).needs_operands]

    def request(self, objective: str, seed: int = 0) -> SolveRequest:
        """What the solver is asked for an objective."""
        snip = self.config.snip
        inputs = ObjectiveInputs(self.shapes, self.choices.options, self.stats, snip.snip_weight, seed)
        quality, held = quality_loss(objective, inputs)
        return solve_request(snip, self.shapes, self.choices, quality, times=self.times, held=held)

    def plan(self, solution: Solution, objective: str, target: float) -> Plan:
        """The plan of a solution, from the statistics' iteration on."""
        return build_plan(
            solution, self.shapes, self.choices.options, iteration=self.stats.iteration, objective=objective,
            target=target, measure=self.choices.measure, gemm_times=self.times.hardware,
        )  # fmt: skip

    def solve(self, objective: str, seed: int = 0) -> Plan:
        """The plan of an objective.  InfeasibleTarget also names the linears whose statistics are not finite."""
        try:
            request = self.request(objective, seed)
            solution = request.solve()
        except InfeasibleTarget as error:
            if not (bad := self.stats.not_finite):
                raise
            names = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
            said = f"{error}; held at the base option, as statistics are not finite: {names}"
            raise InfeasibleTarget(said, error.reachable) from None
        return self.plan(solution, objective, request.target)

    def frontier(self, objective: str, **limits: float) -> list[Plan]:
        """Plans from no saving to the most that can be reached, the target's own among them, by rising target.

        limits: of each solve, as in ilp.solve.
        """
        request = self.request(objective)
        arguments = {field.name: getattr(request, field.name) for field in fields(request)}
        quality, saved, target = (arguments.pop(name) for name in ("quality_loss", "efficiency", "target"))
        most = request.most()
        targets = sorted({*np.linspace(0.0, most, POINTS).tolist(), min(target, most)})
        solutions = solve_pareto(quality, saved, targets, **{**arguments, **limits})
        return [self.plan(s, objective, t) for s, t in zip(solutions, targets, strict=True)]

    def regret(self, plan: Plan, each: Sequence[Statistics]) -> float | None:
        """Nats by which plans of other tokens are worse than this one, which the statistics made, in the mean.

        each: statistics of the parts whose mean this planner has, such as batches.  They are drawn with replacement,
        DRAWS times; each draw makes a plan, and these statistics judge it.  None for one part, or without a prediction.
        """
        predictions, generator, found = Predictions.of(self.stats), np.random.default_rng(0), []
        own = predictions.total_loss_divergence(plan.linears)
        for _ in range(DRAWS if len(each) > 1 else 0):
            drawn = Statistics.mean([each[part] for part in generator.integers(len(each), size=len(each))])
            other = replace(self, stats=drawn).solve(plan.objective)
            found.append(predictions.total_loss_divergence(other.linears))
        known = [loss - own for loss in found if loss is not None and own is not None]
        return float(np.mean(known)) if known else None

    def quality_of(self, plan: Plan, request: SolveRequest) -> float:
        """A plan's quality loss by the objective that a request was made with."""
        columns = [self.choices.options.index(plan.linears[shape.name]) for shape in self.shapes]
        return float(request.quality_loss[np.arange(len(columns)), columns].sum())

    def saved_by(self, plan: Plan) -> float:
        """What a plan saves in the target's unit."""
        return achieved(self.shapes, plan.linears, self.choices.measure, self.times)
