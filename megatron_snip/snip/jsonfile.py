"""JSON files that are whole or absent, and errors that name the field: plans, statistics, tables of GEMM times."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError
from megatron_snip.files import atomic_output, parse_json, read_file, shown


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
