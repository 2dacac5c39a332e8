"""Pictures of the study, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from examples.study.quality import ORACLE

SHOWN = (
    "dL",
    "dL+own",
    "dL+own+prop",
    "snip",
    "own",
    "prop",
    "ggn",
    "norms",
    "paper",
    "abs_err",
    "rel_err",
    "random_0",
)


def draw_switch(figures: dict[str, Any], path: Path) -> None:
    """Loss increase of plans of whole linears at the first target: a panel a setting, a colour a checkpoint."""
    fig, axes = plt.subplots(1, len(figures), figsize=(4 * len(figures), 4.5), sharey=True, squeeze=False)
    for axis, (_, one) in zip(axes[0], figures.items()):
        group = f"linear {one['about']['setting']['targets'][0]}"
        for number, (checkpoint, values) in enumerate(one["checkpoints"].items()):
            rows = values.get("increase", {}).get(group, {})
            arms = [arm for arm in (ORACLE, *SHOWN) if arm in rows]
            y = [((ORACLE, *SHOWN).index(arm)) + 0.22 * (number - 1) for arm in arms]
            axis.errorbar([1000 * rows[arm]["mean"] for arm in arms], y, fmt="o", ms=3, lw=1,
                          xerr=[1000 * rows[arm]["error"] for arm in arms], label=checkpoint)  # fmt: skip
        axis.set_title(one["about"]["setting"]["name"], fontsize=8)
        axis.set_xlabel("loss increase, milli-nats")
        axis.set_yticks(range(len(SHOWN) + 1), (ORACLE, *SHOWN))
        axis.set_xscale("symlog", linthresh=1)
        axis.grid(alpha=0.3)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_after(figures: dict[str, Any], path: Path) -> None:
    """Validation loss after more steps over BF16's of the same seed, a panel a setting."""
    fig, axes = plt.subplots(1, len(figures), figsize=(4.5 * len(figures), 4.5), squeeze=False)
    for axis, (_, one) in zip(axes[0], figures.items()):
        target = str(one["about"]["setting"]["targets"][0])
        for checkpoint, values in one["checkpoints"].items():
            rows = {}
            for row in values["further"].values():
                for arm in row["arms"] if "less bf16" in row else ():
                    if "BF16" not in arm and (arm in ("all fp8", "all fp4") or f" {target} " in arm):
                        rows[arm.replace(f" {target}", "")] = row["less bf16"]
            names = sorted(rows, key=lambda arm: rows[arm]["mean"])
            axis.errorbar([1000 * rows[name]["mean"] for name in names], names, fmt="o", ms=4, lw=1, label=checkpoint,
                          xerr=[1000 * (rows[name]["half"] or 0.0) for name in names])  # fmt: skip
        axis.set_title(one["about"]["setting"]["name"], fontsize=8)
        axis.set_xlabel("validation loss over BF16's, milli-nats")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)
