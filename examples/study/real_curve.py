"""What plans of a real model cost by their share of FP4: a picture and a JSON file of what the judge measured.

    for share in 0.25 0.5 0.75 0.9; do
        megatron-snip plan --stats runs/smollm2/stats.json --snip-options fp8,fp4 --snip-target $share \
            --num-random 1 --output-dir runs/curve/fp8,fp4/$share
    done
    python -m examples.study.judge FOLDER fp8 fp4 runs/curve/fp8,fp4/*/*_*.json runs/curve/fp8,fp4/*/best.json \
        --tokens 2048 --json > runs/curve/fp8,fp4/judged.jsonl
    python -m examples.study.real_curve runs/curve/* --output curve.png --json curve.json

Each folder is named by its two options, and gets a panel.  Loss increases are nats a token above unrounded linears.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_snip.files.json import write_json

ARMS = {"best": "snip", "layer_id": "layer_id", "layer_type": "layer_type", "random_0": "random"}


def curves_of(folder: Path) -> dict[str, Any]:
    """Options, and rows of share, arm, measured increase with its standard error, and predicted increase."""
    options, rows = folder.name.split(","), []
    for line in (folder / "judged.jsonl").read_text().splitlines():
        judged = json.loads(line)
        if "increase" not in judged:
            continue
        increase, error = judged["increase"]["all"]
        path, predicted = Path(judged["plan"]), None
        if judged["plan"] in options:
            arm, share = "everywhere", float(options.index(judged["plan"]))
        else:
            arm, share = ARMS[path.stem], float(path.parent.name)
            plan = json.loads((folder / path.parent.name / "pareto.json").read_text())["plans"][path.stem]
            predicted = plan["loss_divergence"]
        rows.append({"share": share, "arm": arm, "increase": increase, "error": error, "predicted": predicted})
    return {"options": options, "rows": sorted(rows, key=lambda row: (row["arm"], row["share"]))}


def draw(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each pair of options: measured increase by share, a line for each arm, and the plan's prediction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 4.2), squeeze=False)
    for axis, one in zip(axes[0], curves, strict=True):
        rows = one["rows"]
        ends = [row for row in rows if row["arm"] == "everywhere"]
        for number, arm in enumerate(ARMS.values()):
            points = sorted([*(row for row in rows if row["arm"] == arm), *ends], key=lambda row: row["share"])
            axis.errorbar(
                [100 * row["share"] for row in points], [row["increase"] for row in points],
                yerr=[row["error"] for row in points], fmt="o-", ms=4, lw=1.5 if arm == "snip" else 1, capsize=2,
                color=f"C{number}", label="plan of snip" if arm == "snip" else arm,
            )  # fmt: skip
        told = [row for row in rows if row["arm"] == "snip"]
        axis.plot([100 * r["share"] for r in told], [r["predicted"] for r in told], "x--", color="C0", lw=1,
                  label="its prediction")  # fmt: skip
        axis.set_title(f"{one['options'][1]}, the rest in {one['options'][0]}", fontsize=10)
        axis.set_xlabel(f"share of FLOPs in {one['options'][1]}, %")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss above BF16's, nats a token")
    axes[0][0].legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="named by their options, with judged.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="the picture")
    parser.add_argument("--json", type=Path, help="the figures")
    own = parser.parse_args(words)
    curves = [curves_of(folder) for folder in own.folders]
    draw(curves, own.output)
    if own.json is not None:
        write_json(own.json, {"curves": curves})


if __name__ == "__main__":
    main()
