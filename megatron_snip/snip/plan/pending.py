"""A solve under way: what was asked, for when, and what an answer means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.options import measure_of
from megatron_snip.snip.plan.plan_file import Plan, build_plan
from megatron_snip.snip.plan.solver import SolveRequest


@dataclass(frozen=True)
class Pending:
    """A solve under way, known to every process."""

    probed: int  # iteration before which statistics were taken
    due: int  # iteration from which its plan is to hold
    options: tuple[str, ...]  # what the matrices' columns stand for
    objective: str
    request: SolveRequest
    max_loss: float | None = None  # --snip-max-loss: the request's target is then the most that can be reached

    @property
    def precisions(self) -> list[LinearPrecision]:
        """The options; those of a resumed run may be others."""
        return [LinearPrecision.parse(option) for option in self.options]

    def plan_of(self, solution: Solution, shapes: Sequence[LinearShape], hardware: str) -> Plan:
        """The plan of a solution to the request.  hardware: whose GEMM times its efficiencies are of."""
        options, reserved = self.precisions, self.request.reserved
        free = [option for i, option in enumerate(options) if reserved is None or not reserved[i]]
        return build_plan(
            solution, shapes, options, iteration=self.due, objective=self.objective, target=self.request.target,
            measure=measure_of(free), gemm_times=hardware,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for a checkpoint."""
        return {**vars(self), "options": list(self.options), "request": self.request.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pending:
        """The value that `to_dict` wrote."""
        request = SolveRequest.from_dict(values["request"])
        asked = values["objective"], request, values.get("max_loss")
        return cls(values["probed"], values["due"], tuple(values["options"]), *asked)
