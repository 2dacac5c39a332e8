"""Is the loss of single linears of a real model predicted well, and how good is a plan by what was measured?

    megatron-snip probe --load FOLDER ... --snip-options fp8,fp4 --output stats.json
    for text in prose code; do  # they can run side by side
        python -m examples.study.judge FOLDER --alone fp4 --texts $text --json > $text.jsonl
    done
    python -m examples.study.real_linears stats.json prose.jsonl code.jsonl --output linears --snip-target 0.75
    python -m examples.study.judge FOLDER linears/oracle.json linears/snip.json

OUTPUT gets linears.json and linears.png, predicted against measured, and two plans by linear: oracle.json minimises
what was measured, snip.json what was predicted.  The other format is taken to cost what was predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.cli.generate_plan import make_planner
from megatron_snip.errors import UserError
from megatron_snip.files.json import write_json
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.predict.divergence import Predictions


def measured_in(files: Sequence[Path], count: int) -> tuple[str, dict[str, tuple[float, float]]]:
    """The format, and the increase in nats of each of ``count`` linears with its standard error: means over files."""
    found: dict[str, list[tuple[float, float]]] = {}
    for file in files:
        for row in map(json.loads, file.read_text().splitlines()):
            if "=" in row["plan"]:
                found.setdefault(row["plan"], []).append(row["increase"]["all"])
    if not found or {len(each) for each in found.values()} != {len(files)} or len(found) != count:
        files_are = ", ".join(map(str, files))
        raise UserError(f"{files_are}: not each has all {count} linears; let judge.py --alone come to its end")
    (fmt,) = {plan.partition("=")[2] for plan in found}
    means = {plan.partition("=")[0]: np.array(each) for plan, each in found.items()}
    return fmt, {
        name: (float(each[:, 0].mean()), float(np.hypot.reduce(each[:, 1]) / len(each))) for name, each in means.items()
    }


def draw(rows: Mapping[str, Mapping[str, float]], fmt: str, path: Path) -> None:
    """A point for each linear: predicted and measured milli-nats, with two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 4.4))
    for number, kind in enumerate(sorted({name.rpartition(".")[2] for name in rows})):
        own = [row for name, row in rows.items() if name.endswith(kind)]
        x, y, error = (np.array([1e3 * row[key] for row in own]) for key in ("predicted", "measured", "error"))
        axis.errorbar(x, y, 2 * error, fmt="o", ms=3, lw=0.7, color=f"C{number}", label=kind.removesuffix("_proj"))
    ends = [1e3 * pick(row["predicted"] for row in rows.values()) for pick in (min, max)]
    axis.plot(ends, ends, "--", lw=0.8, color="#1c2430")
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=1.0)
    axis.set_xlabel("predicted, milli-nats a token")
    axis.set_ylabel(f"measured with this linear alone in {fmt}")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stats", type=Path, help="of megatron-snip probe")
    parser.add_argument("judged", type=Path, nargs="+", help="lines of judge.py --alone, a file for each text")
    parser.add_argument("--output", type=Path, required=True, help="folder for what is found")
    own, rest = parser.parse_known_args(words)
    planner = make_planner(parse(["--snip-granularity", "linear", *rest]), own.stats)
    fmt, measured = measured_in(own.judged, len(planner.shapes))
    predicted = Predictions.of(planner.stats).loss
    rows: dict[str, Any] = {
        name: {"predicted": predicted[name][fmt], "measured": mean, "error": error}
        for name, (mean, error) in measured.items()
    }
    columns = [[row[key] for row in rows.values()] for key in ("predicted", "measured")]
    own.output.mkdir(parents=True, exist_ok=True)
    request = planner.request("snip")
    quality, low = request.quality_loss.copy(), planner.choices.options.index(LinearPrecision.uniform(fmt))
    more = [rows[shape.name]["measured"] - rows[shape.name]["predicted"] for shape in planner.shapes]
    quality[:, low] += np.array(more) / planner.stats.loss
    oracle = replace(request, quality_loss=quality).solve()
    planner.plan(oracle, "oracle", request.target).save(own.output / "oracle.json")
    planner.solve("snip").save(own.output / "snip.json")
    found = {
        "format": fmt,
        "rank correlation": float(spearmanr(*columns).statistic),
        "sums": [*map(sum, columns)],
        "linears": rows,
    }
    write_json(own.output / "linears.json", found)
    draw(rows, fmt, own.output / "linears.png")
    print(
        f"{len(rows)} linears in {fmt}: rank correlation {found['rank correlation']:.2f}, in sum predicted "
        f"{sum(columns[0]):.3f} and measured {sum(columns[1]):.3f} nats"
    )


if __name__ == "__main__":
    with runtime.report_errors():
        main()
