"""JSON files that are written atomically and validated against a schema when read.

Each kind of file has a schema, a `msgspec.Struct` or a dataclass, next to the code that reads it.  The types below are
for its fields.  Only these functions read untrusted files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files.io import MOST_BYTES, atomic_output, parse_json, read_file, shown

_T = TypeVar("_T")
_LARGEST = sys.float_info.max
#: A non-negative integer that fits 64 bits.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: A finite number; a plain ``float`` may be NaN or infinite.
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
#: A number from 0 to 1, with tolerance for rounding.
Share = Annotated[float, Meta(ge=-1e-9, le=1.0 + 1e-9)]
#: A name or a sentence.
Text = Annotated[str, Meta(max_length=4096)]
#: A run's id, which is part of file names.
RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
#: Samples of a run, or iterations; products with a sequence length fit 64 bits.
Samples = Annotated[int, Meta(ge=0, le=1 << 40)]
#: 16 hex digits of a plan's hash.
PlanHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
#: The hash of the plan in force, or "".
PlanOrNone = Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")]


class JsonFileError(UserError):
    """A missing, unknown or invalid field.  `in_file` adds the file's name and the way out."""


def read_json(path: str | Path, what: str, way_out: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a file of at most ``most`` bytes.  Raises UserError with the file's name if there is none."""
    return json_object(read_file(path, what, way_out, most), path, what, way_out)


def json_object(data: bytes, path: str | Path, what: str, way_out: str) -> dict[str, Any]:
    """The object in a file's content.  Raises UserError with the file's name if it is truncated or not an object."""
    try:
        values = parse_json(data)
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise UserError(f"{path}: this {what} is not JSON ({error}); {way_out}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: this {what} holds a JSON {type(values).__name__}, not an object; {way_out}")
    return values


def checked(values: Any, schema: type[_T], where: str = "", *, version: int | None = None) -> _T:
    """Convert parsed JSON to ``schema``, and check the type and range of every field.

    where: the field that holds the values, for the error message; "" for a whole file.  version: the file's, which is
    checked first, because another version may have other fields.
    Raises JsonFileError with the first missing, unknown or invalid field and its value.
    """
    if version is not None:
        check_version(values, version)
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), values, where)) from None
    except RecursionError:
        raise JsonFileError(f"{where or 'it'} is nested too deeply") from None


def decoded(data: bytes, schema: type[_T]) -> _T:
    """Decode JSON text straight to ``schema``, for files with millions of values.

    Raises JsonFileError as `checked` does, but without values.  If a key appears twice, the last one counts.
    """
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), None, "")) from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: not UTF-8
        raise JsonFileError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise JsonFileError("it is nested too deeply") from None


def _in_words(problem: str, values: Any, where: str) -> str:
    """msgspec's message, rewritten to start with the field's name and value."""
    what, _, path = problem.partition(" - at `")
    of_a_key, path = path.startswith("key` in `$"), path.rpartition("$")[2].rstrip("`").removeprefix(".")
    full = f"{where}{'.' if where and path[:1] not in ('', '[') else ''}{path}"
    if found := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", what, re.DOTALL):
        name = f"{full}.{shown(found[2])[1:-1]}".removeprefix(".")
        return f"field {name} is {'missing' if found[1].startswith('missing') else 'unknown'}"
    what = "No known value" if what.startswith("Invalid enum value") else what.replace("`", "")  # it may be long
    if of_a_key:
        return f"field {full} has a name that it cannot have: {what[:1].lower()}{what[1:]}"
    place = f"field {full}" if full else "the file's content"
    for step in re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", path):
        try:
            values = values[step[1]] if step[1] else values[int(step[0])]
        except (KeyError, IndexError, TypeError, ValueError):  # "[...]": msgspec names no keys of a mapping
            return f"{place}: {what[:1].lower()}{what[1:]}"
    return f"{place} is {shown(values)}: {what[:1].lower()}{what[1:]}"


@contextmanager
def in_file(source: str | Path, way_out: str) -> Iterator[None]:
    """Let a JsonFileError of the block name its file and the way out."""
    try:
        yield
    except JsonFileError as error:
        raise UserError(f"{source}: {error}; {way_out}") from None


def check_version(values: Mapping[str, Any], known: int) -> None:
    """Raise JsonFileError for any other version."""
    if values.get("version", known) != known:
        raise JsonFileError(f"field version is {shown(values['version'])}, but this code reads version {known}")


def write_atomic(path: str | Path, text: str) -> None:
    """Write a file such that readers and crashes see either the old or the new file, never a part."""
    with atomic_output(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str | Path, values: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(values, indent=1) + "\n")
