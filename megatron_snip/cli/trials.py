"""Trials outside a run, with a checkpoint's weights, on sequences after those that its probe reads."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial

from megatron_snip import runtime
from megatron_snip.cli.collect_stats import Batches
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.snip.frontier import AlongFrontier, refined
from megatron_snip.snip.max_loss import check_max_loss, proposals
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.planner import Planner, pending_of
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.trial import CERTAIN, Proposal, Propose, Trials, Tried, samples_of, try_plan, with_record
from megatron_snip.train.setup import Parts

LOGGER = logging.getLogger("megatron_snip")


def trial_samples(config: Config) -> int:
    """Number of sequences for --snip-trial-tokens, rounded up to full microbatches and pipeline stages."""
    together = config.training.micro_batch_size * config.data_parallel_size(runtime.environment_world_size())
    stages = config.parallel.pipeline_model_parallel_size
    return samples_of(config.snip.snip_trial_tokens, config.model.seq_length, together, stages)


def check_trials(config: Config, option: str) -> None:
    """Raise UserError if --snip-trials is too small to measure a plan.  option: the option that needs trials."""
    check_max_loss(config.snip)
    if config.snip.snip_trials < 2:
        raise UserError(f"{option} runs BF16 and plans, and --snip-trials is {config.snip.snip_trials}; give 2 or more")


def make_trials(config: Config, parts: Parts, batch: Batches, ahead: int, iteration: int) -> Trials:
    """Trials on data from the batch ``ahead`` on.  Every rank must call it.  May raise TrialFailed."""
    assert parts.coordinator is not None
    run = parts.stepper.trial_runner(batch(ahead, trial_samples(config)), iteration)
    return Trials(run, parts.linears, parts.mesh, parts.coordinator.probe.device)


def asked_of(planner: Planner) -> Pending:
    """The solve that a run would start with these statistics."""
    snip = planner.config.snip
    return pending_of(snip, planner.choices, planner.request(snip.snip_objective), planner.stats.iteration)


def try_as_a_run(planner: Planner, solved: Plan, trials: Trials) -> list[Tried]:
    """Run the trial that a run would run before ``solved`` takes effect."""
    pending, passes = asked_of(planner), planner.config.snip.snip_trials
    propose = proposals(pending, solved, planner.shapes, planner.times.hardware, None)
    known = Predictions.of(planner.stats)
    return try_plan(trials, _told(propose, passes), passes, solved, known, pending.max_loss)[0]


def try_along(planner: Planner, shares: Sequence[float], trials: Trials) -> list[Tried]:
    """Try plans on the frontier: the given shares, both ends, and more where the curve is steep."""
    pending, passes = asked_of(planner), planner.config.snip.snip_trials
    plan_of = partial(pending.plan_of, shapes=planner.shapes, hardware=planner.times.hardware)
    first = [*shares, pending.request.most(), 0.0]
    return trials.run(_told(AlongFrontier(pending.request, plan_of, first, refined), passes), passes)


def _told(propose: Propose, passes: int) -> Propose:
    """``propose``, with a line in the log for each plan that was run."""

    def telling(tried: Sequence[Tried]) -> Proposal | None:
        if tried:
            last = tried[-1]
            LOGGER.info(
                f"pass {len(tried) + 1} of {passes} at most: {last.name}, {last.increase:.4g} +- {last.error:.2g} nats "
                "above BF16"
            )
        return propose(tried)

    return telling


def best_for(plan: Plan, planner: Planner, tried: Sequence[Tried], tokens: int) -> Plan:
    """The plan with its measurement; or a plan that saves as much and measures better, beyond errors.

    Returns the plan unchanged if it was not tried, or if no plan that saves as much has a finite loss.
    """
    own = next((one for one in tried if one.plan.linears == plan.linears), None)
    if own is None:
        return plan
    enough = [one for one in tried if one.is_finite and planner.saved_by(one.plan) >= planner.saved_by(plan) - 1e-9]
    least = own.increase - CERTAIN * own.error
    better = [one for one in enough if not own.is_finite or least > one.increase + CERTAIN * one.error]
    best = min(better, key=lambda one: one.increase, default=own)
    found = with_record([dataclasses.replace(one, taken=one is best and one.is_finite) for one in tried], tokens)
    return plan if found is None else dataclasses.replace(found, target=plan.target)
