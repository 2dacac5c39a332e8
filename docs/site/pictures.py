"""The pictures of the README and of docs/how_snip_decides.md, from the folder of a real run.

    python docs/site/pictures.py runs/quickstart --output docs/images

Written: snip_run.png, the run's loss and its first plans; and from its last statistics snip_formats.png, what values
FP8 and FP4 have; snip_costs.png, the predicted loss divergence of every linear in FP4; snip_plan.png, the plan for 75%;
snip_tradeoff.png, what each share of FP4 costs.  Convention: losses and costs are nats a token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_snip.cli.generate_plan import main as generate_plan
from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line
from megatron_snip.formats import get_format
from megatron_snip.quant import KINDS
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.pictures.figures import Grid, colours_of, smooth
from megatron_snip.train.pictures.plan_picture import draw_plan
from megatron_snip.train.report.run_summary import Run, read_run

TARGET = 0.75
SHOWN, WINDOW = 3, 2  # plans of a run, and neighbours on either side in a mean of losses
FP8, FP4, INK, FAINT = "#5b8fbf", "#e8893c", "#1c2430", "#8792a2"


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def formats(path: Path) -> None:
    """The values of both formats up to FP4's largest, each as a line."""
    figure, axes = _figure(8, 1.9)
    for row, (name, colour) in enumerate((("fp4", FP4), ("fp8", FP8))):
        values = [sign * value for value in get_format(name).element.values() if value <= 6 for sign in (-1, 1)]
        axes.vlines(values, row - 0.3, row + 0.3, colors=colour, linewidth=2 if name == "fp4" else 0.8)
    axes.set_yticks([0, 1], ["FP4", "FP8"])
    axes.set_xlabel("value, before the scale of its tile")
    axes.set_xlim(-6.2, 6.2)
    figure.savefig(path, dpi=130)


def _grid(cells: Mapping[str, float], blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[kinds, blocks] from linears' names."""
    grid = np.full((len(KINDS), blocks), np.nan)
    for name, value in cells.items():
        _, block, _, kind = name.split(".")
        grid[KINDS.index(kind.removesuffix("_proj")), int(block)] = value
    return grid


def _label(axes: Any, blocks: int) -> None:
    axes.set_yticks(range(len(KINDS)), KINDS)
    axes.set_xticks(range(blocks))
    axes.set_xlabel("block")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def costs(path: Path, cells: Mapping[str, float], blocks: int) -> None:
    """What each linear would add to the loss in FP4, dark where it is dear."""
    figure, axes = _figure(1.6 + 0.7 * blocks, 3.1)
    grid = _grid(cells, blocks)
    positive = grid[grid > 0]
    image = axes.imshow(grid, cmap="Oranges", norm=LogNorm(positive.min(), positive.max()), aspect="auto")
    figure.colorbar(image, ax=axes, label="predicted cost in FP4 (nats)")
    _label(axes, blocks)
    figure.savefig(path, dpi=130)


def plan(path: Path, chosen: Plan, blocks: int) -> None:
    """Which linears the plan puts in FP4."""
    figure, axes = _figure(1.2 + 0.7 * blocks, 3.1)
    grid = _grid({name: float(str(option) == "fp4") for name, option in chosen.linears.items()}, blocks)
    axes.imshow(grid, cmap=ListedColormap([FP8, FP4]), vmin=0, vmax=1, aspect="auto")
    for edge in range(blocks):
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    for edge in range(len(KINDS)):
        axes.axhline(edge - 0.5, color="white", linewidth=2)
    handles = [Patch(color=FP8, label="FP8"), Patch(color=FP4, label="FP4")]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2, frameon=False)
    _label(axes, blocks)
    figure.savefig(path, dpi=130)


