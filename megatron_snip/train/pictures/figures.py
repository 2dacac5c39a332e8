"""The report's pictures as plotly figures in plain values: {"data": traces, "layout": axes, "title": text}.

`page.py` shows them.  Convention: a curve is (iterations, values).  A long curve is thinned out to MOST_POINTS and
keeps the minimum and maximum of each bucket.  Anything else is thinned out to its MOST_... and keeps its first and last
item.  Heatmaps have a row per kind of linear and a column per block.  Colours are readable on white and on black; the
page sets those of text and grid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.model.spec import linear_place
from megatron_snip.quant import GEMMS, KINDS
from megatron_snip.snip.plan.plan_file import Plan

Figure = dict[str, Any]
Curve = tuple[Sequence[int], Sequence[float]]

MOST_POINTS, MOST_MARKS, MOST_COLUMNS, MOST_LABELS = 4000, 200, 200, 12
MOST_CELLS = 1_000_000  # linears of all plans that the slider holds
_COLOURS = {"bf16": "#aab4c2", "fp8": "#5b8fbf", "fp4": "#e8893c"}
_SPARE_COLOURS = ("#7a5ba6", "#3f9a7a", "#c9a227", "#b0507a", "#6b8f4e", "#a5482f")
PALETTE = ("#3d7fc4", "#d9752b", *_SPARE_COLOURS)
_RAW, _MARK = "#9db7d6", "#d9752b"


class Grid:
    """The cells of our models' linears in a heatmap: a row per kind, a column per block.  Other names have no cell."""

    def __init__(self, names: Iterable[str]) -> None:
        places = {name: place for name in names if (place := linear_place(name)) is not None}
        self.kinds = [kind for kind in KINDS if kind in {kind for _, kind, _ in places.values()}]
        self.blocks = 1 + max((block for block, _, _ in places.values()), default=0)
        self.cells = {name: (self.kinds.index(kind), block) for name, (block, kind, _) in places.items()}


def colours_of(plans: Sequence[Plan]) -> dict[str, str]:
    """The colour of each format in use, widest elements first."""
    found = {getattr(p, gemm) for plan in plans for p in plan.linears.values() for gemm in GEMMS}
    ordered = sorted(found, key=lambda name: (-get_format(name).element_bits, name))
    spare = iter(_SPARE_COLOURS * len(ordered))
    return {name: _COLOURS.get(name) or next(spare) for name in ordered}


