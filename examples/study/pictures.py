"""Pictures of the study, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from examples.study.quality import ORACLE

SHOWN = ("dL", "dL+own", "own", "abs_err", "rel_err", "random_0")
AFTER = (
    "all fp8", "gemm dL", "gemm dL+own", "linear dL", "linear dL+own", "linear oracle", "linear abs_err",
    "linear random_0", "linear random_1", "all fp4",
)  # fmt: skip


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
    """Validation loss after more steps over BF16's of the same seed, a panel a setting, one point a seed."""
    fig, axes = plt.subplots(1, len(figures), figsize=(4 * len(figures), 4), sharey=True, squeeze=False)
    for axis, (_, one) in zip(axes[0], figures.items()):
        about = one["about"]["setting"]
        for number, (checkpoint, values) in enumerate(one["checkpoints"].items()):
            of = {arm.replace(f" {about['targets'][0]}", ""): row["by seed"]
                  for row in values["further"].values() for arm in row["arms"]}  # fmt: skip
            points = [
                (1000 * (loss - of["bf16"][seed]), AFTER.index(arm))
                for arm in of if arm in AFTER for seed, loss in of[arm].items() if seed in of.get("bf16", {})
            ]  # fmt: skip
            if points:
                axis.plot(*zip(*points), "o", ms=4, alpha=0.6, color=f"C{number}", label=checkpoint)
        axis.set_title(f"{about['name']}, lr {about['further_lr']:g}", fontsize=8)
        axis.set_xlabel("validation loss over BF16's, milli-nats")
        axis.set_yticks(range(len(AFTER)), AFTER)
        axis.set_xscale("symlog", linthresh=5)
        axis.axvline(0, color="grey", lw=0.8)
        axis.grid(alpha=0.3)
    axes[0][0].invert_yaxis()
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)
