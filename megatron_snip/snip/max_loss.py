"""--snip-max-loss: the plan of the largest share whose measured increase of the loss stays below so many nats.

    the plan of no saving    taken if nothing else stays below
    the plan of the most     taken if it stays below
    then by bisection        halfway between the largest target that stays below and the next one tried that does not

Every plan is the solver's for its target.  A plan stays below if its increase plus ``CERTAIN`` standard errors does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearShape
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.trial import CERTAIN, Proposal, Proposals, Propose, Tried, first_plans

#: Targets nearer to each other than this are not told apart.
RESOLUTION = 0.01
#: BF16, the plan of no saving, and one that saves.
LEAST_PASSES = 3


def check_max_loss(snip: SnipConfig) -> None:
    """UserError for a --snip-max-loss that nothing would measure."""
    if snip.snip_max_loss is not None and snip.snip_trials < LEAST_PASSES:
        raise UserError(
            f"--snip-max-loss {snip.snip_max_loss:g} is about what trials measure, and --snip-trials is "
            f"{snip.snip_trials}; give {LEAST_PASSES} or more, or --snip-target in place of --snip-max-loss"
        )


def stays_below(one: Tried, nats: float) -> bool:
    """Whether the increase is below so many nats beyond doubt; one that is not finite is not."""
    return one.increase + CERTAIN * one.error < nats


class Bisection:
    """What rank 0 proposes: plans of one request for other and other targets, by what the ones before measured.

    request: its target is the most that can be reached.  plan_of: the plan of a solution.
    """

    def __init__(self, request: SolveRequest, plan_of: Callable[[Solution], Plan], nats: float) -> None:
        self._request, self._plan_of, self._nats = request, plan_of, nats
        self._plans: dict[float, Plan] = {}  # by target

    def __call__(self, tried: Sequence[Tried]) -> Proposal | None:
        """The next plan; None if targets are as near as they need be."""
        below = {one.plan.target: stays_below(one, self._nats) for one in tried}
        for target in (0.0, self._request.target):
            if target not in below:
                if (proposal := self._proposal(target, tried)) is not None:
                    return proposal
                below[target] = self._known(target, tried)
        while True:
            low = max((target for target, good in below.items() if good), default=0.0)
            high = min((target for target, good in below.items() if not good and target > low), default=low)
            if high - low <= RESOLUTION:
                return None
            target = (low + high) / 2
            if (proposal := self._proposal(target, tried)) is not None:
                return proposal
            below[target] = self._known(target, tried)

    def _proposal(self, target: float, tried: Sequence[Tried]) -> Proposal | None:
        """The plan of a target, None if it was tried."""
        if target not in self._plans:
            solution = dataclasses.replace(self._request, target=target).solve()
            self._plans[target] = dataclasses.replace(self._plan_of(solution), target=target)
        plan = self._plans[target]
        if any(one.plan.linears == plan.linears for one in tried):
            return None
        return Proposal(f"target {100 * target:.4g}%", plan)

    def _known(self, target: float, tried: Sequence[Tried]) -> bool:
        """Whether the plan of a target, which another target's trial was of, stays below."""
        linears = self._plans[target].linears
        return stays_below(next(one for one in tried if one.plan.linears == linears), self._nats)


def proposals(
    pending: Pending, solved: Plan, shapes: Sequence[LinearShape], hardware: str, in_force: Plan | None, seed: int
) -> Propose:
    """What rank 0 proposes where ``solved`` is the solver's plan of what is pending."""
    plan_of = partial(pending.plan_of, shapes=shapes, hardware=hardware)
    request, options = pending.request, pending.precisions
    if pending.max_loss is not None:
        return Bisection(request, plan_of, pending.max_loss)
    first = partial(first_plans, solved, request, shapes, options, plan_of, in_force, seed)
    return Proposals(first, request, shapes, options, plan_of)


def judgement(best: Plan, nats: float | None) -> str:
    """What a plan that was taken is, for a line in the log."""
    if nats is None:
        return "best"
    assert best.trial is not None
    stays = best.trial.increase + CERTAIN * best.trial.error < nats
    return f"the largest below {nats:g} nats" if stays else f"taken, as no plan stays below {nats:g} nats"


def judged(tried: Sequence[Tried], nats: float | None) -> list[Tried]:
    """What ``Bisection`` tried with one plan taken: the largest that stays below, or the first, of no saving.

    What was tried for a target (nats is None) stays as it is.
    """
    if nats is None:
        return list(tried)
    below = [one for one in tried if stays_below(one, nats)]
    best = max(below, key=lambda one: one.plan.target) if below else next(iter(tried), None)
    return [dataclasses.replace(one, taken=one is best and one.is_finite) for one in tried]
