"""From statistics to what the solver is asked, in a run and outside; and outside a run, plans and their trade-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_snip.config import Config, SnipConfig
from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import NOMINAL, GemmTimes, achieved
from megatron_snip.snip.plan.ilp import InfeasibleTarget, Solution, solve_pareto
from megatron_snip.snip.plan.options import Choices, check_choices, read_times, solve_request
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import Plan, build_plan
from megatron_snip.snip.plan.program import Ints
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import ObjectiveInputs, base_option, get_objective, quality_loss

BASELINES = ("abs_err", "rel_err", "layer_id", "layer_type")
POINTS = 21  # plans on the frontier
DRAWS = 16  # plans for a regret


def ask(
    snip: SnipConfig,
    shapes: Sequence[LinearShape],
    choices: Choices,
    stats: Statistics | None,
    *,
    times: GemmTimes = NOMINAL,
    objective: str | None = None,
    seed: int = 0,
    current: Plan | None = None,
) -> tuple[SolveRequest, Ints]:
    """The solver's request, and the options [L] at which linears are held: the base of the free ones, or -1.

    stats: None for an objective that needs none.  objective: by default --snip-objective.  seed: for "random".
    Raises UserError if the objective cannot be computed.
    """
    inputs = ObjectiveInputs(shapes, choices.options, stats, snip.snip_weight, seed)
    quality, bad = quality_loss(objective or snip.snip_objective, inputs)
    held = np.where(bad, base_option(choices.free), -1)
    now = current.linears if current else None
    return solve_request(snip, shapes, choices, quality, times=times, held=held, current=now), held


def pending_of(snip: SnipConfig, choices: Choices, request: SolveRequest, probed: int, lag: int = 0) -> Pending:
    """A solve of --snip-objective from a probe before iteration ``probed``, whose plan is due ``lag`` later."""
    options = tuple(map(str, choices.options))
    return Pending(probed, probed + lag, options, snip.snip_objective, request, choices.measure, snip.snip_max_loss)


@dataclass(frozen=True)
class Planner:
    """Makes plans from statistics, under the options of ``config``."""

    config: Config
    stats: Statistics
    shapes: Sequence[LinearShape]
    choices: Choices
    times: GemmTimes

    @classmethod
    def of(cls, config: Config, stats: Statistics, shapes: Sequence[LinearShape]) -> Planner:
        """A planner of these linears.  Raises UserError if the options do not fit them."""
        return cls(config, stats, shapes, check_choices(config.snip, shapes), read_times(config.snip))

    @property
    def baselines(self) -> list[str]:
        """Baselines for which these statistics suffice; some probes measure only fprop's operands, or unknown kinds."""
        found = [name for name in BASELINES if self.stats.has_updates or not get_objective(name).needs_operands]
        return [name for name in found if name != "layer_type" or all(shape.kind for shape in self.shapes)]

    def request(self, objective: str, seed: int = 0) -> SolveRequest:
        """The solver's request for an objective."""
        of = self.config.snip, self.shapes, self.choices, self.stats
        return ask(*of, times=self.times, objective=objective, seed=seed)[0]

    def plan(self, solution: Solution, objective: str, target: float) -> Plan:
        """The plan of a solution, effective from the statistics' iteration on."""
        return build_plan(
            solution, self.shapes, self.choices.options, iteration=self.stats.iteration, objective=objective,
            target=target, measure=self.choices.measure, gemm_times=self.times.hardware,
        )  # fmt: skip

    def solve(self, objective: str, seed: int = 0) -> Plan:
        """The plan for an objective.  InfeasibleTarget also names linears whose statistics are not finite."""
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

    def frontier(self, objective: str, **limits: Any) -> list[Plan]:
        """Plans from target 0 to the highest reachable one, in rising order; --snip-target is one of the targets.

        limits: gap, node_limit and time_limit of each solve.
        """
        request = self.request(objective)
        most = request.most()
        targets = sorted({*np.linspace(0.0, most, POINTS).tolist(), min(request.target, most)})
        solutions = solve_pareto(replace(request, **limits), targets)
        return [self.plan(s, objective, t) for s, t in zip(solutions, targets, strict=True)]

    def regret(self, plan: Plan, each: Sequence[Statistics]) -> float | None:
        """By how many nats, on average, plans from resampled batches are predicted to be worse than ``plan``.

        each: statistics of single batches, whose mean this planner has.  Each of DRAWS plans comes from a resample with
        replacement; this planner's statistics predict its loss.  None for one batch, or without a prediction.
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
        """A plan's quality loss in a request's objective."""
        columns = [self.choices.options.index(plan.linears[shape.name]) for shape in self.shapes]
        return float(request.quality_loss[np.arange(len(columns)), columns].sum())

    def saved_by(self, plan: Plan) -> float:
        """What a plan saves, in the target's unit."""
        return achieved(self.shapes, plan.linears, self.choices.measure, self.times)
