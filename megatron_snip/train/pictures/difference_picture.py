"""The difference between two runs' losses, as numbers and as a plotly figure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_snip.train.pictures.figures import PALETTE, Curve, Figure, axes, line, rounded


@dataclass(frozen=True)
class Difference:
    """Means of a loss minus another over windows of common iterations, with standard errors (NaN for single ones)."""

    iterations: list[int]
    means: list[float]
    errors: list[float]
    sizes: list[int]


def difference_of(mine: Curve, theirs: Curve) -> Difference | None:
    """None if the curves have no iteration in common."""
    there = dict(zip(*theirs))
    common = [(i, value - there[i]) for i, value in zip(*mine) if i in there]
    if not common:
        return None
    window = max(8, len(common) // 100) if len(common) >= 16 else 1
    parts = np.array_split(np.asarray(common, np.float64), len(common) // window)  # each [W, 2]
    errors = [part[:, 1].std(ddof=1) / math.sqrt(len(part)) if len(part) > 1 else math.nan for part in parts]
    means = [float(part[:, 1].mean()) for part in parts]
    return Difference([int(part[:, 0].mean()) for part in parts], means, errors, [len(part) for part in parts])


def difference(name: str, other: str, found: Difference) -> Figure:
    """The differences, with a band of two standard errors."""
    xs, means, window = found.iterations, found.means, found.sizes[0] > 1
    sizes = " or ".join(map(str, sorted(set(found.sizes))))  # parts that differ do so by one
    data = [line(f"mean of {sizes}" if window else f"{name} - {other}", (xs, means), PALETTE[0])]
    if window:
        low, high = (rounded([m + sign * e for m, e in zip(means, found.errors)]) for sign in (-2, 2))
        band: Figure = {
            "type": "scatter", "x": xs + xs[::-1], "y": high + low[::-1], "fill": "toself", "hoverinfo": "skip",
            "mode": "none", "fillcolor": "rgba(61,127,196,0.25)", "name": "two standard errors",
        }  # fmt: skip
        data.insert(0, band)
    layout = axes("iteration", f"{name} - {other} (nats)")
    layout["yaxis"] |= {"zeroline": True, "zerolinecolor": "#8792a2"}
    return {"data": data, "layout": layout, "title": f"Training loss: {name} minus {other}"}
