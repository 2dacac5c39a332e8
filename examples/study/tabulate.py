"""Tables, pictures and figures of the study:

    python -m examples.study.tabulate runs/study --output study.md --figures pictures [--json study.json]

Whatever is measured so far is told; what is missing has a dash.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.study.collect import Figures, figures_of_all, interval
from examples.study.pictures import draw_after, draw_switch
from examples.study.quality import ORACLE

DASH = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cells(figures: Figures) -> Iterator[tuple[str, str, Figures]]:
    """(setting, checkpoint, its figures), in the order of settings and iterations."""
    for setting, one in figures.items():
        for checkpoint, values in one["checkpoints"].items():
            yield setting, checkpoint, values


def _titles(figures: Figures, group: str) -> list[tuple[str, str, Figures]]:
    """Cells where most of a group's plans were evaluated; some are known from another group that has them too."""

    def most(one: Figures) -> bool:
        return len(one.get("increase", {}).get(group, {})) > 0.6 * len(one["plans"].get(group, {1: 1}))

    return [cell for cell in cells(figures) if most(cell[2])]


def _arms(columns: Sequence[tuple[str, str, Figures]], group: str) -> list[str]:
    return list(dict.fromkeys(arm for _, _, one in columns for arm in one["increase"][group]))


def _known(row: Figures | None, key: str) -> float:
    return float("nan") if row is None or row.get(key) is None else float(row[key])


def ratio_to_oracle(one: Figures, group: str, arm: str) -> float:
    """Loss increase by the oracle's at the same target; NaN where that is within two standard errors of 0."""
    rows, target = one["increase"], group.partition(" ")[2]
    best = rows.get(f"linear {target}", {}).get(ORACLE)
    if best is None or arm not in rows[group] or best["mean"] <= 2 * best["error"]:
        return float("nan")
    return rows[group][arm]["mean"] / best["mean"]


def share_of_avoidable(one: Figures, group: str, arm: str) -> float:
    """(plan - oracle) / (all FP4 - oracle), of loss increases; NaN where all FP4 is within four errors of oracle."""
    rows, target = one["increase"], group.partition(" ")[2]
    best, worst = rows.get(f"linear {target}", {}).get(ORACLE), rows["uniform"].get("all fp4")
    if best is None or worst is None or arm not in rows[group]:
        return float("nan")
    if worst["mean"] - best["mean"] <= 4 * worst["error"]:
        return float("nan")
    return (rows[group][arm]["mean"] - best["mean"]) / (worst["mean"] - best["mean"])


def _number(value: float, digits: int = 2) -> str:
    return DASH if not np.isfinite(value) else f"{value:.{digits}f}"


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")


def switch_tables(figures: Figures, group: str) -> list[str]:
    """Loss increases of a granularity and target: milli-nats with standard errors, then by arm against the oracle."""
    columns = _titles(figures, group)
    if not columns:
        return []
    head = [f"{setting}, {checkpoint}" for setting, checkpoint, _ in columns]
    texts = [f"### Loss increase at the switch, {group}: milli-nats over BF16, mean and standard error\n"]
    rows = []
    for name in ("all fp8", "all fp4"):
        rows.append([name, *(_with_error(one["increase"]["uniform"].get(name), "mean", "error")
                             for _, _, one in columns), DASH, DASH])  # fmt: skip
    for arm in _arms(columns, group):
        values = [one["increase"][group].get(arm) for _, _, one in columns]
        ratios = [ratio_to_oracle(one, group, arm) for _, _, one in columns]
        excess = [share_of_avoidable(one, group, arm) for _, _, one in columns]
        rows.append([arm, *(_with_error(row, "mean", "error") for row in values),
                     _number(_mean(ratios)), _number(_mean(excess), 3)])  # fmt: skip
    texts.append(table(["arm", *head, "mean ratio to oracle", "mean (arm - oracle) / (all FP4 - oracle)"], rows))
    texts.append(f"### The same, {group}: less dL's plan, milli-nats; = is the same plan at the switch\n")
    rows = [[arm, *(_with_error(one["increase"][group].get(arm), "less dL", "less dL, error")
                    for _, _, one in columns)] for arm in _arms(columns, group)]  # fmt: skip
    texts.append(table(["arm", *head], rows))
    return texts


def summary(figures: Figures, group: str) -> list[str]:
    """Over all cells: how each arm's plan did against dL's of the same target."""
    columns = _titles(figures, group)
    rows = []
    for arm in _arms(columns, group):
        found = [one["increase"][group][arm] for _, _, one in columns if arm in one["increase"][group]]
        found = [row for row in found if "less dL" in row]
        other = [row for row in found if row["less dL"] or row["less dL, error"]]
        better, worse = (sum(sign * row["less dL"] < -2 * row["less dL, error"] for row in other) for sign in (1, -1))
        mean = interval([row["less dL"] for row in found]) if found else None
        rows.append([arm, str(len(found)), str(len(found) - len(other)), str(better), str(worse), _interval(mean)])
    head = ["arm", "cells", "dL's plan", "better by 2 errors", "worse by 2 errors", "mean and 95% interval over cells"]
    title = f"### Over all cells, {group}: loss increase at the switch less dL's, milli-nats\n"
    return [title, table(head, rows)] if columns else []


