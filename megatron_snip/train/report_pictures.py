"""The report's pictures, drawn with matplotlib's Agg canvas: loss, plans, divergences.

Convention: every function takes plain values and the file to write, and returns that file.
Heatmaps have a row per kind of linear and a column per block.  No pyplot: it holds global state.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.model.spec import linear_place
from megatron_snip.quant import GEMMS, KINDS
from megatron_snip.snip.plan import Plan

Axes = Any  # matplotlib is not checked by mypy
Curve = tuple[Sequence[int], Sequence[float]]

_INK, _FAINT, _EMPTY = "#1c2430", "#8792a2", "#e9ecf0"
_TRAINING, _SMOOTH, _VALIDATION, _MARK = "#a9c0dd", "#4c7db3", "#123f7a", "#c8641b"
_COLOURS = {"bf16": "#dfe5ec", "fp8": "#5b8fbf", "fp4": "#e8893c"}
_SPARE_COLOURS = ("#7a5ba6", "#3f9a7a", "#c9a227", "#b0507a", "#4d6b3c", "#8c2f1b")
_MOST_LABELS, _MOST_PLANS = 12, 12  # half as many plans where each takes the whole width


def loss(path: Path, curves: Mapping[str, Curve], marks: Sequence[tuple[int, float]]) -> Path:
    """Loss over iterations.  curves: "training", "validation"; marks: each plan's iteration and FP4 share."""
    figure = _figure(10, 4.6)
    axes: Axes = figure.add_subplot()
    _tidy(axes)
    iterations, values = curves["training"]
    dot = {"marker": "o", "markersize": 3} if len(values) == 1 else {}
    axes.plot(iterations, values, color=_TRAINING, linewidth=0.9, label="training", **dot)
    if len(values) >= 50:
        window = max(2, len(values) // 100)
        style = {"color": _SMOOTH, "linewidth": 1.6}
        axes.plot(iterations, _smooth(values, window), label=f"mean of {2 * window + 1}", **style)
    iterations, values = curves["validation"]
    if values:
        style = {"color": _VALIDATION, "linewidth": 1.4, "marker": "o", "markersize": 4, "zorder": 4}
        axes.plot(iterations, values, label="validation", **style)
    _mark_plans(axes, marks)
    _set_ranges(axes, curves)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside upper left", frameon=False, ncols=4)
    return _save(figure, path)


def plans(path: Path, all_plans: Sequence[Plan]) -> Path:
    """One heatmap per plan: each cell a linear, its three bands fprop, dgrad and wgrad from the top.

    Of many plans the first, the last and some between are shown.
    """
    return _save(_plans_figure(all_plans), path)


def plan_png(plan: Plan) -> io.BytesIO:
    """The heatmap of one plan as a PNG in memory."""
    png = io.BytesIO()
    _plans_figure([plan]).savefig(png, format="png", facecolor="white")
    png.seek(0)
    return png


def pareto(
    path: Path, frontier: Sequence[tuple[float, float]], others: Mapping[str, tuple[float, float]], what: str
) -> Path:
    """Quality loss over the share saved: solved plans as a line, others as named points; what: the x axis."""
    figure = _figure(8, 4.8)
    axes: Axes = figure.add_subplot()
    _tidy(axes)
    style = {"color": _VALIDATION, "linewidth": 1.4, "marker": "o", "markersize": 3.5, "zorder": 3}
    axes.plot(*zip(*frontier), label="solved for each share", **style)
    kinds = dict.fromkeys(name.rstrip("0123456789").rstrip("_") for name in others)
    for kind, colour, marker in zip(kinds, (_MARK, *_SPARE_COLOURS * len(kinds)), "*osD^vPX" * len(kinds)):
        points = [point for name, point in others.items() if name.rstrip("0123456789").rstrip("_") == kind]
        axes.scatter(*zip(*points), color=colour, marker=marker, s=70 if marker == "*" else 34, zorder=4, label=kind)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel(what)
    axes.set_ylabel("quality loss")
    figure.legend(loc="outside upper left", frameon=False, ncols=4)
    return _save(figure, path)


def _plans_figure(all_plans: Sequence[Plan]) -> Figure:
    names = list(dict.fromkeys(name for plan in all_plans for name in plan.linears))
    grid = _Grid(names)
    kinds, blocks = grid.kinds, grid.blocks
    columns = 1 if blocks > 40 else 2 if blocks > 16 else 3
    most = _MOST_PLANS if columns > 1 else _MOST_PLANS // 2
    picked = sorted(set(np.linspace(0, len(all_plans) - 1, min(len(all_plans), most)).round().astype(int)))
    columns = min(columns, len(picked))
    lines = -(-len(picked) // columns)
    width = min(15.0, max(6.0, columns * (1.3 + 0.22 * max(blocks, 10))))
    figure = _figure(width, 0.7 + lines * (0.75 + 0.24 * max(len(kinds), 5)))
    places = figure.subplots(lines, columns, squeeze=False)
    formats = _formats_of(all_plans)
    for place, axes in enumerate(places.flat):
        if place >= len(picked):
            axes.set_visible(False)
            continue
        index = picked[place]
        before = all_plans[picked[place - 1]] if place else None
        _draw_plan(axes, all_plans[index], before, grid, formats)
        if place % columns:
            axes.tick_params(labelleft=False)
        if place + columns < len(picked):
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
    handles = [Patch(facecolor=colour, label=name) for name, colour in formats.items()]
    figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=len(handles))
    if any(len(set(vars(p).values())) > 1 for plan in all_plans for p in plan.linears.values()):
        figure.supxlabel("bands of a cell from the top: fprop, dgrad, wgrad", fontsize=9, color=_FAINT)
    return figure


def divergences(path: Path, values: Mapping[str, Mapping[str, float]]) -> Path:
    """One heatmap per kind of divergence, log colour.  values: kind -> linear -> value; <= 0 stays grey."""
    names = list(dict.fromkeys(name for linears in values.values() for name in linears))
    grid = _Grid(names)
    kinds, blocks = grid.kinds, grid.blocks
    columns = 1 if blocks > 24 else len(values)
    lines = -(-len(values) // columns)
    width = min(15.0, max(6.0, columns * (2.4 + 0.26 * max(blocks, 10))))
    figure = _figure(width, lines * (1.1 + 0.27 * max(len(kinds), 5)))
    for place, (kind, linears) in enumerate(values.items()):
        axes = figure.add_subplot(lines, columns, place + 1)
        table = np.full((len(kinds), blocks), np.nan)
        for name, value in linears.items():
            if value > 0 and name in grid.cells:
                table[grid.cells[name]] = value
        axes.set_title(kind.replace("_", " "), loc="left", fontsize=11, color=_INK)
        if np.isfinite(table).any():
            low, high = float(np.nanmin(table)), float(np.nanmax(table))
            norm = LogNorm(low, high if high > low else low * 1.01)
            image = axes.imshow(table, norm=norm, cmap="YlOrRd", aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes, pad=0.015, aspect=14)
        _heatmap_axes(axes, kinds, blocks, bands=1)
    return _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, facecolor="white")
    return path


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.grid(axis="y", color=_EMPTY, linewidth=0.8)
    axes.set_axisbelow(True)


def _smooth(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Mean of each value and up to ``window`` neighbours on either side, as many on both."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    place = np.arange(len(values))
    reach = np.minimum(window, np.minimum(place, len(values) - 1 - place))
    return (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)


def _set_ranges(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Leave out the fall of the first twentieth and single spikes: they would flatten the rest."""
    iterations = [iteration for places, _ in curves.values() for iteration in places]
    if len(set(iterations)) == 1:
        axes.set_xlim(iterations[0] - 1, iterations[0] + 1)
    if len(iterations) < 40:
        return
    start = min(iterations) + 0.05 * (max(iterations) - min(iterations))
    late = [v for places, values in curves.values() for i, v in zip(places, values) if i >= start]
    low, top = min(late), float(np.percentile(late, 99.8))
    if top > low:
        axes.set_ylim(low - 0.05 * (top - low), top + 0.3 * (top - low))


def _mark_plans(axes: Axes, marks: Sequence[tuple[int, float]]) -> None:
    """A vertical line per plan; at most 12 of them labelled, at even steps back from the last."""
    every = -(-len(marks) // _MOST_LABELS) or 1
    for number, (iteration, share) in enumerate(marks):
        axes.axvline(iteration, color=_MARK, linewidth=0.9, alpha=0.75, linestyle=(0, (4, 3)), zorder=1)
        if (len(marks) - 1 - number) % every == 0:
            label = axes.annotate(
                f"{iteration}: {share:.1%} FP4",
                (iteration, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize=8,
                color=_MARK,
                annotation_clip=True,
            )
            label.set_in_layout(False)  # a plan beyond the last recorded iteration must not squeeze the picture


class _Grid:
    """Where linears of our models stand in a heatmap: rows are kinds, columns blocks.  Other names have no cell."""

    def __init__(self, names: Iterable[str]) -> None:
        places = {name: place for name in names if (place := linear_place(name)) is not None}
        self.kinds = [kind for kind in KINDS if kind in {kind for _, kind, _ in places.values()}]
        self.blocks = 1 + max((block for block, _, _ in places.values()), default=0)
        self.cells = {name: (self.kinds.index(kind), block) for name, (block, kind, _) in places.items()}


def _formats_of(all_plans: Sequence[Plan]) -> dict[str, str]:
    """Formats in use, widest elements first -> colour."""
    found = {getattr(p, gemm) for plan in all_plans for p in plan.linears.values() for gemm in GEMMS}
    ordered = sorted(found, key=lambda name: (-get_format(name).element_bits, name))
    spare = iter(_SPARE_COLOURS * len(ordered))
    return {name: _COLOURS.get(name) or next(spare) for name in ordered}


def _heatmap_axes(axes: Axes, kinds: Sequence[str], blocks: int, bands: int) -> None:
    """Rows of ``bands`` pixels with the kinds' short names, columns of blocks, white lines between cells."""
    centres = [row * bands + (bands - 1) / 2 for row in range(len(kinds))]
    axes.set_yticks(centres, list(kinds), fontsize=9)
    step = 1 if blocks <= 12 else 2 if blocks <= 24 else 5 if blocks <= 48 else 10
    axes.set_xticks(range(0, blocks, step), [str(block) for block in range(0, blocks, step)], fontsize=8)
    axes.tick_params(length=0, colors=_INK)
    axes.spines[:].set_visible(False)
    axes.set_facecolor(_EMPTY)
    axes.set_xlim(-0.5, blocks - 0.5)
    axes.set_ylim(max(1, len(kinds) * bands) - 0.5, -0.5)
    line = {"color": "white", "zorder": 3}
    axes.vlines(np.arange(1, blocks) - 0.5, -0.5, len(kinds) * bands - 0.5, linewidth=0.8, **line)
    axes.hlines(np.arange(1, len(kinds)) * bands - 0.5, -0.5, blocks - 0.5, linewidth=1.6, **line)
    axes.set_xlabel("block", fontsize=9, color=_INK)


def _draw_plan(axes: Axes, plan: Plan, before: Plan | None, grid: _Grid, formats: Mapping[str, str]) -> None:
    table = np.full((len(grid.kinds) * len(GEMMS), grid.blocks), np.nan)
    for name, (row, block) in grid.cells.items():
        for band, gemm in enumerate(GEMMS) if name in plan.linears else ():
            table[row * len(GEMMS) + band, block] = list(formats).index(getattr(plan.linears[name], gemm))
    limits = {"vmin": -0.5, "vmax": len(formats) - 0.5}
    colours = ListedColormap(list(formats.values()))
    axes.imshow(table, cmap=colours, aspect="auto", interpolation="nearest", **limits)
    _heatmap_axes(axes, grid.kinds, grid.blocks, bands=len(GEMMS))
    title = f"iteration {plan.iteration}: {plan.achieved:.1%} FP4"
    if before is not None:
        title += f", {plan.churn(before):.0%} changed"
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
