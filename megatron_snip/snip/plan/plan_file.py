"""A plan: the precision of each linear, the iteration at which it takes effect, and its JSON file.

    {"version": 2, "iteration": 100, "objective": "snip", "target": 0.75, "achieved": 0.751,
     "linears": {"layers.0.self_attn.q_proj": {"fprop": "fp4", "dgrad": "fp4", "wgrad": "fp8"}, ...},
     "solver": {"status": "optimal", "objective": 0.01, "bound": 0.01, "gap": 0.0, "seconds": 0.2},
     "hash": "0123456789abcdef", "gemm_times": "nominal", "target_unit": "FP4 share",
     "trial": {"name": "solver", "increase": 0.012, "error": 0.001, "tokens": 8192, "tried": [...]}}

Source: docs/architecture.md.  Convention: names are Hugging Face's with the global block index.
target_unit is the unit of the target: "FP4 share" of the linears' FLOPs, or "modelled time" saved, relative to the
fastest format everywhere.  achieved is the FP4 share in both cases.
The hash is the first 16 hex digits of the SHA-256 of the canonical JSON (sorted keys, no spaces) of iteration and
linears.  Ranks must agree on these, but not on how the plan was found.
Bound and gap, which the solver proves, are for the sum over single linears.  "trial" holds measurements: the loss above
BF16's in nats and its standard error, for this plan and all others in the trial; null without a trial.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_snip.errors import UserError
from megatron_snip.files.io import shown
from megatron_snip.files.json import (
    Count,
    Finite,
    JsonFileError,
    PlanHash,
    Share,
    Text,
    checked,
    in_file,
    read_json,
    write_atomic,
)
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import MEASURES, achieved, saving
from megatron_snip.snip.plan.ilp import Solution

VERSION = 2
_WAY_OUT = "use a plan that a run or `megatron-snip plan` wrote, or make a new plan (--precision snip)"
#: The order of a sum changes shares a little, and people round them.
_SHARE_TOLERANCE = 1e-4


class SolverRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the solver found a plan; fields of ilp.Solution."""

    status: Text
    objective: Finite
    bound: Finite
    gap: Finite
    seconds: Finite


UNSOLVED = SolverRecord("none", 0.0, 0.0, 0.0, 0.0)


class TriedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan of a trial: its measured and predicted increase of the loss; None if unknown or not finite."""

    name: Text
    increase: Finite | None
    error: Finite | None
    predicted: Finite | None


class TrialRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of a plan in a trial, under ``name``: loss above BF16's and its standard error, in nats.

    tried: every plan in the trial.
    """

    name: Text
    increase: Finite
    error: Finite
    tokens: Count
    tried: list[TriedRecord]

    @property
    def taken(self) -> TriedRecord:
        """The record of the plan that was taken."""
        return next(one for one in reversed(self.tried) if one.name == self.name)