def _with_error(row: Figures | None, mean: str, error: str) -> str:
    """Milli-nats and their standard error; = where both are 0."""
    if row is None or mean not in row:
        return DASH
    if row[mean] == 0 and row[error] == 0:
        return "="
    return f"{1000 * row[mean]:.2f} ± {1000 * row[error]:.2f}"


def identical_plans(figures: Figures, group: str) -> str:
    """Which arms have one plan, by cell."""
    lines = [f"### Arms with the same plan, {group}\n"]
    for setting, checkpoint, one in cells(figures):
        by_key: dict[str, list[str]] = {}
        for arm, key in one["plans"].get(group, {}).items():
            by_key.setdefault(key, []).append(arm)
        same = "; ".join(" = ".join(arms) for arms in by_key.values() if len(arms) > 1)
        lines.append(f"- {setting}, {checkpoint}: {same or 'none'} ({len(by_key)} plans)")
    return "\n".join(lines) + "\n"


def regret_tables(figures: Figures) -> list[str]:
    """Regret by true costs: by arm, and by the probe's tokens."""
    columns = list(cells(figures))
    head = [f"{setting}, {checkpoint}" for setting, checkpoint, _ in columns]
    groups = list(dict.fromkeys(group for _, _, one in columns for group in one["regret"]))
    texts = ["### Regret of the plans of whole linears by true costs, (plan - best) / (all FP4 - best)\n"]
    for group in groups:
        arms = list(dict.fromkeys(arm for _, _, one in columns for arm in one["regret"].get(group, {})))
        rows = []
        for arm in arms:
            values = [float(one["regret"].get(group, {}).get(arm, "nan")) for _, _, one in columns]
            rows.append([arm, *(_number(value, 3) for value in values), _number(_mean(values), 3)])
        texts += [f"{group}:\n", table(["arm", *head, "mean"], rows)]
    texts.append("### Regret of dL's plan by the probe's tokens: mean (largest) over probes\n")
    rows = []
    for compute in ("float32", "bf16"):
        for target in dict.fromkeys(t for _, _, one in columns for t in one["regret by tokens"].get(compute, {})):
            found = [one["regret by tokens"].get(compute, {}).get(target, {}) for _, _, one in columns]
            for tokens in dict.fromkeys(key for one in found for key in one):
                values = [one.get(tokens) for one in found]
                rows.append([compute, target, tokens, *(
                    DASH if v is None else f"{v['mean']:.4f} ({v['most']:.4f})" for v in values
                ), _number(_mean([_known(v, "mean") for v in values]), 4)])  # fmt: skip
    texts.append(table(["compute", "target", "tokens", *head, "mean"], rows))
    return texts


def probe_tables(figures: Figures) -> list[str]:
    """What Q is made of, and BF16 probes by float32's."""
    rows, low = [], []
    for setting, checkpoint, one in cells(figures):
        c = one["composition"]["float32"]
        order = ("dL", "own")
        both = (f"{c['sum'][t]:.1%} ({c['median'][t]:.1%})" for t in order)
        rows.append([f"{setting}, {checkpoint}", f"{c['sum of Q']:.3f}", *both])
        b = one["bf16 probe"]
        ratios = (f"{r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f})" for r in b["ratios"].values())
        apart = ", ".join(f"{n} {name}" for name, n in b["linears apart"].items() if n) or "none"
        low.append([f"{setting}, {checkpoint}", *ratios, f"{apart} of {b['linears']}"])
    head = ["cell", "sum of Q", "dL", "own"]
    return [
        "### Shares of Q(FP4) - Q(FP8) by term: of the sum over linears (median of a linear's own)\n",
        table(head, rows),
        "### BF16 probe by float32 probe, linears' FP4: median (least to most); linears whose option differs\n",
        table(["cell", "dL", "own", "linears apart"], low),
    ]


def _label(arms: Sequence[str], target: str) -> str:
    """Names of a plan without other targets and BF16 probes; the target itself is left out."""
    kept = [arm for arm in arms if "BF16 probe" not in arm and (arm in UNIFORM or f" {target} " in f" {arm} ")]
    return " = ".join(arm.replace(f" {target}", "") for arm in kept)


UNIFORM = ("bf16", "all fp8", "all fp4")