def picked(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced numbers below ``count``, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def thinned(curve: Curve, most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """The minimum and maximum of each bucket of a long curve, in order.  A short curve is unchanged."""
    xs, ys = np.asarray(curve[0], np.int64), np.asarray(curve[1], np.float64)
    if len(xs) > most:
        keep = {0, len(xs) - 1}
        low, high = (np.where(np.isnan(ys), other, ys) for other in (np.inf, -np.inf))
        for bucket in np.array_split(np.arange(len(xs)), most // 2 - 1):
            keep |= {int(bucket[low[bucket].argmin()]), int(bucket[high[bucket].argmax()])}
        order = sorted(keep)
        xs, ys = xs[order], ys[order]
    return xs.tolist(), _rounded(ys)


def smooth(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Mean of each value and ``window`` neighbours on either side: values [N] -> [N - 2 window]."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    return (sums[2 * window + 1 :] - sums[: -2 * window - 1]) / (2 * window + 1)


def loss(runs: Mapping[str, tuple[Curve, Curve]], marks: Sequence[tuple[int, float]]) -> Figure:
    """Loss over iterations.  runs: name -> (training, validation); marks: iteration and FP4 share of new plans."""
    data: list[Figure] = []
    for number, (name, (training, validation)) in enumerate(runs.items()):
        colour, prefix = PALETTE[number % len(PALETTE)], f"{name}: " if len(runs) > 1 else ""
        window = max(2, len(training[0]) // 100) if len(training[0]) >= 50 else 0
        raw = line(f"{prefix}training", training, _RAW if window else colour, width=1)
        if window and len(runs) > 1:
            raw["visible"] = "legendonly"
        data.append(raw)
        if window:
            mean = (training[0][window:-window], smooth(training[1], window).tolist())
            data.append(line(f"{prefix}mean of {2 * window + 1}", mean, colour))
        if len(validation[0]):
            data.append(line(f"{prefix}validation", validation, colour, mode="lines+markers", dash="dot"))
    layout = axes("iteration", "loss (nats a token)")
    if marks:
        data.append(_new_plans(marks))
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    if (span := _range([curve for pair in runs.values() for curve in pair])) is not None:
        layout["yaxis"]["range"] = span
    return {"data": data, "layout": layout}


def difference(name: str, other: str, mine: Curve, theirs: Curve) -> Figure | None:
    """The training loss minus another run's: means over windows of common iterations, with two standard errors.

    None if the runs have no iteration in common.
    """
    there = dict(zip(*theirs))
    common = [(i, value - there[i]) for i, value in zip(*mine) if i in there]
    if not common:
        return None
    window = max(8, len(common) // 100) if len(common) >= 16 else 1
    parts = np.array_split(np.asarray(common, np.float64), len(common) // window)  # each [W, 2]
    xs, means = [int(part[:, 0].mean()) for part in parts], [float(part[:, 1].mean()) for part in parts]
    sizes = " or ".join(map(str, sorted({len(part) for part in parts})))  # parts that differ do so by one
    data = [line(f"mean of {sizes}" if window > 1 else f"{name} - {other}", (xs, means), PALETTE[0])]
    if window > 1:
        errors = [2 * part[:, 1].std(ddof=1) / math.sqrt(len(part)) for part in parts]
        low, high = (_rounded([m + sign * e for m, e in zip(means, errors)]) for sign in (-1, 1))
        band: Figure = {
            "type": "scatter", "x": xs + xs[::-1], "y": high + low[::-1], "fill": "toself", "hoverinfo": "skip",
            "mode": "none", "fillcolor": "rgba(61,127,196,0.25)", "name": "two standard errors",
        }  # fmt: skip
        data.insert(0, band)
    layout = axes("iteration", f"{name} - {other} (nats)")
    layout["yaxis"] |= {"zeroline": True, "zerolinecolor": "#8792a2"}
    return {"data": data, "layout": layout}


def plans(all_plans: Sequence[Plan], titles: Sequence[str] = ()) -> Figure:
    """The heatmap of the last plan.  Its "plans" hold the cells of all plans, for a slider.

    Each cell is a linear, its three bands fprop, dgrad and wgrad from the top.  titles: names of
    plans that belong to no iteration of a run.
    """
    titles = titles or [f"iteration {plan.iteration}" for plan in all_plans]
    names = list(dict.fromkeys(name for plan in all_plans for name in plan.linears))
    grid, formats = Grid(names), colours_of(all_plans)
    shown = [name for name in names if name in grid.cells]
    options = list(dict.fromkeys(str(plan.linears[n]) for plan in all_plans for n in shown if n in plan.linears))
    steps = []
    for title, before, plan in zip(titles, [None, *all_plans], all_plans):
        changed = f", {plan.churn(before):.0%} changed" if before else ""
        text = f"{title}: {plan.achieved:.1%} in FP4{changed} (plan {plan.hash})"
        steps.append((text, plan))
    kept = picked(len(steps), max(2, MOST_CELLS // max(1, len(shown))))
    codes = {option: chr(48 + number) for number, option in enumerate(options)}
    slider = {
        "linears": [[name, *grid.cells[name]] for name in shown],
        "options": [[o, *(list(formats).index(fmt) for fmt in _three(o))] for o in options],
        "steps": [
            [text, "".join(codes[str(plan.linears[n])] if n in plan.linears else " " for n in shown)]
            for text, plan in (steps[i] for i in kept)
        ],
        "rows": len(grid.kinds), "columns": grid.blocks,
    }  # fmt: skip
    edges = [row + part for row in range(len(grid.kinds)) for part in (0.04, 0.35, 0.65, 0.96)]
    colours = [[place / len(formats), colour] for i, colour in enumerate(formats.values()) for place in (i, i + 1)]
    layout = _heatmap_layout(grid.kinds, grid.blocks)
    layout["yaxis"] |= {"range": [len(grid.kinds), 0], "tickvals": [row + 0.5 for row in range(len(grid.kinds))]}
    heat = {
        "type": "heatmap", "y": edges, "x0": 0, "dx": 1, "z": [], "zmin": -0.5, "zmax": len(formats) - 0.5, "xgap": 1,
        "colorscale": colours, "showscale": False, "hovertemplate": "%{text}<extra></extra>", "name": "",
    }  # fmt: skip
    legend = [
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "hoverinfo": "skip",
         "marker": {"symbol": "square", "size": 12, "color": colour}}
        for name, colour in formats.items()
    ]  # fmt: skip
    return {"data": [heat, *legend], "layout": layout, "plans": slider}


def _three(option: str) -> list[str]:
    """The formats of the three GEMMs in a precision's text."""
    words = option.split("/")
    return words if len(words) == len(GEMMS) else words * len(GEMMS)


def shares(all_plans: Sequence[Plan]) -> Figure:
    """What plans save and how much each changes, over iterations."""
    at = [plan.iteration for plan in all_plans]
    changed = [plan.churn(before) for before, plan in pairwise(all_plans)]
    data = [line("in FP4", (at, [plan.achieved for plan in all_plans]), PALETTE[1], shape="hv")]
    if changed:
        data.append(line("linears changed", (at[1:], changed), PALETTE[0], mode="lines+markers"))
    layout = axes("iteration", "share")
    layout["yaxis"] |= {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return {"data": data, "layout": layout}


def divergence_heatmap(values: Mapping[str, float], what: str, among: Iterable[float] = ()) -> Figure:
    """A value per linear as a colour on a log scale.  Cells of values that are not positive stay empty.

    among: all values that share the scale of colours; by default, these.
    """
    grid = Grid(values)
    table: list[list[float | None]] = [[None] * grid.blocks for _ in grid.kinds]
    for name, (row, block) in grid.cells.items():
        table[row][block] = values[name] if values[name] > 0 else None
    layout = _heatmap_layout(grid.kinds, grid.blocks)
    layout["yaxis"] |= {"tickvals": list(range(len(grid.kinds))), "range": [len(grid.kinds) - 0.5, -0.5]}
    heat = _log_heat(table, {}, f"block %{{x}} %{{y}}: %{{customdata:.3g}} {what}", among)
    return {"data": [heat], "layout": layout}


def divergence_over_iterations(curves: Mapping[str, Curve], what: str) -> Figure:
    """One line per name, on a log scale."""
    data = [
        line(name, (xs, [y if y > 0 else math.nan for y in ys]), PALETTE[i % len(PALETTE)], mode="lines+markers")
        for i, (name, (xs, ys)) in enumerate(curves.items())
    ]
    ticks = _log_ticks([y for _, ys in curves.values() for y in ys if y > 0])
    layout = axes("iteration", what)
    layout["yaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}
    return {"data": data, "layout": layout}


def blocks_over_iterations(curves: Mapping[str, Curve], what: str) -> Figure:
    """A heatmap with a row per block and a column per iteration, for some of the iterations."""
    at = sorted({i for xs, _ in curves.values() for i in xs})
    at = [at[i] for i in picked(len(at), MOST_COLUMNS)]
    rows = [dict(zip(*curve)) for curve in curves.values()]
    table = [[row[i] if row.get(i, 0) > 0 else None for i in at] for row in rows]
    layout = axes("iteration", "block")
    layout["xaxis"] |= {"type": "category", "nticks": 8}
    layout["yaxis"] |= {"autorange": "reversed", **_whole(len(rows))}
    layout["height"] = 160 + 12 * min(max(len(rows), 5), 40)
    places = {"x": [str(i) for i in at]}
    return {
        "data": [_log_heat(table, places, f"iteration %{{x}}, block %{{y}}: %{{customdata:.3g}} {what}")],
        "layout": layout,
    }


def measured(points: Sequence[tuple[int, float, float | None, float | None]]) -> list[Figure]:
    """Measured and predicted loss divergence, over iterations and against each other.

    points: each plan's iteration, measured mean, standard error and prediction.
    """
    points = [points[i] for i in picked(len(points), MOST_MARKS)] if points else []
    bars = {"type": "data", "array": [2 * p[2] if p[2] is not None else 0.0 for p in points], "thickness": 1.2}
    at, means = [p[0] for p in points], [p[1] for p in points]
    known = [(p[0], p[3]) for p in points if p[3] is not None]
    data = [line("measured", (at, means), PALETTE[0], mode="markers", error_y=bars)]
    if known:
        data.append(line("predicted", tuple(zip(*known)), PALETTE[1], mode="lines+markers"))
    figures: list[Figure] = [{"data": data, "layout": axes("iteration", "loss divergence (nats)")}]
    both = [(p[3], p[1], p[2], p[0]) for p in points if p[3] is not None]
    if len(both) > 1:
        ends = [min(p[0] for p in both), max(p[0] for p in both)]
        bars = {**bars, "array": [2 * error if error is not None else 0.0 for _, _, error, _ in both]}
        scatter = line("plans", ([p[0] for p in both], [p[1] for p in both]), PALETTE[0], mode="markers", error_y=bars)
        scatter |= {"text": [f"iteration {p[3]}" for p in both]}
        equal = line("as predicted", (ends, ends), PALETTE[1], dash="dot")
        layout = axes("predicted (nats)", "measured (nats)")
        low, high = min(p[1] - 2 * (p[2] or 0.0) for p in both), max(p[1] + 2 * (p[2] or 0.0) for p in both)
        span = [min(low, ends[0]), max(high, ends[1])]
        edge = 0.05 * (span[1] - span[0])
        for axis in layout.values():  # equal, so that the diagonal is one
            axis |= {"range": [span[0] - edge, span[1] + edge], "constrain": "domain"}
        layout["yaxis"]["scaleanchor"] = "x"
        figures.append({"data": [equal, scatter], "layout": layout})
    return figures


def pareto(
    frontier: Sequence[tuple[float, float]], others: Mapping[str, Sequence[tuple[float, float, str]]], what: str
) -> Figure:
    """Quality loss over the share saved.  Solved plans are a line, others labelled points.  what: x axis."""
    data = [line("solved for each share", tuple(zip(*frontier)), PALETTE[0], mode="lines+markers")]
    symbols = ("star", "circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
    for number, (name, points) in enumerate(others.items()):
        dots = line(name, ([p[0] for p in points], [p[1] for p in points]), (*PALETTE[1:],)[number % 7], mode="markers")
        dots["marker"] = {"symbol": symbols[number % len(symbols)], "size": 15 if number == 0 else 8}
        data.append({**dots, "text": [text for _, _, text in points]})
    layout = axes(what, "quality loss")
    layout["xaxis"] |= {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return {"data": data, "layout": layout}


def stages(found: Sequence[tuple[int, float, float]]) -> Figure:
    """(stage, FP4 share, modelled time) as bars."""
    names = [f"stage {stage}" for stage, _, _ in found]
    bars = {
        "type": "bar", "x": names, "y": _rounded([time for _, _, time in found]), "marker": {"color": PALETTE[0]},
        "text": [f"{share:.1%} in FP4" for _, share, _ in found],
        "name": "modelled time", "showlegend": False, "width": 0.5,
    }  # fmt: skip
    layout = axes("", "modelled time, share of all in BF16")
    slowest = max(time for _, _, time in found)
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": slowest, "y1": slowest,
         "line": {"color": _MARK, "dash": "dot", "width": 1}}
    ]  # fmt: skip
    return {"data": [bars], "layout": layout}


def curves(lines: Mapping[str, Curve], what: str, tickformat: str = "") -> Figure:
    """Lines over iterations.  what: title of the y axis."""
    layout = axes("iteration", what)
    layout["yaxis"] |= {"rangemode": "tozero", "tickformat": tickformat}
    data = [line(name, curve, PALETTE[i % len(PALETTE)], width=1.3) for i, (name, curve) in enumerate(lines.items())]
    return {"data": data, "layout": layout}


def line(name: str, curve: Any, colour: str, *, width: float = 2, **more: Any) -> Figure:
    """The trace of a line.  dash and shape are options of the line, all others of the trace."""
    style = {"color": colour, "width": width} | {key: more.pop(key) for key in ("dash", "shape") if key in more}
    single = {"mode": "markers"} if len(curve[0]) == 1 else {"mode": "lines"}
    floats = any(isinstance(x, float) for x in curve[0])
    xs, ys = (_rounded(curve[0]), _rounded(curve[1])) if floats else thinned(curve)
    return {"type": "scatter", "name": name, "x": xs, "y": ys, "line": style, **single, **more}


def _new_plans(marks: Sequence[tuple[int, float]]) -> Figure:
    """A vertical line per new plan, on a separate axis from 0 to 1."""
    kept = [marks[i] for i in picked(len(marks), MOST_MARKS)]
    texts = [f"plan from iteration {iteration}: {share:.1%} in FP4" for iteration, share in kept]
    labels = [f"{share:.0%}" if len(kept) <= MOST_LABELS else "" for _, share in kept]
    return {
        "type": "scatter", "mode": "lines+text", "name": "new plan", "yaxis": "y2",
        "line": {"color": _MARK, "width": 1, "dash": "dot"},
        "x": [x for iteration, _ in kept for x in (iteration, iteration, None)], "y": [0, 1, None] * len(kept),
        "text": [t for label in labels for t in ("", label, "")], "textposition": "bottom right",
        "textfont": {"color": _MARK, "size": 11},
        "hovertext": [t for text in texts for t in (text, text, "")], "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _log_heat(table: list[list[float | None]], places: Figure, text: str, among: Iterable[float] = ()) -> Figure:
    """A heatmap of logarithms.  Its colour bar and hover text show the values.  among: as divergence_heatmap's."""
    logs = [[None if v is None else round(math.log10(v), 4) for v in row] for row in table]
    known = [v for row in logs for v in row if v is not None]
    if shared := [math.log10(v) for v in among if v > 0 and math.isfinite(v)]:
        places, known = {**places, "zmin": min(shared), "zmax": max(shared)}, shared
    ticks = _log_ticks([10**v for v in known])
    return {
        "type": "heatmap", "z": logs, "customdata": [_rounded(row) for row in table], **places, "hoverongaps": False,
        "colorscale": "YlOrRd", "reversescale": True, "xgap": 1, "ygap": 1,
        "hovertemplate": text + "<extra></extra>",
        "colorbar": {
            "thickness": 10, "outlinewidth": 0,
            "tickvals": [math.log10(t) for t in ticks], "ticktext": [_tick(t) for t in ticks],
        },
    }  # fmt: skip


def _log_ticks(values: Sequence[float]) -> list[float]:
    """At most six powers of ten in the range of the values, or steps of 1, 2 and 5 if the range is small."""
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    if high - low <= 2:
        return [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in (1, 2, 5)]
    return [float(f"1e{power}") for power in range(low, high + 1, -(-(high - low) // 5))]


def _tick(value: float) -> str:
    """A tick's text, in plotly's notation: 0.0001, 1e-5."""
    return re.sub(r"e-0", "e-", f"{value:g}")


def axes(x: str, y: str) -> Figure:
    """A layout with these titles of the axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _heatmap_layout(kinds: Sequence[str], blocks: int) -> Figure:
    layout = axes("block", "")
    layout["xaxis"] |= {"showgrid": False, "zeroline": False, "range": [-0.5, blocks - 0.5], **_whole(blocks)}
    layout["yaxis"] |= {"showgrid": False, "zeroline": False, "ticktext": list(kinds)}
    layout["height"] = 130 + 30 * max(len(kinds), 3)
    return layout


def _whole(count: int) -> Figure:
    """Ticks at whole numbers below ``count``, sixteen at most."""
    return {"tick0": 0, "dtick": -(-count // 16), "tickformat": "d"}


def _range(all_curves: Sequence[Curve]) -> list[float] | None:
    """A range without the first twentieth and single spikes, which would flatten the rest."""
    iterations = [i for xs, _ in all_curves for i in xs]
    if len(iterations) < 40:
        return None
    start = min(iterations) + 0.05 * (max(iterations) - min(iterations))
    late = [y for xs, ys in all_curves for x, y in zip(xs, ys) if x >= start]
    low, top = min(late), float(np.percentile(late, 99.8))
    return [low - 0.05 * (top - low), top + 0.3 * (top - low)] if top > low else None


def _rounded(values: Iterable[Any]) -> list[Any]:
    """The values to six significant digits, more than a screen shows; None if not finite."""
    return [float(f"{v:.6g}") if v is not None and math.isfinite(v) else None for v in values]