class _Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The formats of a linear's GEMMs in a file."""

    fprop: Text
    dgrad: Text
    wgrad: Text


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan's file; see the module's docstring."""

    version: Count
    iteration: Count
    objective: Text
    target: Share
    achieved: Share
    linears: dict[Text, Any]  # each a _Linear, checked separately so that errors name it
    solver: SolverRecord
    hash: PlanHash
    gemm_times: Text
    target_unit: Text
    trial: TrialRecord | None


@dataclass(frozen=True)
class Plan:
    """Precision of each linear from ``iteration`` on.

    objective: name of the quality objective, or another origin.  target: the requested savings, in target_unit, one of
    MEASURES' values.  achieved: the share of the linears' FLOPs in FP4.  gemm_times: hardware of the GEMM times, or
    "nominal".  trial: measurements before it took effect, if any.
    """

    iteration: int
    linears: Mapping[str, LinearPrecision]
    objective: str = "uniform"
    target: float = 0.0
    achieved: float = 0.0
    solver: SolverRecord = UNSOLVED
    gemm_times: str = "nominal"
    target_unit: str = MEASURES["fp4"]
    trial: TrialRecord | None = None

    @classmethod
    def uniform(
        cls,
        names: Iterable[str],
        precision: LinearPrecision | str,
        *,
        iteration: int = 0,
    ) -> Plan:
        """Every linear in one precision, given directly or as an option string."""
        if isinstance(precision, str):
            precision = LinearPrecision.parse(precision)
        saved = saving(precision)
        return cls(iteration, dict.fromkeys(names, precision), target=saved, achieved=saved)

    @classmethod
    def by_hand(
        cls,
        linears: Mapping[str, LinearPrecision],
        shapes: Sequence[LinearShape],
        *,
        iteration: int = 0,
        objective: str = "by hand",
    ) -> Plan:
        """A plan from given precisions for the linears of ``shapes``; target and achieved are their savings.

        objective: its origin.  Raises UserError if the names do not match.
        """
        saved = cls(iteration, linears).fp4_share(shapes)
        return cls(iteration, linears, objective, saved, saved)

    @property
    def hash(self) -> str:
        """16 hex digits over iteration and linears; see the module's docstring."""
        linears = {name: [getattr(p, gemm) for gemm in GEMMS] for name, p in self.linears.items()}
        content = {"iteration": self.iteration, "linears": linears}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object in the module's docstring."""
        linears = {name: {gemm: getattr(p, gemm) for gemm in GEMMS} for name, p in self.linears.items()}
        return {
            "version": VERSION,
            "iteration": self.iteration,
            "objective": self.objective,
            "target": self.target,
            "achieved": self.achieved,
            "linears": linears,
            "solver": msgspec.structs.asdict(self.solver),
            "hash": self.hash,
            "gemm_times": self.gemm_times,
            "target_unit": self.target_unit,
            "trial": msgspec.to_builtins(self.trial),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "plan") -> Plan:
        """The plan from ``to_dict``.  Raises UserError with ``source``, the field and the way out."""
        with in_file(source, _WAY_OUT):
            if "columns" in values:
                raise JsonFileError("this is a statistics file, not a plan")
            if "frontier" in values:
                raise JsonFileError("this is a table of plans, not a plan")
            found = checked(values, _File, version=VERSION)
            if found.target_unit not in MEASURES.values():
                raise JsonFileError(
                    f"field target_unit is {found.target_unit!r}, but must be one of {', '.join(MEASURES.values())}"
                )
            plan = cls(
                iteration=found.iteration,
                linears={name: _precision(name, entry) for name, entry in found.linears.items()},
                objective=found.objective,
                target=found.target,
                achieved=found.achieved,
                solver=found.solver,
                gemm_times=found.gemm_times,
                target_unit=found.target_unit,
                trial=found.trial,
            )
            if plan.hash != found.hash:
                raise JsonFileError(
                    f"field hash is {found.hash!r}, but iteration and linears give {plan.hash!r}: "
                    "the file is damaged, or was changed by hand (if so, give it that hash)"
                )
        return plan

    def save(self, path: str | Path) -> None:
        """Write the JSON file, atomically; creates missing folders."""
        write_atomic(path, self.to_json())

    def to_json(self) -> str:
        """The text that ``save`` writes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file from ``save``.  Raises UserError with the file, the field and the way out."""
        return cls.from_dict(read_json(path, "plan", _WAY_OUT), str(path))

    def check_names(self, names: Iterable[str], source: str = "") -> None:
        """Raise UserError with ``source``, field and way out, unless the plan names exactly these linears."""
        wanted = set(names)
        where = f"{source}: field linears: " if source else ""
        if unknown := sorted(self.linears.keys() - wanted):
            said = f"plan of iteration {self.iteration} names no such linear: {_listed(unknown)}"
        elif missing := sorted(wanted - self.linears.keys()):
            said = f"plan of iteration {self.iteration} leaves out linears: {_listed(missing)}"
        else:
            return
        raise UserError(f"{where}{said}; give a plan of this model, or this plan's model")

    def check_achieved(self, shapes: Sequence[LinearShape], source: str) -> None:
        """Raise UserError with ``source``, field and way out, unless achieved is the plan's FP4 share."""
        if abs(self.achieved - (share := self.fp4_share(shapes))) > _SHARE_TOLERANCE:
            raise UserError(
                f"{source}: field achieved is {self.achieved!r}, but in a model of these sizes the plan's linears have "
                f"{share!r} of the FLOPs in FP4; {_WAY_OUT}, or correct the field"
            )

    @property
    def asked(self) -> str:
        """The target for display, with its unit if it is not the FP4 share: 75.00%."""
        unit = "" if self.target_unit == MEASURES["fp4"] else f" in {self.target_unit}"
        return f"{self.target:.2%}{unit}"

    def churn(self, other: Plan) -> float:
        """Share of linears, 0..1, whose precision differs between the plans, including linears of only one plan."""
        names = self.linears.keys() | other.linears.keys()
        changed = sum(self.linears.get(name) != other.linears.get(name) for name in names)
        return changed / len(names) if names else 0.0

    def fp4_share(self, shapes: Sequence[LinearShape]) -> float:
        """Share of the linears' FLOPs in FP4, 0..1.  Raises UserError if the names do not match."""
        self.check_names(shape.name for shape in shapes)
        return achieved(shapes, self.linears)


def build_plan(
    solution: Solution,
    shapes: Sequence[LinearShape],
    options: Sequence[LinearPrecision],
    *,
    iteration: int,
    objective: str,
    target: float,
    measure: str = "fp4",
    gemm_times: str = "nominal",
) -> Plan:
    """The plan from a solution, effective from ``iteration``: linear ``shapes[l]`` runs in ``options[choice[l]]``.

    measure: unit of the target, a key of MEASURES.
    """
    if len(solution.choice) != len(shapes):
        raise UserError(f"the solution has {len(solution.choice)} linears, the model {len(shapes)}")
    linears = {shape.name: options[int(option)] for shape, option in zip(shapes, solution.choice)}
    record = SolverRecord(solution.status, solution.objective, solution.bound, solution.gap, round(solution.seconds, 6))
    share = achieved(shapes, linears)
    return Plan(iteration, linears, objective, float(target), share, record, gemm_times, MEASURES[measure])


def _precision(name: str, entry: Any) -> LinearPrecision:
    where = f"linears[{shown(name)}]"
    found = checked(entry, _Linear, where)
    try:
        return LinearPrecision(**msgspec.structs.asdict(found))
    except ValueError as error:
        raise JsonFileError(f"field {where}: {error}") from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
