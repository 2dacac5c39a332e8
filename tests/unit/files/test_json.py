"""Schemas of JSON files: what is refused, and in which words."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import pytest

from megatron_snip.files.json import Count, Finite, JsonFileError, RunId, Share, checked


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    iteration: Count
    changed: dict[str, str] = {}
    named: dict[Annotated[str, msgspec.Meta(pattern=r"\Aa+\Z")], int] = {}
    loss: Finite = 0.0
    share: Share = 0.0


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    history: list[Entry]
    run_id: RunId = "0123456789abcdef"
    noise: float = 0.0


def test_takes_what_the_schema_says() -> None:
    found = checked({"history": [{"iteration": 4}], "noise": math.nan}, File)
    assert found.history == [Entry(4)] and math.isnan(found.noise)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "field history is missing"),
        ({"history": [], "more": 1}, "field more is unknown"),
        ({"history": 5}, "field history is 5: expected array, got int"),
        ({"history": [{"iteration": 1}, {"iteration": 4.0}]}, r"field history\[1\]\.iteration is 4\.0: expected int"),
        ({"history": [{"iteration": True}]}, r"field history\[0\]\.iteration is True: expected int"),
        ({"history": [{"iteration": -1}]}, r"field history\[0\]\.iteration is -1: expected int >= 0"),
        ({"history": [{"iteration": 10**30}]}, r"field history\[0\]\.iteration is 1000"),
        ({"history": [{}]}, r"field history\[0\]\.iteration is missing"),
        ({"history": [{"iteration": 1, "changed": {"a": 5}}]}, r"field history\[0\]\.changed\[\.\.\.\]: expected str"),
        ({"history": [{"iteration": 1, "loss": math.nan}]}, r"field history\[0\]\.loss is nan"),
        ({"history": [{"iteration": 1, "loss": 10**400}]}, r"field history\[0\]\.loss is 1000"),
        ({"history": [{"iteration": 1, "share": 1.01}]}, r"field history\[0\]\.share is 1\.01"),
        ({"history": [], "run_id": "x/../../../../home"}, r"field run_id is 'x/\.\./\.\./\.\./\.\./home'"),
        ({"history": [], "run_id": "0123456789abcdef\n"}, "field run_id is"),
        (
            {"history": [{"iteration": 1, "named": {"B": 1}}]},
            r"field history\[0\]\.named has a name that it cannot",
        ),
        ([], "the file's content is .*expected object, got array"),
    ],
)
def test_names_field_and_value(values: Any, words: str) -> None:
    with pytest.raises(JsonFileError, match=words):
        checked(values, File)


class Loop(msgspec.Struct):
    inner: Loop | None = None


def test_deep_values_end_in_a_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"inner": deep}
    with pytest.raises(JsonFileError, match="nested too deeply"):
        checked(deep, Loop)
