"""A solve in progress: its request, the iteration at which its plan is due, and how to read its solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.plan_file import Plan, build_plan
from megatron_snip.snip.plan.solver import SolveRequest


@dataclass(frozen=True)
class Pending:
    """A solve in progress, known to every rank."""

    probed: int  # iteration before which statistics were taken
    due: int  # iteration at which its plan takes effect
    options: tuple[str, ...]  # columns of the matrices
    objective: str
    request: SolveRequest
    measure: str  # unit of the request's target, a key of MEASURES
    max_loss: float | None = None  # --snip-max-loss: the request's target is then the most that can be reached

    @property
    def precisions(self) -> list[LinearPrecision]:
        """The options, which in a resumed run may differ from its own."""
        return [LinearPrecision.parse(option) for option in self.options]

    def plan_of(self, solution: Solution, shapes: Sequence[LinearShape], hardware: str) -> Plan:
        """The plan from a solution.  hardware: name of the GEMM times behind its efficiencies."""
        return build_plan(
            solution, shapes, self.precisions, iteration=self.due, objective=self.objective,
            target=self.request.target, measure=self.measure, gemm_times=hardware,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for a checkpoint."""
        return {**vars(self), "options": list(self.options), "request": self.request.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pending:
        """Read the value from `to_dict`."""
        request = SolveRequest.from_dict(values["request"])
        asked = values["objective"], request, values["measure"], values["max_loss"]
        return cls(values["probed"], values["due"], tuple(values["options"]), *asked)
