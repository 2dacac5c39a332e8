"""Trials along the frontier: the solver's plans for several targets; each result decides the next target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.trial import Proposal, Tried

#: Smallest distance between two targets.
RESOLUTION = 0.01
#: Target -> the plan tried for it; returns the next target, or None to stop.
Next = Callable[[Mapping[float, Tried]], float | None]


class AlongFrontier:
    """Rank 0's proposals: plans of one request for several targets, none twice.

    plan_of: solution -> plan.  first: the first targets.  following: the targets after them.
    """

    def __init__(
        self, request: SolveRequest, plan_of: Callable[[Solution], Plan], first: Sequence[float], following: Next
    ) -> None:
        self._request, self._plan_of, self._first, self._following = request, plan_of, first, following
        self._plans: dict[float, Plan] = {}  # by target

    def __call__(self, tried: Sequence[Tried]) -> Proposal | None:
        """The next plan, or None to stop."""
        found = {one.plan.target: one for one in tried}
        while True:
            target = next((target for target in self._first if target not in found), None)
            if target is None and (target := self._following(found)) is None:
                return None
            plan = self._plan(target)
            same = next((one for one in tried if one.plan.linears == plan.linears), None)
            if same is None:
                return Proposal(f"target {100 * target:.4g}%", plan)
            found[target] = same

    def _plan(self, target: float) -> Plan:
        if target not in self._plans:
            solution = dataclasses.replace(self._request, target=target).solve()
            self._plans[target] = dataclasses.replace(self._plan_of(solution), target=target)
        return self._plans[target]


def refined(found: Mapping[float, Tried]) -> float | None:
    """The middle of the two neighbours on the curve that span the largest area of share times loss."""
    gaps = [(low, high) for low, high in pairwise(sorted(found)) if high - low > RESOLUTION]
    if not gaps:
        return None

    def area(gap: tuple[float, float]) -> float:
        rise = found[gap[1]].increase - found[gap[0]].increase
        return (gap[1] - gap[0]) * (abs(rise) if math.isfinite(rise) else math.inf)

    low, high = max(gaps, key=lambda gap: (area(gap), gap[1] - gap[0]))
    return (low + high) / 2
