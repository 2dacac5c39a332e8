"""Statistics made of the few numbers that a test is about; errors are small and everything else is 0 or 1."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.linear_probe import OPERANDS, names_of_sums
from megatron_snip.snip.measure.statistics import Statistics


def statistics(
    shapes: Sequence[LinearShape],
    token: Mapping[str, Sequence[float]],
    update: Sequence[float],
    own: Mapping[str, Sequence[float]],
    more: Mapping[str, Sequence[float]] | None = None,
    *,
    iteration: int = 7,
    loss: float = 5.0,
    tokens: int = 100,
) -> Statistics:
    """``token`` and ``own``: format -> [L]; ``more``: columns [L] by name that replace what else there is."""
    columns: dict[str, Sequence[float]] = {f"token/{fmt}": values for fmt, values in token.items()}
    columns |= {f"spread/{fmt}": np.square(values) for fmt, values in token.items()}
    columns |= {f"top_token/{fmt}": values for fmt, values in token.items()}
    columns |= {"update": update} | {f"own/{fmt}": values for fmt, values in own.items()}
    for operand in (f"{fmt}/{operand}" for fmt in token for operand in OPERANDS):
        columns[f"error/{operand}"] = [value + 1e-3 for value in token[operand.split("/")[0]]]
        columns |= {f"{kind}/{operand}": [0.0] * len(shapes) for kind in ("underflow", "saturated")}
    known = {*columns, *(more or {})}  # all others are 1: the norms, and any that a probe learns to measure
    others = sorted(name for name in names_of_sums(list(token), updates=True) - known if "nonzero/" not in name)
    columns |= dict.fromkeys(others, [1.0] * len(shapes)) | dict(more or {})
    values = np.stack([np.array(column, np.float64) for column in columns.values()], axis=1)
    return Statistics(iteration, loss, tokens, tuple(shapes), tuple(columns), values)


def changed(stats: Statistics, name: str, column: str, value: float) -> Statistics:
    """The statistics with one number of the linear ``name`` replaced."""
    values = stats.values.copy()
    values[stats.names.index(name), stats.columns.index(column)] = value
    return dataclasses.replace(stats, values=values)


def without_updates(stats: Statistics) -> Statistics:
    """As of a probe that measured none, which sees fprop's operands alone."""
    gone = re.compile(r"update|own/.*|norm/G|.*/(dgrad|wgrad)/.*")
    kept = [i for i, name in enumerate(stats.columns) if not gone.fullmatch(name)]
    return dataclasses.replace(stats, columns=tuple(stats.columns[i] for i in kept), values=stats.values[:, kept])


def assert_same(one: Statistics, other: Statistics) -> None:
    """Equal in every field, bit for bit; NaN equals NaN."""
    for field in ("iteration", "loss", "tokens", "shapes", "columns"):
        assert getattr(one, field) == getattr(other, field), field
    assert np.array_equal(one.values, other.values, equal_nan=True)
