"""The late switch (--snip-final-precision): a run's last iterations in another precision, GEMM by GEMM.

    bf16/plan/plan    fprop in BF16, dgrad and wgrad in the formats that each linear has by then

Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), app. D: most of the cost of FP4 comes
from fprop, and a switch of fprop alone to BF16 recovers most of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_snip.errors import UserError
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.plan.plan_file import Plan

#: Stands for the format that a GEMM has already.
PLANNED = "plan"


@dataclass(frozen=True)
class Final:
    """The precision of all linears from iteration ``start`` on: a format for each GEMM, or PLANNED."""

    start: int
    gemms: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, start: int) -> Final:
        """Read "FORMAT" or "FPROP/DGRAD/WGRAD", where a format may be "plan".  Raises UserError for anything else."""
        words = text.split("/")
        try:
            LinearPrecision.parse("/".join("bf16" if word == PLANNED else word for word in words))
        except UserError as error:
            raise UserError(f"--snip-final-precision {text}: {error}; {PLANNED} keeps a GEMM as planned") from None
        gemms = tuple(words * len(GEMMS) if len(words) == 1 else words)
        if set(gemms) == {PLANNED}:
            raise UserError(f"--snip-final-precision {text} changes nothing; name a format, as in bf16/plan/plan")
        return cls(start, gemms)

    def __str__(self) -> str:
        return self.gemms[0] if len(set(self.gemms)) == 1 else "/".join(self.gemms)

    @property
    def formats(self) -> set[str]:
        """The formats that it names."""
        return set(self.gemms) - {PLANNED}

    @property
    def plans_fprop(self) -> bool:
        """Whether fprop keeps its planned format.  Plans weigh fprop's errors."""
        return self.gemms[0] == PLANNED

    def of(self, precision: LinearPrecision) -> LinearPrecision:
        """The precision after the switch of a linear that now has this one.  Applying it twice changes nothing more."""
        now = [getattr(precision, gemm) for gemm in GEMMS]
        return LinearPrecision(*(old if word == PLANNED else word for word, old in zip(self.gemms, now)))

    def hash(self, before: str | None) -> str:
        """In place of a plan's hash after the switch, without a planner.  before: the hash of the plan, if any."""
        return hashlib.sha256(f"{before} {self}".encode()).hexdigest()[:16]

    def linears(self, planned: Mapping[str, LinearPrecision], iteration: int) -> Mapping[str, LinearPrecision]:
        """The precisions in an iteration of linears that are planned to have these."""
        return {name: self.of(one) for name, one in planned.items()} if iteration >= self.start else planned

    def plan(self, plan: Plan, shapes: Sequence[LinearShape], iteration: int) -> Plan:
        """The plan after the switch, effective from this iteration.  Before the switch, the plan itself."""
        linears = self.linears(plan.linears, iteration)
        if linears == plan.linears:
            return plan
        return replace(plan, iteration=iteration, linears=linears, achieved=achieved(shapes, linears), trial=None)
