"""Statistics of a probe: a matrix with a row per linear and a named column per number, and its JSON file.

    token/f           sum_t (sum_n G[t,n] dY_f[t,n])^2, dY_f = Q_f(X) Q_f(W)^T - X W^T, nats^2; for q, k and v with the
                      attention's output, its gradient and the effect of dY_f on it
    spread/f          sum_t of the fourth powers of the same, nats^4; top_token/f: the largest of the squares, nats^2
    update *          |u(g)|_F^2, the optimiser's update without noise
    own/f *           |u(g + E_f) - u(g)|_F^2, E_f = Q_f(G)^T Q_f(X) - G^T X, wgrad's own error
    norm/A            |A|_F^2 of the operands X, W and G *
    error/f/gemm/role |Q_f(A) - A|_F^2 of an operand of a GEMM, such as error/fp4/fprop/input; dgrad's and wgrad's *
    underflow/...     share of that operand's nonzero elements that became 0
    saturated/...     share of them beyond the format's largest value

* only if updates were measured.

Source: docs/numerics.md, "Loss divergence" and "Weight divergence".  T is the tokens of the global batch and
G = dL/dY contains 1/T.  Values are sums over the batch, dp ranks and tp shards.  Formats that change nothing (bf16)
have no column.  NaN marks values that were not finite; it is kept in the file as a finding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from megatron_snip.errors import UserError
from megatron_snip.files.io import shown
from megatron_snip.files.json import Count, JsonFileError, Text, checked, in_file, read_json, write_atomic
from megatron_snip.quant import KINDS, LinearShape

Floats = NDArray[np.float64]

VERSION = 4
_WAY_OUT = "collect the statistics again"
#: How to measure updates and the operands of the backward GEMMs.
WHERE_UPDATES = "probe with `megatron-snip probe` or --snip-weight above 0 for updates and all operands"
#: No model has more.  With these sizes, sums of FLOPs over that many linears fit 64 bits.
MOST_LINEARS, MOST_COLUMNS = 1 << 16, 1 << 12
_Size = Annotated[int, Meta(ge=1, le=1 << 22)]
_Columns = Annotated[list[Text], Meta(max_length=MOST_COLUMNS)]


class _Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear in a file: the fields of its LinearShape, and one number per column."""

    out_features: _Size
    in_features: _Size
    block: Annotated[int, Meta(ge=0, lt=1 << 16)]
    kind: Text
    reads: Text
    other_flops: Annotated[int, Meta(ge=0, le=1 << 45)]
    values: list[float]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of statistics."""

    version: Count
    iteration: Count
    loss: float
    tokens: Count
    columns: _Columns
    linears: Annotated[dict[Text, Any], Meta(max_length=MOST_LINEARS)]  # each a _Linear, so that errors name it


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of all linears from the probe before ``iteration``: loss in nats, tokens = T, values [L, columns].

    ``shapes`` [L] name the rows.  With several probes of one state, all numbers are means.
    """

    iteration: int
    loss: float
    tokens: int
    shapes: tuple[LinearShape, ...]
    columns: tuple[str, ...]
    values: Floats

    @property
    def names(self) -> list[str]:
        """Names of the linears, in row order."""
        return [shape.name for shape in self.shapes]

    @property
    def formats(self) -> list[str]:
        """The formats that were measured."""
        return [column.removeprefix("token/") for column in self.columns if column.startswith("token/")]

    @property
    def has_updates(self) -> bool:
        """Whether updates were measured, as weight divergences require."""
        return "update" in self.columns

    @property
    def finite(self) -> NDArray[np.bool_]:
        """[L]: whether all numbers of a linear are finite."""
        return np.asarray(np.isfinite(self.values).all(axis=1))

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Names of the linears with a NaN."""
        return tuple(name for name, good in zip(self.names, self.finite) if not good)

    def column(self, name: str) -> Floats:
        """[L] of one column.  Raises UserError if it was not measured."""
        if name not in self.columns:
            missing = not self.has_updates and not name.startswith("token/")
            raise UserError(
                f"statistics of iteration {self.iteration} have no {name}; measured formats: "
                f"{', '.join(self.formats) or 'none'}, {'with' if self.has_updates else 'without'} updates; probe with "
                f"the options that you plan with{f', or {WHERE_UPDATES}' if missing else ''}"
            )
        return self.values[:, self.columns.index(name)]

    @classmethod
    def mean(cls, several: Sequence[Statistics]) -> Statistics:
        """The mean of every number over several probes of one state, with the first probe's iteration and tokens.

        Token sums are in units of 2 / tokens and are converted to the first probe's, so that dL is the mean of all dL.
        Spread and top tokens are those of all tokens together.
        """
        first, count = several[0], len(several)
        assert all(one.shapes == first.shapes and one.columns == first.columns for one in several)
        kinds = [column.partition("/")[0] for column in first.columns]
        power = np.array([{"token": 1, "top_token": 1, "spread": 2}.get(kind, 0) for kind in kinds])
        values = [one.values * (one.tokens / first.tokens) ** power for one in several]
        mean = np.mean(values, axis=0)
        spread, top = (np.array([kind == wanted for kind in kinds]) for wanted in ("spread", "top_token"))
        mean[:, spread] /= count
        mean[:, top] = np.max(values, axis=0)[:, top] / count
        loss = float(np.mean([one.loss for one in several]))
        return cls(first.iteration, loss, first.tokens, first.shapes, first.columns, mean)

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically."""
        write_atomic(path, self.to_json())

    def to_json(self) -> str:
        """The text that ``save`` writes."""
        linears = {
            shape.name: {**{name: getattr(shape, name) for name in _Linear.__struct_fields__[:-1]}, "values": row}
            for shape, row in zip(self.shapes, self.values.tolist(), strict=True)
        }
        values = {field.name: getattr(self, field.name) for field in fields(self)[:3]}
        values = {"version": VERSION, **values, "columns": list(self.columns), "linears": linears}
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read a file from ``save``.  Raises UserError with the file and the field for anything else."""
        values = read_json(path, "statistics", _WAY_OUT)
        if "solver" in values:
            raise UserError(f"{path}: this is a plan, not statistics; give the file that it was made from")
        with in_file(path, _WAY_OUT):
            found = checked(values, _File, version=VERSION)
            if len(set(found.columns)) < len(found.columns):
                raise JsonFileError("field columns names a column twice")
            rows = [_row(name, entry, len(found.columns)) for name, entry in found.linears.items()]
        if not rows:
            raise UserError(f"{path}: field linears is empty; {_WAY_OUT}")
        shapes, numbers = tuple(shape for shape, _ in rows), np.array([row for _, row in rows], np.float64)
        return cls(found.iteration, found.loss, found.tokens, shapes, tuple(found.columns), numbers)


def _row(name: str, entry: Any, count: int) -> tuple[LinearShape, list[float]]:
    where = f"linears[{shown(name)}]"
    shape = msgspec.structs.asdict(checked(entry, _Linear, where))
    values = shape.pop("values")
    if len(values) != count:
        raise JsonFileError(f"field {where}.values has {len(values)} numbers, but the file has {count} columns")
    if shape["kind"] not in (*KINDS, ""):  # "": from a model whose linears have no known kinds
        raise JsonFileError(f"field {where}.kind is {shown(shape['kind'])}, but must be one of {', '.join(KINDS)}")
    return LinearShape(name, **shape), values
