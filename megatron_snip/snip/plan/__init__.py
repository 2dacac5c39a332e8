"""From quality losses to a plan: options and their savings, the integer program and its process, the plan file.

Plan is imported lazily (PEP 562): it needs torch, and the solver's process, which imports ``ilp`` from this package,
must start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_snip.snip.plan.plan_file import Plan as Plan

__all__ = ["Plan"]


def __getattr__(name: str) -> Any:
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_snip.snip.plan.plan_file import Plan

    return Plan
