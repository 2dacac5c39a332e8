"""The pictures of docs/how_snip_decides.md, from a real run: its statistics, and plans that are made of them.

    python docs/site/pictures.py runs/quickstart/stats/iter_0000090.json --output docs/images

Written: snip_formats.png, what values FP8 and FP4 have; snip_costs.png, the predicted loss divergence of every linear
in FP4; snip_plan.png, the plan for 75%; snip_tradeoff.png, what each share of FP4 costs.  The statistics may be those
of tools/collect_stats.py, too.  Convention: costs are nats a token.
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
from megatron_snip.formats import get_format
from megatron_snip.quant import KINDS
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.predict.divergence import Predictions

TARGET = 0.75
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


def draw(statistics: Path, output: Path) -> None:
    """All four."""
    stats = Statistics.load(statistics)
    blocks = 1 + max(shape.block for shape in stats.shapes)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        words = ["--stats", str(statistics), "--efficiency-saving", str(TARGET), "--options", "fp8,fp4"]
        if generate_plan([*words, "--num-random", "20", "--output-dir", name]):
            raise SystemExit(1)
        found = json.loads((Path(name) / "pareto.json").read_text())
        chosen = Plan.load(Path(name) / "best.json")
    formats(output / "snip_formats.png")
    costs(output / "snip_costs.png", {name: row["fp4"] for name, row in Predictions.of(stats).loss.items()}, blocks)
    plan(output / "snip_plan.png", chosen, blocks)
    tradeoff(output / "snip_tradeoff.png", found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("statistics", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    draw(arguments.statistics, arguments.output)


if __name__ == "__main__":
    main()
