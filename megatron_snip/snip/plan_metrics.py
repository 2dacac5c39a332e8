"""Statistics, plans and trials in metrics.jsonl, wandb and TensorBoard; docs/run_folder.md lists the keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import GemmTimes, achieved, by_stage
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions, loss_divergence, weight_divergence
from megatron_snip.snip.predict.sampling import cost_error, top_token
from megatron_snip.snip.trial import Tried

LOGGER = logging.getLogger("megatron_snip")
Metrics = dict[str, Any]


def divergence_metrics(stats: Statistics, options: Sequence[LinearPrecision]) -> Metrics:
    """Divergences of the most costly option, summed over each block and each kind of linear."""
    metrics: Metrics = {"snip/non_finite_linears": len(stats.not_finite)}
    kinds = {"loss_divergence": loss_divergence}
    if stats.has_updates:
        kinds["weight_divergence"] = weight_divergence
    for name, function in kinds.items():
        values = np.nan_to_num(function(stats, options).max(axis=1))
        for shape, value in zip(stats.shapes, values.tolist(), strict=True):
            for group in (f"block_{shape.block:02d}", shape.kind):
                key = f"snip/{name}/{group}"
                metrics[key] = metrics.get(key, 0.0) + value
    return metrics


def sampling_metrics(
    stats: Statistics, options: Sequence[LinearPrecision], request: SolveRequest, tokens: int
) -> Metrics:
    """How well a probe's tokens determine the plan's cost, and the largest share of a linear's that one token has."""
    shares = np.nan_to_num(top_token(stats, options).max(axis=1))
    row, error = int(shares.argmax()), cost_error(stats, options, request)
    known = "" if error is None else f"the plan's cost is known within {error:.1%}; "
    LOGGER.info(
        f"iteration {stats.iteration}: probe of {tokens} tokens: {known}top token: {shares[row]:.1%} of the loss "
        f"divergence of {stats.names[row]}"
    )
    found = {} if error is None else {"snip/cost_error": error}
    return {"snip/probe_tokens": tokens, "snip/top_token": float(shares[row]), **found}


def plan_metrics(
    plan: Plan, shapes: Sequence[LinearShape], measure: str, times: GemmTimes, churn: float, plans: int
) -> Metrics:
    """A plan that takes effect, the run's plan number ``plans``; measure and times: of what it saves."""
    return {
        "snip/achieved": achieved(shapes, plan.linears),
        "snip/target": plan.target,
        **modelled_metrics(plan, shapes, measure, times),
        "snip/objective": plan.solver.objective,
        "snip/bound": plan.solver.bound,
        "snip/gap": plan.solver.gap,
        "snip/solver_seconds": plan.solver.seconds,
        "snip/churn": churn,
        "snip/plans_made": plans,
        "snip/solve_failed": 0,
    }


def predicted_metrics(predictions: Predictions | None, linears: Mapping[str, LinearPrecision]) -> Metrics:
    """What the last statistics predict for these precisions; what is not known is left out."""
    if predictions is None:
        return {}
    totals = {
        "snip/predicted_loss_divergence": predictions.total_loss_divergence(linears),
        "snip/predicted_weight_divergence": predictions.total_weight_divergence(linears),
    }
    return {name: value for name, value in totals.items() if value is not None}


def modelled_metrics(plan: Plan, shapes: Sequence[LinearShape], measure: str, times: GemmTimes) -> Metrics:
    """Savings in the target's unit; per stage, FP4 share and modelled time relative to everything in BF16."""
    metrics: Metrics = {"snip/gemm_times": times.hardware}
    try:
        found = by_stage(shapes, plan.linears, times)
        metrics["snip/saved"] = achieved(shapes, plan.linears, measure, times)
    except ValueError as error:  # a resumed run's plan may have formats that its table lacks
        LOGGER.warning(f"iteration {plan.iteration}: no modelled times: {error}")
        return metrics
    metrics["snip/modelled_time"] = sum(taken for _, taken in found.values())
    for stage, (share, taken) in found.items() if len(found) > 1 else ():
        metrics |= {f"snip/stage_{stage}/achieved": share, f"snip/stage_{stage}/modelled_time": taken}
    return metrics


def trial_metrics(tried: Sequence[Tried], tokens: int, passes: int, seconds: float) -> Metrics:
    """Measured and predicted results of a trial, for the best plan and for plans with their own name."""
    metrics: Metrics = {
        "snip/trial_passes": passes, "snip/trial_tokens": tokens, "snip/trial_seconds": seconds,
    }  # fmt: skip
    for one in tried:
        if one.taken:
            metrics |= {
                "snip/trial_name": one.name,
                "snip/trial_increase": one.increase,
                "snip/trial_increase_standard_error": one.error,
                "snip/trial_predicted": one.predicted,
            }
        if " " not in one.name and np.isfinite(one.increase):
            metrics |= {f"snip/trial/{one.name}": one.increase, f"snip/trial_predicted/{one.name}": one.predicted}
    return {key: value for key, value in metrics.items() if value is not None}
