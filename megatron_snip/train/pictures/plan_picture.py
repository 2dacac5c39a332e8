"""A plan as a static picture for wandb and TensorBoard, on matplotlib's Agg canvas.

It does not use pyplot, which has global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.pictures.figures import Grid, colours_of

Axes = Any  # matplotlib is not checked by mypy

_INK, _FAINT, _EMPTY = "#1c2430", "#8792a2", "#e9ecf0"


def plan_png(plan: Plan) -> io.BytesIO:
    """One plan's heatmap in memory.  Each cell is a linear, with bands for fprop, dgrad and wgrad from the top."""
    grid, formats = Grid(plan.linears), colours_of([plan])
    width = min(15.0, max(6.0, 1.3 + 0.22 * max(grid.blocks, 10)))
    figure = Figure(figsize=(width, 1.45 + 0.24 * max(len(grid.kinds), 5)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    draw_plan(axes, plan, grid, formats)
    handles = [Patch(facecolor=colour, label=name) for name, colour in formats.items()]
    figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=len(handles))
    if any(len({p.fprop, p.dgrad, p.wgrad}) > 1 for p in plan.linears.values()):
        figure.supxlabel("bands of a cell from the top: fprop, dgrad, wgrad", fontsize=9, color=_FAINT)
    png = io.BytesIO()
    figure.savefig(png, format="png", facecolor="white")
    png.seek(0)
    return png


def draw_plan(axes: Axes, plan: Plan, grid: Grid, colours: Mapping[str, str]) -> None:
    """Draw one plan's heatmap into matplotlib axes; ``colours_of`` gives the colours of formats."""
    bands, formats = len(GEMMS), list(colours)
    table = np.full((len(grid.kinds) * bands, grid.blocks), np.nan)
    for name, (row, block) in grid.cells.items():
        for band, gemm in enumerate(GEMMS):
            table[row * bands + band, block] = formats.index(getattr(plan.linears[name], gemm))
    axes.imshow(
        table,
        cmap=ListedColormap(list(colours.values())),
        aspect="auto",
        interpolation="nearest",
        vmin=-0.5,
        vmax=len(formats) - 0.5,
    )
    axes.set_title(f"iteration {plan.iteration}: {plan.achieved:.1%} FP4", loc="left", fontsize=10, color=_INK)
    axes.set_yticks([row * bands + (bands - 1) / 2 for row in range(len(grid.kinds))], grid.kinds, fontsize=9)
    step = 1 if grid.blocks <= 12 else 2 if grid.blocks <= 24 else 5 if grid.blocks <= 48 else 10
    axes.set_xticks(range(0, grid.blocks, step), [str(block) for block in range(0, grid.blocks, step)], fontsize=8)
    axes.tick_params(length=0, colors=_INK)
    axes.spines[:].set_visible(False)
    axes.set_facecolor(_EMPTY)
    axes.set_xlim(-0.5, grid.blocks - 0.5)
    axes.set_ylim(max(1, len(grid.kinds) * bands) - 0.5, -0.5)
    line = {"color": "white", "zorder": 3}
    axes.vlines(np.arange(1, grid.blocks) - 0.5, -0.5, len(grid.kinds) * bands - 0.5, linewidth=0.8, **line)
    axes.hlines(np.arange(1, len(grid.kinds)) * bands - 0.5, -0.5, grid.blocks - 0.5, linewidth=1.6, **line)
    axes.set_xlabel("block", fontsize=9, color=_INK)
