"""state.json of a checkpoint and config.json of a run folder: checks every field's type, range and size on reading.

Both may be untrusted.  A run id becomes part of paths, and names of unwritten files are paths, so the schema restricts
both; all other strings are displayed, compared, or parsed as precisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, UnsetType

from megatron_snip.checkpoint import manifest
from megatron_snip.checkpoint.manifest import STATE, folder_of
from megatron_snip.config import Config, option_groups
from megatron_snip.files.io import shown
from megatron_snip.files.json import (
    Count,
    Finite,
    JsonFileError,
    PlanHash,
    PlanOrNone,
    RunId,
    Samples,
    Share,
    Text,
    checked,
    in_file,
    read_json,
)
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.coordinator import FILES_KEPT
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.health.guard import Step
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from megatron_snip.train.run.metrics import ROWS_KEPT, RunningMean, row_of

#: A file below the run folder; see `Coordinator.state`.
_Unwritten = Annotated[str, Meta(pattern=r"\A(plans|stats)/iter_[0-9]{7,19}\.json\Z")]
_FileText = Annotated[str, Meta(max_length=1 << 26)]
#: Options that may have an entry for each linear or precision in one text.
_LISTS = ("snip_fix", "snip_options")
#: A loss in nats; larger than any float32, but with finite squares.
_Loss = Annotated[float, Meta(ge=-1e100, le=1e100)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object without unknown fields."""


class _Watch(_Strict, frozen=True):
    """`LossWatch.state`."""

    losses: list[_Loss]
    in_a_row: Count


class _Reruns(_Strict, frozen=True):
    """`Rerun.state`."""

    reruns: Count
    differed: Count


class _Guard(_Strict, frozen=True):
    """`Guard.state`."""

    broke: Samples | None
    in_a_row: Count
    level: Annotated[int, Meta(ge=0, le=2)]
    plan: PlanOrNone
    blamed: list[PlanHash]
    saved: list[Samples]
    rewound_to: Annotated[int, Meta(ge=-1, le=1 << 40)]
    steps: list[Step]
    due: Step | None


class _Applied(_Strict, frozen=True):
    """A plan that took effect.  guard: why, if the guard applied it."""

    iteration: Samples
    hash: PlanHash
    achieved: Share
    changed: dict[Text, Text]
    guard: Text | UnsetType = msgspec.UNSET


class _Pending(_Strict, frozen=True):
    """`Pending`; `SolveRequest.from_dict` checks the request."""

    probed: Samples
    due: Samples
    options: Annotated[list[Text], Meta(min_length=1, max_length=4096)]
    objective: Text
    request: dict[Text, Any]
    measure: Literal["fp4", "time"]
    max_loss: Finite | None


class _Snip(_Strict, frozen=True):
    """`Coordinator.state`; `Plan.from_dict` checks the plan."""

    unwritten: Annotated[dict[_Unwritten, _FileText], Meta(max_length=FILES_KEPT + 2)]
    plan: dict[Text, Any] | None
    pending: _Pending | None
    history: list[_Applied]
    predictions: Predictions | None


class _Corpus(_Strict, frozen=True):
    """A dataset of the run; see `data_identity.identity`."""

    prefix: Text
    weight: Finite
    lengths: Text
    size: Count
    content: Text
    rounds: list[Count]
    sequences: tuple[Count, Count]


class _State(_Strict, frozen=True):
    """state.json; see `RunState._save`.  weights_alone: of a converted model that was not trained."""

    version: Count
    run_id: RunId
    iteration: Samples
    consumed_samples: Samples
    consumed_valid_samples: Samples
    data_skipped: Samples
    optimizer_steps: Samples
    scheduled_samples: Samples
    nan_iterations: Samples
    divergence: RunningMean
    watch: _Watch
    rerun: _Reruns
    guard: _Guard | None
    config: dict[Text, Any]
    snip: _Snip | None
    plan_hash: PlanHash | None
    data: dict[Literal["train", "valid"], list[_Corpus]]
    unwritten_rows: Annotated[list[_FileText], Meta(max_length=ROWS_KEPT + 2)]
    weights_alone: bool
    memory_plan: dict[Text, Any] | None = None  # `MemoryPlan.from_dict` checks it