def further_tables(figures: Figures) -> list[str]:
    """Validation loss after more steps with each plan in force."""
    texts = []
    for setting, checkpoint, one in cells(figures):
        if not one["further"]:
            continue
        about = figures[setting]["about"]["setting"]
        target, rows = str(about["targets"][0]), []
        for row in sorted(one["further"].values(), key=lambda row: row["loss"]["mean"]):
            rows.append([_label(row["arms"], target), f"{row['share']:.3f}", f"{row['loss']['mean']:.4f}",
                         *(_interval(row.get(key)) for key in ("less bf16", "less dL")),
                         str(row["loss"]["count"])])  # fmt: skip
        texts += [
            f"### {setting}, {checkpoint}: validation loss after {about['further_steps']} steps with the plan at a "
            f"learning rate of {about['further_lr']:g}, in its own precision; differences of the "
            "same seed in milli-nats with 95% intervals\n",
            table(["plan", "FP4 share", "nats", "less BF16", "less dL by linear", "seeds"], rows),
        ]
    return [*_further_over_cells(figures), *texts]


def _further_over_cells(figures: Figures) -> list[str]:
    """Differences from BF16's and from dL's plan over all models and seeds of one learning rate, by arm."""
    found: dict[float, dict[str, dict[str, list[float]]]] = {}
    for setting, _, one in cells(figures):
        about = figures[setting]["about"]["setting"]
        target, rows = str(about["targets"][0]), one["further"].values()
        of = {arm: row["by seed"] for row in rows for arm in row["arms"]}
        for arm, losses in of.items():
            if "BF16 probe" in arm or not (arm in UNIFORM or f" {target} " in arm):
                continue
            row = found.setdefault(about["further_lr"], {}).setdefault(arm.replace(f" {target}", ""), {})
            for other in ("bf16", f"linear {target} dL"):
                row.setdefault(other.split()[-1], []).extend(
                    losses[seed] - of[other][seed] for seed in losses if seed in of.get(other, {})
                )
    texts = []
    for rate, arms in found.items():
        order = sorted(arms, key=lambda arm: _mean(arms[arm]["bf16"]))
        rows = []
        for arm in order:
            both = [arms[arm][other] for other in ("bf16", "dL")]
            rows.append([arm, *(_interval(interval(v)) if v else DASH for v in both), str(len(both[0]))])
        title = f"### After more steps at a learning rate of {rate:g}, over all models and seeds"
        texts += [
            f"{title}: milli-nats, 95% intervals\n",
            table(["arm", "less BF16", "less dL by linear", "runs"], rows),
        ]
    return texts


def _interval(one: Figures | None) -> str:
    if one is None:
        return DASH
    half = "" if one["half"] is None else f" ± {1000 * one['half']:.2f}"
    return f"{1000 * one['mean']:.2f}{half}"


def tables(figures: Figures) -> str:
    """The whole Markdown text."""
    groups = list(dict.fromkeys(g for _, _, one in cells(figures) for g in one["plans"] if g != "uniform"))
    groups.sort(key=lambda group: (group.split()[1] != "0.75", group.split()[0] != "linear"))
    texts = [_settings(figures)]
    for group in groups:
        texts += summary(figures, group)
    for group in groups:
        texts += switch_tables(figures, group)
        if group.endswith(" 0.75"):
            texts.append(identical_plans(figures, group))
    return "\n".join([*texts, *further_tables(figures), *regret_tables(figures), *probe_tables(figures)])


def _settings(figures: Figures) -> str:
    """Models, losses at the checkpoints."""
    rows = []
    for setting, one in figures.items():
        about = one["about"]["setting"]
        losses = ", ".join(f"{name} {c['loss']:.3f}" for name, c in one["checkpoints"].items() if "loss" in c)
        rows.append([setting, about["name"], ".".join(filter(None, about["text"])), losses])
    first = next(iter(figures.values()))["about"]
    made = f"{first['cpu']}, {first['cores']} cores, {first['threads']} thread a run, torch {first['torch']}, "
    return f"{made}Python {first['python']}, commit {first['commit']}\n\n" + table(
        ["setting", "model", "text", "loss in BF16 format, nats"], rows
    )


def main(words: list[str] | None = None) -> None:
    """Write the tables, the pictures and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run.py's --output")
    parser.add_argument("--output", type=Path, required=True, help="the Markdown file")
    parser.add_argument("--figures", type=Path, help="folder of the pictures")
    parser.add_argument("--json", type=Path, help="file of all figures")
    args = parser.parse_args(words)
    figures: dict[str, Any] = figures_of_all(args.folder)
    if not figures:
        parser.error(f"{args.folder} has no setting with plans; run examples.study.run first")
    args.output.write_text(tables(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        draw_switch(figures, args.figures / "study-switch.png")
        draw_after(figures, args.figures / "study-after.png")


if __name__ == "__main__":
    main()
