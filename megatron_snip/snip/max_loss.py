"""--snip-max-loss NATS: find the largest share whose measured increase of the loss stays below NATS.

    target 0                 taken if no other plan stays below
    the highest target       taken if it stays below
    then by bisection        halfway between the largest target that stays below and the next one that does not

Every plan is the solver's for its target.  A plan stays below if its increase plus ``CERTAIN`` standard errors does,
or its prediction plus as many where it measures less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearShape
from megatron_snip.snip.frontier import RESOLUTION, AlongFrontier
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.trial import Proposals, Propose, Tried, first_plans, stays_below

#: BF16, the plan that saves nothing, and one that saves.
LEAST_PASSES = 3


def check_max_loss(snip: SnipConfig) -> None:
    """Raise UserError for a --snip-max-loss with too few trials to measure anything."""
    if snip.snip_max_loss is not None and snip.snip_trials < LEAST_PASSES:
        raise UserError(
            f"--snip-max-loss {snip.snip_max_loss:g} needs trials, and --snip-trials is "
            f"{snip.snip_trials}; give {LEAST_PASSES} or more, or --snip-target instead of --snip-max-loss"
        )


def halved(found: Mapping[float, Tried], nats: float) -> float | None:
    """The next target of the bisection, or None if the interval is small enough."""
    below = {target: stays_below(one, nats) for target, one in found.items()}
    low = max((target for target, good in below.items() if good), default=0.0)
    high = min((target for target, good in below.items() if not good and target > low), default=low)
    return (low + high) / 2 if high - low > RESOLUTION else None


def proposals(
    pending: Pending, solved: Plan, shapes: Sequence[LinearShape], hardware: str, in_force: Plan | None
) -> Propose:
    """Rank 0's proposals; ``solved`` is the solver's plan for the pending request."""
    plan_of = partial(pending.plan_of, shapes=shapes, hardware=hardware)
    request, options = pending.request, pending.precisions
    if pending.max_loss is not None:
        following = partial(halved, nats=pending.max_loss)
        return AlongFrontier(request, plan_of, (0.0, request.target), following)
    first = partial(first_plans, solved, request, shapes, options, plan_of, in_force)
    return Proposals(first, request, shapes, options, plan_of)


def judgement(tried: Sequence[Tried], nats: float | None) -> str:
    """What the plan that was taken is, for a line in the log."""
    if nats is None:
        return "best"
    stays = any(stays_below(one, nats) for one in tried if one.taken)
    return f"the largest below {nats:g} nats" if stays else f"taken, as no plan stays below {nats:g} nats"
