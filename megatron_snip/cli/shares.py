"""Plans of rising shares from one probe: predicted loss, trials, a table and a measured curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.cli.trials import best_for, try_along, try_as_a_run
from megatron_snip.config import Config
from megatron_snip.snip.curve import points_of, where_it_breaks
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import saving
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.planner import Planner
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.trial import TrialFailed, Trials, Tried, with_record
from megatron_snip.train.pictures.curve_picture import WHAT, measured_curve
from megatron_snip.train.report.page import Section
from megatron_snip.train.setup import snip_shapes

#: Explains the columns of the table.
ABOUT = (
    "Predicted: the sum over single linears. Regret: by how much plans from resampled batches are worse, on average. "
    "Measured: the loss above BF16's."
)


def shown(mean: float, error: float) -> str:
    """A number with its standard error."""
    return f"{mean:.2e}" + ("" if math.isnan(error) else f" +- {error:.0e}")


def planner_of(config: Config, stats: Statistics) -> Planner:
    """The planner of these statistics."""
    return Planner.of(config, stats, snip_shapes(config, stats.shapes))


def plans_of(config: Config, stats: Statistics, shares: Sequence[float]) -> dict[str, Plan]:
    """File name -> plan, one for each share of the FLOPs."""
    return {
        f"plan_{100 * share:.10g}": planner_of(config.replace(snip_target=share), stats).solve("snip")
        for share in shares
    }


@dataclass(frozen=True)
class Planned:
    """Plans and their regrets in nats, by file name, and the trial's results with its number of tokens."""

    plans: Mapping[str, Plan]
    regrets: Mapping[str, float | None]
    planner: Planner
    tried: Sequence[Tried] = ()
    tokens: int = 0

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows of a table, one row per plan."""
        predictions, rows = Predictions.of(self.planner.stats), []
        for name, plan in self.plans.items():
            regret, trial = self.regrets[name], plan.trial
            rows.append([
                name, f"{plan.achieved:.1%}", f"{predictions.total_loss_divergence(plan.linears):.2e}",
                "-" if regret is None else f"{regret:.1e}", shown(trial.increase, trial.error) if trial else "-",
                str(sum(saving(p) == 0 for p in plan.linears.values())),
            ])  # fmt: skip
        return ["plan", "in FP4", "predicted (nats)", "regret", "measured (nats)", "linears without FP4"], rows

    def curve(self) -> list[Section]:
        """The measured curve; empty without a trial."""
        if not self.tried:
            return []
        points = points_of(self.tried, Predictions.of(self.planner.stats), self.planner.saved_by)
        text = f"{where_it_breaks(points)} Measured on {self.tokens:,} tokens that the probe did not read."
        return [Section("Measured curve", text, [measured_curve(points, WHAT[self.planner.choices.measure])])]


def plan_and_try(config: Config, each: Sequence[Statistics], shares: Sequence[float], trials: Trials | None) -> Planned:
    """Plan for each share, and try the plans if ``trials`` is given.  Every rank must call it.

    each: statistics of single batches.  May raise TrialFailed, on every rank.
    """
    stats, snip, tried, tokens = Statistics.mean(each), config.snip, [], 0
    planner, plans = planner_of(config.replace(snip_target=0.0), stats), plans_of(config, stats, shares)
    regrets = {name: regret(config, stats, plan, each) for name, plan in plans.items()}
    if trials is not None and snip.snip_max_loss is not None:
        tried, tokens = try_as_a_run(planner, planner.solve("snip"), trials), trials.tokens
        if (best := with_record(tried, tokens)) is None:
            raise TrialFailed("no plan has a finite loss")
        plans, regrets = {"plan": best}, {"plan": regret(config, stats, best, each)}
    elif trials is not None:
        tried, tokens = try_along(planner, shares, trials), trials.tokens
        plans = {name: best_for(plan, planner, tried, tokens) for name, plan in plans.items()}
    return Planned(plans, regrets, planner, tried, tokens)


def regret(config: Config, stats: Statistics, plan: Plan, each: Sequence[Statistics]) -> float | None:
    """`Planner.regret` of the solver's plan for a target."""
    return planner_of(config.replace(snip_target=plan.target, snip_max_loss=None), stats).regret(plan, each)