class _Run(msgspec.Struct, frozen=True):
    """config.json of a run folder, besides the groups of options."""

    run_id: RunId
    versions: dict[Text, str | int]


def state_of(values: dict[str, Any]) -> dict[str, Any]:
    """The content of a state.json with every field checked, and ``config`` with every option of this version.

    Raises JsonFileError with the first invalid field.
    """
    found = checked(values, _State)
    if found.memory_plan is not None:
        with _about("memory_plan"):
            MemoryPlan.from_dict(found.memory_plan)
    if found.snip is not None:
        _check_snip(found.snip)
    for number, line in enumerate(found.unwritten_rows):
        if not line.endswith("\n") or "\n" in line[:-1] or row_of(line) is None:
            raise JsonFileError(f"field unwritten_rows[{number}] is {shown(line)}, but must be a line of metrics")
    return {**values, "config": config_of(found.config, "config").to_dict()}


def read_state(save: Path, iteration: int) -> dict[str, Any]:
    """A checkpoint's state.json, checked.  Raises UserError with the field for anything invalid."""
    with in_file(folder_of(save, iteration) / STATE, "load another iteration (--ckpt-step)"):
        return state_of(manifest.read_state(save, iteration))


def new_state(run_id: str, config: Config) -> dict[str, Any]:
    """The state of a run before its first iteration, with the weights of a converted model."""
    counters = (
        "iteration", "consumed_samples", "consumed_valid_samples", "data_skipped", "optimizer_steps",
        "scheduled_samples", "nan_iterations",
    )  # fmt: skip
    return {
        "run_id": run_id,
        **dict.fromkeys(counters, 0),
        "divergence": msgspec.to_builtins(RunningMean()),
        "watch": {"losses": [], "in_a_row": 0},
        "rerun": {"reruns": 0, "differed": 0},
        "guard": None,
        "config": config.to_dict(),
        "snip": None,
        "plan_hash": None,
        "memory_plan": None,
        "data": {},
        "unwritten_rows": [],
        "weights_alone": True,
    }


def config_of(values: Mapping[str, Any], where: str = "") -> Config:
    """Options from ``Config.to_dict``.  Missing ones get their default; unknown ones are dropped.

    Raises JsonFileError with the first invalid value.
    """
    inside = f"{where}." if where else ""
    if missing := sorted(set(option_groups().values()) - values.keys()):
        raise JsonFileError(f"field {inside}{missing[0]} is missing")
    config = checked(dict(values), Config, where)
    for name, group in option_groups().items():
        value, most = getattr(getattr(config, group), name), 1 << 20 if name in _LISTS else 4096
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and ("\0" in item or len(item) > most):
                raise JsonFileError(f"field {inside}{group}.{name} is {shown(item)}, which is not valid text")
            if isinstance(item, (int, float)) and not (math.isfinite(item) and abs(item) < 1 << 63):
                raise JsonFileError(f"field {inside}{group}.{name} is {shown(item)}, which is out of range")
    return config


def read_run_file(path: Path, way_out: str) -> tuple[str, Config, Mapping[str, str | int]]:
    """Run id, options and versions in a run folder's config.json.  Raises UserError for anything invalid."""
    values = read_json(path, "file of a run's options", way_out)
    with in_file(path, way_out):
        found = checked(values, _Run)
        return found.run_id, config_of(values), found.versions


def _check_snip(found: _Snip) -> None:
    """Check what schemas cannot: plans, precisions, and that a request fits its options."""
    if found.plan is not None:
        with _about("snip.plan"):
            Plan.from_dict(found.plan)
    for number, entry in enumerate(found.history):
        for name, precision in entry.changed.items():
            with _about(f"snip.history[{number}].changed[{shown(name)}]"):
                LinearPrecision.parse(precision)
    if (pending := found.pending) is not None:
        with _about("snip.pending.request"):
            options = SolveRequest.from_dict(pending.request).quality_loss.shape[1]
        with _about("snip.pending.options"):
            if len([LinearPrecision.parse(option) for option in pending.options]) != options:
                raise JsonFileError(f"there are {len(pending.options)}, but the request has {options}")


@contextmanager
def _about(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise JsonFileError(f"field {where}: {error}") from None
