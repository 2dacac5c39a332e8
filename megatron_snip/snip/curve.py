"""The measured curve: measured and predicted loss of plans of rising shares, and where the curve breaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.trial import CERTAIN, Tried

#: A step has at least this part of the curve's loss, and at most this range of its share.
STEEP, WIDE = 0.1, 0.1001
_ROUNDING = 1e-6  # nats: rounding of float32 losses


@dataclass(frozen=True)
class Point:
    """A plan that was run: its share of savings in the target's unit, and its loss above BF16's in nats.

    predicted: the sum over single linears, None if a format was not measured.  increase and its standard error: NaN if
    the loss is not finite.
    """

    share: float
    predicted: float | None
    increase: float
    error: float


def points_of(
    tried: Sequence[Tried], predictions: Predictions | None, share: Callable[[Plan], float] = lambda plan: plan.target
) -> list[Point]:
    """The plans of a trial as points, by rising share.

    share: what a plan saves; by default its target.
    """
    found = []
    for one in tried:
        predicted = None if predictions is None else predictions.total_loss_divergence(one.plan.linears)
        found.append(Point(share(one.plan), predicted, one.increase, one.error))
    return sorted(found, key=lambda point: point.share)


def where_it_breaks(points: Sequence[Point]) -> str:
    """One sentence on a curve: its steepest step, and where sums over single linears predict too little.

    A curve breaks at a step that costs more than all steps before it, beyond its error, and at least STEEP of the whole
    curve.  Of several such steps, it is the one that exceeds the steps before it by most.  A step goes from a point to
    the next one, or spans at most WIDE of share.
    """
    if not points:
        return "Nothing was measured."
    if bad := next((point for point in points if not math.isfinite(point.increase)), None):
        return f"The curve breaks at {bad.share:.1%}: the loss is not finite."
    over = next((point for point in points if _exceeds(point)), None)
    fails = ""
    if over is not None:
        measured = f"{over.increase:.3g} +- {over.error:.1g} nats measured"
        fails = f"{measured} are more than the {over.predicted:.3g} predicted"
    first = points[0]
    whole = max(point.increase for point in points) - first.increase
    near = [(a, b) for a, b in combinations(points[1:], 2) if b.share - a.share <= WIDE]
    steps = [(a, b) for a, b in (*pairwise(points[1:]), *near) if b.increase - a.increase > STEEP * whole]
    before, after = max(steps, key=lambda step: _excess(first, *step), default=(first, first))
    if _excess(first, before, after) > 0:
        step, rest = after.increase - before.increase, before.increase - first.increase
        said = f"The curve breaks at {after.share:.1%}: the step from {before.share:.1%} costs {step:.3g} nats, "
        said += f"and all before {rest:.3g}"
        return f"{said}; at {over.share:.1%} {fails}." if over is not None else f"{said}."
    if over is not None:
        return f"The curve breaks at {over.share:.1%}, where {fails}."
    return "The curve does not break: each plan costs what was predicted or less, and no step more than all before."


def _exceeds(point: Point) -> bool:
    return point.predicted is not None and point.increase > point.predicted + CERTAIN * point.error + _ROUNDING


def _excess(first: Point, before: Point, after: Point) -> float:
    """Nats by which a step costs more than all steps before it; 0 if that is within its error."""
    excess = (after.increase - before.increase) - max(0.0, before.increase - first.increase)
    error = math.sqrt(first.error**2 + 4 * before.error**2 + after.error**2)
    return excess if excess > CERTAIN * error + _ROUNDING else 0.0
