"""Plans to fall back to: one that was in force before without trouble, or the base option for all linears.

Nobody solves for them: a plan's own `objective` says what it is, and its hash is new, since it holds from another
iteration than the one that it repeats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.options import Choices
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.objectives import base_option

Linears = Mapping[str, LinearPrecision]


def linears_of(history: Sequence[Mapping[str, Any]], names: Collection[str]) -> list[Linears | None]:
    """What each plan of a history held, from what each of them changed; None where that is not known in full."""
    held: dict[str, LinearPrecision] = {}
    out: list[Linears | None] = []
    for entry in history:
        held = {**held, **{name: LinearPrecision.parse(text) for name, text in entry["changed"].items()}}
        out.append(held if held.keys() == set(names) else None)
    return out


def plan_before(
    history: Sequence[Mapping[str, Any]], shapes: Sequence[LinearShape], blamed: Collection[str], iteration: int
) -> Plan | None:
    """The last plan of the history whose precisions were never blamed, to hold from `iteration` on; None without one.

    blamed: hashes of the plans that were in force when the loss broke.
    """
    held = linears_of(history, [shape.name for shape in shapes])
    bad = [linears for entry, linears in zip(history, held, strict=True) if entry["hash"] in blamed]
    for entry, linears in zip(reversed(history), reversed(held), strict=True):
        if linears is not None and linears not in bad:
            return _plan(linears, shapes, iteration, f"guard: plan of iteration {entry['iteration']}")
    return None


def base_plan(choices: Choices, shapes: Sequence[LinearShape], iteration: int) -> Plan:
    """FP8, or the first option where FP8 is none, from `iteration` on for all linears that are not fixed to another."""
    base = choices.free[base_option(choices.free)]
    linears = {
        shape.name: choices.options[option] if option >= 0 else base
        for shape, option in zip(shapes, choices.fixed.tolist(), strict=True)
    }
    return _plan(linears, shapes, iteration, f"guard: {base}")


def _plan(linears: Linears, shapes: Sequence[LinearShape], iteration: int, objective: str) -> Plan:
    share = Plan(iteration, linears).fp4_share(shapes)
    return Plan(iteration, linears, objective, share, share)
