"""JSON files that are whole or absent, and whose every field is checked against a schema when they are read.

A schema is a `msgspec.Struct` or a dataclass, one for each kind of file, beside the code that reads the file.  The
types below go into its fields.  Files from a stranger are read by these functions alone.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
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
#: A run's id, which becomes part of file names.
RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
#: 16 hex digits of a plan's hash.
PlanHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class JsonFileError(UserError):
    """A field is missing, unknown or wrong; the caller adds the file's name and the way out."""


def is_object(value: Any) -> bool:
    """A JSON object."""
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """A whole number of 0 or more that 64 bits hold; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Any number, NaN and infinities included, but no whole number beyond floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def is_finite(value: Any) -> bool:
    """A finite number."""
    return is_number(value) and math.isfinite(value)


def is_share(value: Any) -> bool:
    """A number from 0 to 1, but for rounding."""
    return is_number(value) and -1e-9 <= value <= 1.0 + 1e-9


def is_texts(value: Any) -> bool:
    """A list of different strings."""
    return isinstance(value, list) and all(map(is_text, value)) and len(set(value)) == len(value)


#: What a check asks for, in an error's words.
EXPECTED: Mapping[Callable[[Any], bool], str] = {
    is_object: "an object",
    is_text: "a string",
    is_count: "a whole number of 0 or more",
    is_number: "a number",
    is_finite: "a finite number",
    is_share: "a share, 0 to 1",
    is_texts: "a list of different strings",
}


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


def checked(values: Any, schema: type[_T]) -> _T:
    """The object ``schema`` of parsed JSON, every field of the declared type and range.

    Raises JsonFileError naming the first field that is missing, unknown or wrong, with its value.
    """
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), values)) from None
    except RecursionError:
        raise JsonFileError("it is nested too deeply") from None


def decoded(data: bytes, schema: type[_T]) -> _T:
    """The object ``schema`` of a JSON text, never as parsed JSON: for files that may have millions of values.

    Raises JsonFileError as `checked` does, without values; of a key that appears twice the last counts.
    """
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise JsonFileError(_in_words(str(error), None)) from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: no text in UTF-8
        raise JsonFileError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise JsonFileError("it is nested too deeply") from None


def _in_words(problem: str, values: Any) -> str:
    """msgspec's message with the field's name first and its value."""
    what, _, path = problem.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    if found := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", what, re.DOTALL):
        name = f"{path}.{shown(found[2])[1:-1]}".removeprefix(".")
        return f"field {name} is {'missing' if found[1].startswith('missing') else 'unknown'}"
    what = what.replace("`", "")
    place = f"field {path}" if path else "the file's content"
    for step in re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", path):
        try:
            values = values[step[1]] if step[1] else values[int(step[0])]
        except (KeyError, IndexError, TypeError, ValueError):  # "[...]": msgspec names no keys of a mapping
            return f"{place}: {what[:1].lower()}{what[1:]}"
    return f"{place} is {shown(values)}: {what[:1].lower()}{what[1:]}"


def check_fields(
    values: Any,
    checks: Mapping[str, Callable[[Any], bool]],
    where: str,
    expected: Mapping[Callable[[Any], bool], str] = EXPECTED,
) -> None:
    """Every field of ``checks`` is there and passes, and no other is.  ``where`` goes before a field's name.

    expected: what checks that EXPECTED does not name ask for.
    Raises JsonFileError naming the first field that is missing, then unknown, then of the wrong type.
    """
    if not isinstance(values, dict):
        raise JsonFileError(f"field {where.rstrip('.')} is {shown(values)}, but must be an object")
    if missing := sorted(checks.keys() - values.keys()):
        raise JsonFileError(f"field {where}{missing[0]} is missing")
    if unknown := sorted(values.keys() - checks.keys()):
        raise JsonFileError(f"field {where}{unknown[0]} is unknown; known: {', '.join(checks)}")
    for name, check in checks.items():
        if not check(values[name]):
            raise JsonFileError(
                f"field {where}{name} is {shown(values[name])}, but must be {({**EXPECTED, **expected})[check]}"
            )


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
