"""A plan's JSON object edited by hand, one mistake at a time, and what the error must say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_snip.quant import GEMMS, LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan

Edit = tuple[str, dict[str, Any], str]  # name, edited object, part of the error

_NUMBERS = (None, "0.5", True, [], {}, float("nan"), float("inf"), 10**400)
_WRONG: dict[str, tuple[Any, ...]] = {
    "version": (None, "2", 0, 1, 3, True),
    "iteration": (None, "7", 1.5, True, -1, []),
    "target": (*_NUMBERS, 75, -0.5),
    "achieved": (*_NUMBERS, 75, -0.5),
    **dict.fromkeys(("objective", "hash", "gemm_times", "target_unit"), (None, 3, True, [], {})),
    **dict.fromkeys(("linears", "solver"), (None, "fp4", 3, [])),
    "trial": ("fp4", 3, [], True),
}
_WRONG_OF_SOLVER = {"status": (None, 3, [])} | dict.fromkeys(("objective", "bound", "gap", "seconds"), _NUMBERS)


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy that lacks one key."""
    return {k: v for k, v in values.items() if k != key}


def _fields(values: dict[str, Any], wrong: dict[str, tuple[Any, ...]], where: str = "") -> Iterator[Edit]:
    """Each field missing and of each wrong type, and one that is unknown."""
    assert values.keys() == wrong.keys(), "a field has no case"
    for field in values:
        yield f"no {where}{field}", without(values, field), f"field {where}{field} is missing"
        for value in wrong[field]:
            shown = f"{value!r:.12}"
            yield f"{where}{field} {shown}", {**values, field: value}, f"field {where}{field} is {shown}"
    yield f"unknown {where}", {**values, "note": 1}, f"field {where}note is unknown"


def _entries(entry: dict[str, str], name: str) -> Iterator[tuple[str, Any, str]]:
    """One linear's formats."""
    where = f"linears[{name!r}]"
    for value in (None, "fp4", ["fp4"] * 3):
        yield f"linear {value!r}", value, f"field {where} is {value!r}: expected object, got "
    wrong = dict.fromkeys(GEMMS, (None, 4, ["fp4"], {}))
    yield from _fields(entry, wrong, f"{where}.")
    for gemm in GEMMS:
        for fmt in ("fp5", "FP4", "", "fp4/fp8"):
            yield f"{gemm} {fmt!r}", {**entry, gemm: fmt}, f"field {where}: {gemm}: unknown format {fmt!r}"


def _rehashed(values: dict[str, Any]) -> dict[str, Any]:
    """The object with the hash that belongs to it, as somebody may work it out."""
    linears = {name: LinearPrecision(**entry) for name, entry in values["linears"].items()}
    return {**values, "hash": Plan(values["iteration"], linears).hash}


def edits(plan: Plan) -> Iterator[Edit]:
    """Edits that `Plan.load` must refuse."""
    values = json.loads(json.dumps(plan.to_dict()))
    linears, name = values["linears"], next(iter(plan.linears))
    yield from _fields(values, _WRONG)
    for what, solver, said in _fields(values["solver"], _WRONG_OF_SOLVER, "solver."):
        yield what, {**values, "solver": solver}, said
    for what, entry, said in _entries(linears[name], name):
        yield what, {**values, "linears": {**linears, name: entry}}, said
    stale = f"field hash is {values['hash']!r}, but iteration and linears give "
    yield "another hash", {**values, "hash": "0" * 16}, "field hash is '0000000000000000', but"
    yield "another iteration", {**values, "iteration": plan.iteration + 1}, stale
    for what, changed, _ in wrong_linears(plan):
        yield f"{what}, hash as before", {**changed, "hash": values["hash"]}, stale
    for gemm in GEMMS:
        yield f"another {gemm}", {**values, "linears": {**linears, name: {**linears[name], gemm: "nvfp4_plain"}}}, stale


def wrong_linears(plan: Plan) -> Iterator[Edit]:
    """Edits with the hash worked out anew: whole plans, but of another model."""
    values = json.loads(json.dumps(plan.to_dict()))
    linears, name = values["linears"], next(iter(plan.linears))
    for what, changed, said in (
        ("a linear left out", without(linears, name), f"leaves out linears: {name};"),
        ("a linear too many", {**linears, "layers.99.mlp.up_proj": linears[name]}, "names no such linear: layers.99."),
        ("a misspelt name", {**without(linears, name), f"{name}_": linears[name]}, f"no such linear: {name}_;"),
        ("no linears", {}, "leaves out linears: "),
    ):
        yield what, _rehashed({**values, "linears": changed}), said
