"""Savings of a precision: FP4's share of the linears' FLOPs, or GEMM time, nominal or from a measured table.

Source: SNIP, arXiv 2602.01410 (efficiency = fraction of FLOPs in FP4).
Convention: a linear has three GEMMs (fprop, dgrad, wgrad) of 2 N K FLOPs per token each.  Shapes are those of the whole
model, before tp.  A matrix [L, O] has one row per linear and one column per option.

`megatron-snip profile` measures a table of GEMM times.  Only a table includes the cost of casts and memory:

    {"version": 1, "hardware": "NVIDIA H200", "about": {"torch": "2.13.0", "tokens": 8192, ...},
     "times": {"fp8": {"fprop": 0.6, "dgrad": 0.6, "wgrad": 0.7}, ...},
     "shapes": {"4096x14336": {"bf16": {"fprop": 0.95, ...}, "fp8": {...}}, ...}}

Times are per FLOP, relative to BF16's average over all measurements.  ``times`` applies to every linear, and ``shapes``
(out x in features of the whole model) overrides it for linears of that shape.  "about" and "shapes" are optional, and
bf16 defaults to 1.  Nominal times are those of tensor cores on paper, proportional to the element's bits: BF16 1,
FP8 1/2, FP4 1/4.

Files in published/ hold times that others published, in their units.  "about" has the source, the date, the device and
the shapes.  --gemm-times published:NAME reads one, and divides it by the mean of its BF16 times.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files.io import shown
from megatron_snip.files.json import Count, JsonFileError, Text, checked, in_file, read_json, write_atomic
from megatron_snip.formats import format_names, get_format
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.program import Floats, Ints

GRANULARITIES = ("linear", "gemm", "fused")
#: What ``efficiency`` counts: the share of FLOPs in FP4, or modelled GEMM time; and the names of both in plan files.
MEASURES = {"fp4": "FP4 share", "time": "modelled time"}

#: Tables that --gemm-times names in place of a file.
PUBLISHED = "published:"
_FOLDER = Path(__file__).parent / "published"

VERSION = 1
_WAY_OUT = "measure it again with `megatron-snip profile`, or leave --gemm-times out for nominal times"
#: Format -> GEMM -> time per FLOP.
Table = Mapping[str, Mapping[str, float]]
_Time = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class _Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of a format in a file."""

    fprop: _Time
    dgrad: _Time
    wgrad: _Time


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table's file; see the module's docstring.  Tables are checked one by one, so that errors name the format."""

    version: Count
    hardware: Text
    times: dict[Text, Any]
    shapes: dict[Text, dict[Text, Any]] = {}
    about: dict[Text, Any] = {}


@dataclass(frozen=True)
class GemmTimes:
    """A table of times, nominal if ``times`` is None.  hardware is its name in metrics and plans."""

    hardware: str = "nominal"
    times: Table | None = None
    shapes: Mapping[str, Table] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, fmt: str, gemm: str, out_features: int, in_features: int) -> float:
        """Time per FLOP of a linear's GEMM in a format; 1 is BF16's mean.  Raises UserError for an unknown format."""
        if self.times is None:
            return get_format(fmt).element_bits / 16
        found = self.shapes.get(f"{out_features}x{in_features}", {}).get(fmt) or self.times.get(fmt)
        if found is not None:
            return found[gemm]
        self.check([fmt])
        return 1.0

    def fastest(self, gemm: str, out_features: int, in_features: int) -> float:
        """The lowest time per FLOP of any format in the table; nominally FP4's."""
        if self.times is None:
            return 0.25
        formats = {"bf16", *self.times}
        return min(self.of(fmt, gemm, out_features, in_features) for fmt in formats)

    @property
    def told(self) -> str:
        """One line for the log: where these times come from, and what they include."""
        if self.times is None:
            return "nominal: FP8 takes half of BF16's time, FP4 a quarter; --gemm-times takes other tables"
        about = [str(self.about[key]) for key in ("device", "unit") if key in self.about]
        return "; ".join([f"of {self.hardware}", *about])

    def check(self, formats: Iterable[str]) -> None:
        """Raise UserError unless the table has these formats."""
        if self.times is None:
            return
        if missing := sorted(set(formats) - {"bf16", *self.times}):
            way_out = _WAY_OUT
            if self.hardware.startswith(PUBLISHED):
                way_out = "take it out of --snip-options, or give --gemm-times another table or a file"
            raise UserError(
                f"the GEMM times of {self.hardware} have no format {missing[0]}; known: {', '.join(self.times)}; "
                f"{way_out}"
            )

    def save(self, path: str | Path) -> None:
        """Write the JSON file, atomically."""
        assert self.times is not None, "nominal times need no file"
        values = {"version": VERSION, "hardware": self.hardware, "about": self.about}
        write_atomic(path, json.dumps({**values, "times": self.times, "shapes": self.shapes}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> GemmTimes:
        """Read a file from ``save``, or a handwritten one.  Raises UserError with file, field and way out."""
        values = read_json(path, "table of GEMM times", _WAY_OUT)
        with in_file(path, _WAY_OUT):
            found = checked(values, _File, version=VERSION)
            times, shapes = _table(found.times, "times"), {}
            for shape, entry in found.shapes.items():
                if not re.fullmatch(r"[1-9]\d{0,8}x[1-9]\d{0,8}", shape):
                    raise JsonFileError(f"field shapes has {shown(shape)}, but must name shapes such as 4096x14336")
                shapes[shape] = _table(entry, f"shapes.{shape}")
                if unknown := sorted(shapes[shape].keys() - {"bf16", *times}):
                    raise JsonFileError(f"field shapes.{shape} has format {unknown[0]}, which times lacks")
        return cls(found.hardware, times, shapes, found.about)

    @classmethod
    def published(cls, name: str) -> GemmTimes:
        """A table of published/, in units of its BF16's mean.  Raises UserError, with the known names, for others.

        Formats with the same element and the same number of elements per scale run the same GEMM.  If only one of them
        was published, the others take its times, although their casts may differ.
        """
        known = sorted(path.stem for path in _FOLDER.glob("*.json"))
        if name not in known:
            tables = ", ".join(f"{PUBLISHED}{each}" for each in known)
            raise UserError(f"--gemm-times {PUBLISHED}{name}: no such table; known: {tables}, or give a file")
        found = cls.load(_FOLDER / f"{name}.json")
        assert found.times is not None
        unit = sum(found.times["bf16"].values()) / len(GEMMS)
        times = {fmt: {gemm: time / unit for gemm, time in row.items()} for fmt, row in found.times.items()}
        alike = {_kernel(fmt): fmt for fmt in reversed(times)}
        others = {fmt: times[alike[_kernel(fmt)]] for fmt in format_names() if _kernel(fmt) in alike}
        return replace(found, times={**others, **times})


def _kernel(name: str) -> tuple[Any, int]:
    """What determines a format's GEMM: its element, and how many elements along the reduction dim share a scale."""
    fmt = get_format(name)
    return fmt.element, fmt.tile


NOMINAL = GemmTimes()


def linear_options(formats: Iterable[str], granularity: str = "gemm") -> list[LinearPrecision]:
    """Options of a linear.  "linear", "fused": each of ``formats`` unchanged.  "gemm": every combination of the single
    formats over the three GEMMs, then the triples such as "fp4/fp4/fp8".  Keeps the order, drops duplicates.

    Raises UserError for unknown formats or granularities, and for no format.
    """
    names = list(dict.fromkeys(formats))
    if granularity not in GRANULARITIES:
        raise UserError(f"unknown granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")
    if not names:
        raise UserError("no options to plan with; name at least one format, such as fp8,fp4")
    options = [LinearPrecision.parse(name) for name in names]
    if granularity == "gemm":
        single = [name for name in names if "/" not in name]
        triples = [option for name, option in zip(names, options, strict=True) if "/" in name]
        options = [*(LinearPrecision(*formats) for formats in product(single, repeat=len(GEMMS))), *triples]
    return list(dict.fromkeys(options))


def fused_ties(shapes: Sequence[LinearShape]) -> Ints:
    """``Terms.ties`` for granularity "fused", [L]: linears with a common input share an id."""
    readers = Counter(shape.reads for shape in shapes if shape.reads)
    ids = {reads: number for number, reads in enumerate(reads for reads, count in readers.items() if count > 1)}
    return np.array([ids.get(shape.reads, -1) for shape in shapes], dtype=np.int64)


def stages(shapes: Sequence[LinearShape]) -> Ints:
    """``Terms.stage``, [L]."""
    return np.array([shape.stage for shape in shapes], dtype=np.int64)


def gemm_flops(shapes: Sequence[LinearShape]) -> Ints:
    """[L, 3]: FLOPs per token of every GEMM of every linear, in the order of GEMMS."""
    return np.array([[shape.gemm_flops] * len(GEMMS) for shape in shapes], dtype=np.int64)


def modelled_time(
    shapes: Sequence[LinearShape], options: Sequence[LinearPrecision], times: GemmTimes = NOMINAL
) -> Floats:
    """[L, O]: time of linear l in option o, plus the BF16 work that its shape includes.

    Relative to the whole model in BF16 at its mean speed.  Raises as ``gemm_time``.
    """
    linears = int(gemm_flops(shapes).sum())
    other = np.array([len(GEMMS) * shape.other_flops for shape in shapes])  # backward costs twice forward
    return (gemm_time(shapes, options, times) * linears + other[:, None]) / (linears + int(other.sum()))


def gemm_time(shapes: Sequence[LinearShape], options: Sequence[LinearPrecision], times: GemmTimes = NOMINAL) -> Floats:
    """[L, O]: GEMM time of linear l in option o relative to all linears in BF16 at its mean speed.

    Raises UserError for a format that the table lacks.
    """
    flops = gemm_flops(shapes)
    result = np.zeros((len(shapes), len(options)))
    for row, shape in enumerate(shapes):
        size = shape.out_features, shape.in_features
        for column, option in enumerate(options):
            taken = (times.of(getattr(option, gemm), gemm, *size) for gemm in GEMMS)
            result[row, column] = sum(int(f) * t for f, t in zip(flops[row], taken))
    return result / flops.sum()


def saving(precision: LinearPrecision) -> float:
    """The share of a linear's FLOPs in FP4: 0, 1/3, 2/3 or 1."""
    return float(efficiency([LinearShape("any", 1, 1)], [precision])[0, 0])


def efficiency(
    shapes: Sequence[LinearShape],
    options: Sequence[LinearPrecision],
    measure: str = "fp4",
    times: GemmTimes = NOMINAL,
) -> Floats:
    """[L, O]: savings of linear l in option o.  The largest possible total is 1.

    measure: "fp4", the share of FLOPs in FP4; "time", modelled GEMM time saved against BF16, relative to the fastest
    format of the times everywhere (nominally FP4).  Use "time" if bf16 is an option, because "fp4" ignores what FP8
    saves.
    Raises UserError for a format that the table lacks, and a table in which nothing is faster than bf16.
    """
    flops = gemm_flops(shapes)
    if measure == "fp4":
        bits = [[get_format(getattr(option, gemm)).element_bits for gemm in GEMMS] for option in options]
        return flops / flops.sum() @ (np.array(bits).T <= 4).astype(np.float64)
    plain = gemm_time(shapes, [LinearPrecision.uniform("bf16")], times)
    least = sum(
        int(f) * times.fastest(gemm, shape.out_features, shape.in_features)
        for shape, row in zip(shapes, flops)
        for f, gemm in zip(row, GEMMS)
    )
    most = float(plain.sum()) - least / float(flops.sum())
    if most <= 0:
        raise UserError(
            f"by the GEMM times of {times.hardware} no format is faster than bf16, so there is no time to save; "
            "take bf16 out of --snip-options, or leave --gemm-times out for nominal times"
        )
    return (plain - gemm_time(shapes, options, times)) / most


def achieved(
    shapes: Sequence[LinearShape],
    precisions: Mapping[str, LinearPrecision],
    measure: str = "fp4",
    times: GemmTimes = NOMINAL,
) -> float:
    """Savings of a whole assignment, at most 1.  ``precisions`` must name every linear of ``shapes``."""
    if not shapes:
        return 0.0
    return float(entries(efficiency, shapes, precisions, measure, times).sum())


def by_stage(
    shapes: Sequence[LinearShape], precisions: Mapping[str, LinearPrecision], times: GemmTimes = NOMINAL
) -> dict[int, tuple[float, float]]:
    """Stage -> (FP4's share of its linears' FLOPs, its modelled time relative to the whole model in BF16)."""
    share = entries(efficiency, shapes, precisions, "fp4", NOMINAL)
    taken = entries(modelled_time, shapes, precisions, times)
    flops, stage = gemm_flops(shapes).sum(axis=1), stages(shapes)
    whole = flops / flops.sum()
    return {
        int(s): (float(share[stage == s].sum() / whole[stage == s].sum()), float(taken[stage == s].sum()))
        for s in np.unique(stage)
    }


def entries(
    matrix: Callable[..., Floats],
    shapes: Sequence[LinearShape],
    precisions: Mapping[str, LinearPrecision],
    *rest: Any,
) -> Floats:
    """[L]: each linear's entry, in its own precision, of a matrix [L, O] from this module."""
    options = list(dict.fromkeys(precisions[shape.name] for shape in shapes))
    columns = [options.index(precisions[shape.name]) for shape in shapes]
    return matrix(shapes, options, *rest)[np.arange(len(shapes)), columns]


def _table(values: Mapping[str, Any], where: str) -> dict[str, dict[str, float]]:
    if not values:
        raise JsonFileError(f"field {where} is {{}}, but must be an object of formats")
    for fmt in values:
        try:
            get_format(fmt)
        except ValueError as error:
            raise JsonFileError(f"field {where}: {error}") from None
    return {fmt: msgspec.structs.asdict(checked(entry, _Times, f"{where}.{fmt}")) for fmt, entry in values.items()}
