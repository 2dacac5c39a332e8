"""JSON files that are whole or absent, and whose every field is checked against a schema when they are read.

A schema is a `msgspec.Struct` or a dataclass, one for each kind of file, beside the code that reads the file.  The
types below go into its fields.  Files from a stranger are read by these functions alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files import atomic_output, parse_json, read_file, shown

_T = TypeVar("_T")
_LARGEST = sys.float_info.max
#: A whole number of 0 or more that 64 bits hold.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: A finite number; a plain ``float`` may be NaN or infinite.
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
#: A number from 0 to 1, with room for rounding.
Share = Annotated[float, Meta(ge=-1e-9, le=1.0 + 1e-9)]
#: A name or a sentence of a file.
Text = Annotated[str, Meta(max_length=4096)]
#: A run's id, which becomes part of file names.
RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
#: 16 hex digits of a plan's hash.
PlanHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class JsonFileError(UserError):
    """A field is missing, unknown or wrong; the caller adds the file's name and the way out."""


def read_json(path: str | Path, what: str, way_out: str) -> dict[str, Any]:
    """The object in a file.  Raises UserError naming the file if it cannot be read, is cut short or is no object."""
    data = read_file(path, what, way_out)
    try:
        values = parse_json(data)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError too
        raise UserError(f"{path}: this {what} is no JSON ({error}); {way_out}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: this {what} holds a JSON {type(values).__name__}, not an object; {way_out}")
    return values


def checked(values: Any, schema: type[_T], where: str = "") -> _T:
    """The object ``schema`` of parsed JSON, every field of the declared type and range.

    where: the field that holds the values, for the error's line; "" for a whole file.
    Raises JsonFileError naming the first field that is missing, unknown or wrong, with its value.
    """
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), values, where)) from None
    except RecursionError:
        raise JsonFileError(f"{where or 'it'} is nested too deeply") from None


def decoded(data: bytes, schema: type[_T]) -> _T:
    """The object ``schema`` of a JSON text, never as parsed JSON: for files that may have millions of values.

    Raises JsonFileError as `checked` does, without values; of a key that appears twice the last counts.
    """
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), None, "")) from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: no text in UTF-8
        raise JsonFileError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise JsonFileError("it is nested too deeply") from None


def _in_words(problem: str, values: Any, where: str) -> str:
    """msgspec's message with the field's name first and its value."""
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


def check_version(values: Mapping[str, Any], known: int) -> None:
    """Raises JsonFileError for any other version, before the fields of an unknown one are judged."""
    if values.get("version", known) != known:
        raise JsonFileError(f"field version is {shown(values['version'])}, but this code reads version {known}")


def write_atomic(path: str | Path, text: str) -> None:
    """Write a file so that readers and crashes see the old one or the new one, never a part."""
    with atomic_output(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
