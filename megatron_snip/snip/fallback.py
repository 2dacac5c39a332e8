"""Fallback plans: an earlier plan that ran without trouble, or the base option for all linears.

They need no solve.  A plan's `objective` says how it was made.  Its hash differs from that of the plan it repeats,
because it takes effect at another iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.options import Choices
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.objectives import base_option

Linears = Mapping[str, LinearPrecision]


def linears_of(history: Sequence[Mapping[str, Any]], names: Collection[str]) -> list[Linears | None]:
    """The linears of each plan in a history of changes; None for a plan that is only partly known."""
    held: dict[str, LinearPrecision] = {}
    out: list[Linears | None] = []
    for entry in history:
        held = {**held, **{name: LinearPrecision.parse(text) for name, text in entry["changed"].items()}}
        out.append(held if held.keys() == set(names) else None)
    return out


def plan_before(
    history: Sequence[Mapping[str, Any]],
    shapes: Sequence[LinearShape],
    blamed: Collection[str],
    iteration: int,
    final: Final | None = None,
) -> Plan | None:
    """The last plan of the history whose precisions were never blamed, effective from `iteration`; None if there is
    none.

    blamed: hashes of the plans in force when the loss broke.  final: the late switch, which holds for this plan, too.
    """
    held = linears_of(history, [shape.name for shape in shapes])
    if final is not None:
        held = [linears and final.linears(linears, iteration) for linears in held]
    bad = [linears for entry, linears in zip(history, held, strict=True) if entry["hash"] in blamed]
    for entry, linears in zip(reversed(history), reversed(held), strict=True):
        if linears is not None and linears not in bad:
            objective = f"guard: plan of iteration {entry['iteration']}"
            return Plan.by_hand(linears, shapes, iteration=iteration, objective=objective)
    return None


def base_plan(choices: Choices, shapes: Sequence[LinearShape], iteration: int, final: Final | None = None) -> Plan:
    """The base option from `iteration` on for all linears that are not fixed.

    final: the late switch, which holds for this plan, too.
    """
    base = choices.free[base_option(choices.free)]
    linears: Linears = {
        shape.name: choices.options[option] if option >= 0 else base
        for shape, option in zip(shapes, choices.fixed.tolist(), strict=True)
    }
    linears = linears if final is None else final.linears(linears, iteration)
    return Plan.by_hand(linears, shapes, iteration=iteration, objective=f"guard: {base}")
