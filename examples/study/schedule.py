"""A schedule of the head-to-head runs, one TOML file: a model, options of training, and the arms to compare."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.study.setting import check_fields, read_values
from megatron_snip.arguments import parse
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.plan.options import check_choices, read_times
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.setup import snip_shapes

#: Words of an arm that are no options of training.
BY_HAND, SAME_TIME = "by-hand", "same-time-as"
_BY_HAND = re.compile(r"(\w+), last (\d+)% (\w+)")
BASE = "bf16"  # the arm that all are compared with
FROM_SCRATCH = "scratch"
MODELS = ("smollm2", FROM_SCRATCH)

Arm = Mapping[str, Any]


@dataclass(frozen=True)
class Schedule:
    """What a TOML file says."""

    name: str  # for people
    model: str  # "smollm2", or FROM_SCRATCH: random weights, with the texts and the tokenizer of scratch.py
    prefix: int  # iterations in BF16 that all arms of a seed share
    options: dict[str, Any]  # of training, for every arm
    arms: dict[str, dict[str, Any]]  # name -> options of training, or one of BY_HAND and SAME_TIME
    seeds: tuple[int, ...] = (1, 2)
    judged: int = 48  # sequences of each held-out text
    cloze: int = 0  # items of each cloze task, for lm-eval; 0: none

    def words(self, **more: Any) -> list[str]:
        """Words of `megatron-snip train` that all runs share; more: further options, with underscores."""
        given = {**self.options, **{name.replace("_", "-"): value for name, value in more.items()}}
        return [word for name, value in given.items() for word in _words(name, value)]

    def config(self, arm: Arm = {}) -> Config:  # noqa: B006 (a Mapping is never written)
        """Options of an arm, without data."""
        return parse([*self.words(mock_data=True), *arm_words(arm)])

    def shapes(self) -> list[LinearShape]:
        """The model's linears."""
        return snip_shapes(self.config())

    def saved(self, by_hand: Arm, arm: Arm) -> float:
        """Share of the time that a recipe by hand saves by the --gemm-times of an arm."""
        shapes = self.shapes()
        return achieved(shapes, recipe(by_hand[BY_HAND], shapes), "time", read_times(self.config(arm).snip))

    def plan(self, arm: Arm) -> Plan:
        """The plan of a recipe by hand."""
        shapes = self.shapes()
        return Plan.by_hand(recipe(arm[BY_HAND], shapes), shapes)

    def words_of(self, name: str, plan: Path) -> list[str]:
        """Words that an arm adds; plan: where a recipe by hand is written."""
        arm = self.arms[name]
        words = arm_words(arm)
        if BY_HAND in arm:
            words += ["--precision", "plan", "--precision-plan", str(plan)]
        if (other := arm.get(SAME_TIME)) is not None:
            words += [
                "--snip-target-unit",
                "time",
                "--snip-target",
                repr(self.saved(self.arms[other], arm) * (1 - 1e-6)),
            ]
        return words


def arm_words(arm: Arm) -> list[str]:
    """An arm's options of training as words."""
    return [word for name, value in arm.items() if name not in (BY_HAND, SAME_TIME) for word in _words(name, value)]


def recipe(words: str, shapes: Sequence[LinearShape]) -> dict[str, LinearPrecision]:
    """Precision of each linear by words such as "nvfp4, last 15% bf16", in whole blocks.  UserError for other words."""
    if (found := _BY_HAND.fullmatch(words)) is None:
        raise UserError(f'{BY_HAND} is {words!r}; give "FORMAT, last N% FORMAT", such as "nvfp4, last 15% bf16"')
    low, high = (LinearPrecision.uniform(found[i]) for i in (1, 3))
    blocks = 1 + max(shape.block for shape in shapes)
    first = blocks - int(blocks * int(found[2]) / 100)
    return {shape.name: high if shape.block >= first else low for shape in shapes}


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]


def read_schedule(path: Path) -> Schedule:
    """Read a TOML file.  Raises UserError if it is not one, for unknown and missing names, and for invalid arms.

    `like` names another schedule's file in the same folder, for everything that this file does not set.  Options and
    arms are merged by name; an arm is replaced whole.
    """
    values = read_values(path, "schedule", "schedules/smollm2.toml")
    if (like := values.pop("like", None)) is not None:
        base = dataclasses.asdict(read_schedule(path.parent / like))
        merged = {name: {**base[name], **values.get(name, {})} for name in ("options", "arms")}
        values = {**base, **values, **merged}
    check_fields(path, values, Schedule)
    schedule = Schedule(**{**values, "seeds": tuple(values.get("seeds", (1, 2)))})
    if schedule.model not in MODELS:
        raise UserError(f"{path}: model is {schedule.model!r}; give one of {', '.join(MODELS)}")
    if BASE not in schedule.arms:
        raise UserError(f"{path}: no arm {BASE}, which all are compared with; add [arms.{BASE}]")
    try:
        shapes = schedule.shapes()
        for arm in schedule.arms.values():
            config = schedule.config(arm)
            if config.precision.precision == "snip":
                check_choices(config.snip, shapes)
            if BY_HAND in arm:
                recipe(arm[BY_HAND], shapes)
            if (other := arm.get(SAME_TIME)) is not None and BY_HAND not in schedule.arms.get(other, {}):
                raise UserError(f"{SAME_TIME} is {other!r}; give the name of an arm with {BY_HAND}")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return schedule