def tradeoff(path: Path, found: Mapping[str, Any]) -> None:
    """The cost of the best plan of each share, and of other plans of one share."""
    figure, axes = _figure(6.5, 3.4)
    frontier = found["frontier"]
    axes.plot(
        [p["fp4_share"] for p in frontier], [p["loss_divergence"] for p in frontier], color=INK, label="best plans"
    )
    names = {"random": FAINT, "layer": FP8}
    for kind, colour in names.items():
        points = [plan for name, plan in found["plans"].items() if name.startswith(kind)]
        label = "random plans" if kind == "random" else "simple rules"
        shares, lost = [p["fp4_share"] for p in points], [p["loss_divergence"] for p in points]
        axes.plot(shares, lost, "o", color=colour, label=label)
    best = found["plans"]["best"]
    axes.plot(best["fp4_share"], best["loss_divergence"], "o", color=FP4, markersize=9, label="the plan")
    axes.set_xlabel("FP4's share of the linears' FLOPs")
    axes.set_ylabel("predicted cost (nats)")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def run_with_plans(path: Path, run: Run) -> None:
    """The losses with a line at each new plan, and the first plans below."""
    shown = run.plans[:SHOWN]
    figure = Figure(figsize=(9.2, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subfigure(grid := figure.add_gridspec(2, 1, height_ratios=(5, 3))[0]).add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    (iterations, losses), validation = run.column("lm loss"), run.column("lm loss validation")
    means = smooth(losses, WINDOW)
    axes.plot(iterations, losses, color=FP8, alpha=0.5, linewidth=0.9, label="training")
    axes.plot(iterations[WINDOW:-WINDOW], means, color=FP8, label=f"mean of {2 * WINDOW + 1}")
    axes.plot(*validation, "o-", color=INK, markersize=4, label="validation")
    low, high = min(losses), max(losses[len(losses) // 20 :])  # the first iterations would take half of the height
    axes.set_ylim(low - 0.05 * (high - low), high)
    for plan in run.plans:
        axes.axvline(plan.iteration, color=FP4, linestyle="--", linewidth=1)
        words, beside = f"new plan: {plan.achieved:.0%} FP4", {"xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(words, (plan.iteration, high), color=FP4, fontsize=9, rotation=90, va="top", **beside)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats a token)")
    axes.legend(frameon=False, loc="lower left")
    formats_used = colours_of(shown)
    below = figure.add_subfigure(grid.get_gridspec()[1])
    for axes, plan in zip(np.atleast_1d(below.subplots(1, len(shown))), shown):
        draw_plan(axes, plan, Grid(plan.linears), formats_used)
    handles = [Patch(facecolor=colour, label=name) for name, colour in formats_used.items()]
    below.legend(handles=handles, loc="outside upper left", frameon=False, ncols=len(handles))
    figure.savefig(path, dpi=95)


def draw(run_dir: Path, output: Path) -> None:
    """All five."""
    run = read_run(run_dir)
    if run.stats is None or not run.plans or not run.metrics:
        raise UserError(f"{run_dir} has no plans to draw; give the folder of a run under --precision snip")
    stats = run.stats
    blocks = 1 + max(shape.block for shape in stats.shapes)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        stats.save(file := Path(name) / "statistics.json")
        words = ["--stats", str(file), "--snip-target", str(TARGET), "--snip-options", "fp8,fp4"]
        words += ["--snip-granularity", "linear"]  # the pages explain plans with one format a linear
        if generate_plan([*words, "--num-random", "20", "--output-dir", name]):
            raise SystemExit(1)
        found = json.loads((Path(name) / "pareto.json").read_text())
        chosen = Plan.load(Path(name) / "best.json")
    run_with_plans(output / "snip_run.png", run)
    formats(output / "snip_formats.png")
    costs(output / "snip_costs.png", {name: row["fp4"] for name, row in Predictions.of(stats).loss.items()}, blocks)
    plan(output / "snip_plan.png", chosen, blocks)
    tradeoff(output / "snip_tradeoff.png", found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    try:
        draw(arguments.run_dir, arguments.output)
    except UserError as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    main()
