"""How long a GEMM takes in each format: nominal, or a table that tools/profile_gemms.py measured.

    {"version": 1, "hardware": "NVIDIA H200", "about": {"torch": "2.13.0", "tokens": 8192, ...},
     "times": {"fp8": {"fprop": 0.6, "dgrad": 0.6, "wgrad": 0.7}, ...},
     "shapes": {"4096x14336": {"bf16": {"fprop": 0.95, ...}, "fp8": {...}}, ...}}

Convention: times are per FLOP, in units of what BF16 takes for one on average over all that was measured.
``times`` holds for every linear, ``shapes`` (out x in features of the whole model, whatever tp shards them) for
linears of that shape and goes first; both "about" and "shapes" may be left out.  bf16 takes 1 if not given.
Nominal times are those of tensor cores on paper: in proportion to the element's bits, BF16 1, FP8 1/2, FP4 1/4.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS
from megatron_snip.snip.jsonfile import (
    JsonFileError,
    check_fields,
    check_version,
    is_count,
    is_finite,
    is_object,
    is_text,
    read_json,
    write_atomic,
)

VERSION = 1
_WAY_OUT = "measure it anew with tools/profile_gemms.py, or leave --gemm-times out for nominal times"
_FIELDS = {"version": is_count, "hardware": is_text, "about": is_object, "times": is_object, "shapes": is_object}
#: Format -> GEMM -> time per FLOP.
Table = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class GemmTimes:
    """A table of times; without ``times`` the nominal ones.  hardware names it in metrics and plans."""

    hardware: str = "nominal"
    times: Table | None = None
    shapes: Mapping[str, Table] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, fmt: str, gemm: str, out_features: int, in_features: int) -> float:
        """Time per FLOP of a GEMM of a linear in a format; 1 is BF16's mean.  ValueError for an unknown format."""
        if self.times is None:
            return get_format(fmt).element_bits / 16
        found = self.shapes.get(f"{out_features}x{in_features}", {}).get(fmt) or self.times.get(fmt)
        if found is not None:
            return found[gemm]
        self.check([fmt])
        return 1.0

    def fastest(self, gemm: str, out_features: int, in_features: int) -> float:
        """The least time per FLOP of any format: of the table, or nominally of FP4."""
        if self.times is None:
            return 0.25
        formats = {"bf16", *self.times}
        return min(self.of(fmt, gemm, out_features, in_features) for fmt in formats)

    def check(self, formats: Iterable[str]) -> None:
        """Raise ValueError unless the table has these formats."""
        if self.times is None:
            return
        if missing := sorted(set(formats) - {"bf16", *self.times}):
            raise ValueError(
                f"the GEMM times of {self.hardware} have no format {missing[0]}; known: {', '.join(self.times)}; "
                f"{_WAY_OUT}"
            )

    def save(self, path: str | Path) -> None:
        """Write the JSON file, whole or not at all."""
        assert self.times is not None, "nominal times need no file"
        values = {"version": VERSION, "hardware": self.hardware, "about": self.about}
        write_atomic(path, json.dumps({**values, "times": self.times, "shapes": self.shapes}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> GemmTimes:
        """Read ``save``'s file, or one by hand.  Raises ValueError naming the file, the field and the way out."""
        values = {"about": {}, "shapes": {}, **read_json(path, "table of GEMM times", _WAY_OUT)}
        try:
            check_version(values, VERSION)
            check_fields(values, _FIELDS, "")
            times = _table(values["times"], "times")
            shapes = {}
            for shape, entry in values["shapes"].items():
                if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
                    raise JsonFileError(f"field shapes has {shape!r}, but must name shapes such as 4096x14336")
                shapes[shape] = _table(entry, f"shapes.{shape}")
                if unknown := sorted(shapes[shape].keys() - {"bf16", *times}):
                    raise JsonFileError(f"field shapes.{shape} has format {unknown[0]}, which times has not")
        except JsonFileError as error:
            raise ValueError(f"{path}: {error}; {_WAY_OUT}") from None
        return cls(values["hardware"], times, shapes, values["about"])


NOMINAL = GemmTimes()


def _table(values: Any, where: str) -> dict[str, dict[str, float]]:
    if not isinstance(values, dict) or not values:
        raise JsonFileError(f"field {where} is {values!r}, but must be an object of formats")
    for fmt, entry in values.items():
        try:
            get_format(fmt)
        except ValueError as error:
            raise JsonFileError(f"field {where}: {error}") from None
        check_fields(entry, dict.fromkeys(GEMMS, is_finite), f"{where}.{fmt}.")
        for gemm in GEMMS:
            if not (math.isfinite(entry[gemm]) and entry[gemm] > 0):
                raise JsonFileError(f"field {where}.{fmt}.{gemm} is {entry[gemm]}, but must be a number above 0")
    return {fmt: {gemm: float(entry[gemm]) for gemm in GEMMS} for fmt, entry in values.items()}
