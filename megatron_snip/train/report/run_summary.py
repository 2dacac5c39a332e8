"""Content of a run folder: rows of metrics, plans, options, and a summary in numbers.

Convention: a run may have been killed at any point.  A truncated last line is dropped, unreadable files are listed in
notes, and missing values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError
from megatron_snip.files.io import read_file
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.plan.cost import MEASURES, saving
from megatron_snip.train.run.metrics import lines_of, metrics_file
from megatron_snip.train.run.state_file import read_run_file

Curve = tuple[list[int], list[float]]


def is_finite(value: Any) -> bool:
    """Whether a value in a row is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Run:
    """A run folder's content: metrics in file order, plans by iteration, and notes on unreadable files.

    options: config.json, or {}.  stats: the last readable statistics.
    """

    path: Path
    metrics: list[dict[str, Any]]
    plans: list[Plan]
    notes: list[str]
    options: dict[str, Any]
    stats: Statistics | None

    @cached_property
    def columns(self) -> dict[str, Curve]:
        """Iterations and finite values of each metric, from one pass over the rows."""
        found: dict[str, Curve] = {}
        for row in self.metrics:
            for key, value in row.items():
                iterations, values = found.setdefault(key, ([], []))
                if is_finite(value):
                    iterations.append(row["iteration"])
                    values.append(float(value))
        return found

    def column(self, key: str) -> Curve:
        """Iterations and values of a metric."""
        return self.columns.get(key, ([], []))


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder.  Raises UserError if it is not a folder or has neither metrics nor plans."""
    path = Path(run_dir)
    rows, plan_files = metrics_file(path), sorted(path.glob("plans/*.json"))
    if not rows.is_file() and not plan_files:
        raise UserError(f"{path} holds neither metrics.jsonl nor plans/*.json; give a run folder (--run-dir)")
    notes: list[str] = []
    metrics = _read_metrics(rows, notes) if rows.is_file() else []
    plans = []
    for file in plan_files:
        try:
            plans.append(Plan.load(file))
        except ValueError as error:
            notes.append(str(error))
    plans.sort(key=lambda plan: plan.iteration)
    return Run(path, metrics, plans, notes, _read_options(path / "config.json", notes), _last_stats(path, notes))


def summary(run_dir: str | Path) -> dict[str, Any]:
    """The run in numbers: name -> value, or None if not recorded.

    Losses in nats; "fp4_share" 0..1 of the last plan, if one is in force; seconds of wall clock; shares of total time.
    """
    return summary_of(read_run(run_dir))


def format_summary(run_dir: str | Path) -> str:
    """``summary`` as a small text table."""
    rows = rows_of(summary(run_dir))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _read_metrics(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; damaged lines are noted."""
    lines, damaged = lines_of(read_file(file, "metrics", "cut them back", most=1 << 30), file)
    notes += damaged
    return [row for _, row in lines]


def _read_options(file: Path, notes: list[str]) -> dict[str, Any]:
    """config.json; an unreadable one is noted."""
    if not file.is_file():
        return {}
    try:
        _, config, versions = read_run_file(file, "move it aside")
        return {**config.to_dict(), "versions": dict(versions)}
    except ValueError as error:
        notes.append(str(error))
        return {}


def _last_stats(path: Path, notes: list[str]) -> Statistics | None:
    """The last readable statistics."""
    for file in sorted(path.glob("stats/iter_*.json"), reverse=True):
        try:
            return Statistics.load(file)
        except ValueError as error:
            notes.append(str(error))
    return None


def summary_of(run: Run) -> dict[str, Any]:
    """``summary`` of a run that has been read."""

    def ends(key: str) -> tuple[float | None, float | None]:
        values = run.column(key)[1]
        return (values[0], values[-1]) if values else (None, None)

    def total(key: str) -> float | None:
        values = run.column(key)[1]
        return sum(values) if values else None

    seconds = total("iteration-time")
    first_loss, last_loss = ends("lm loss")
    first_validation, last_validation = ends("lm loss validation")
    probing, solving = total("snip/probe_seconds"), total("snip/solver_seconds")
    trials = [row for row in run.metrics if "snip/trial_passes" in row]
    trying = total("snip/trial_seconds")
    in_force = not run.metrics or run.metrics[-1].get("snip/plan_hash") != ""  # a run may return to warm-up precision
    last_plan = run.plans[-1] if run.plans and in_force else None
    return {
        "iterations": sum(row["iteration"] > 0 for row in run.metrics),  # 0: validation of initial weights
        "last_iteration": run.metrics[-1]["iteration"] if run.metrics else None,
        "first_loss": first_loss,
        "last_loss": last_loss,
        "first_validation_loss": first_validation,
        "last_validation_loss": last_validation,
        "skipped": int(max(run.column("skipped")[1], default=0)),  # a running count
        "plans": len(run.plans),
        "fp4_share": last_plan.achieved if last_plan else None,
        "target": last_plan.target if last_plan else None,
        "target_unit": last_plan.target_unit if last_plan else None,
        "precision": run.options.get("precision", {}).get("precision"),
        "precision_plan": run.options.get("precision", {}).get("precision_plan"),
        "precision_plan_share": _share_of_file(run),
        "last_churn": run.plans[-1].churn(run.plans[-2]) if len(run.plans) > 1 else None,
        "seconds": seconds,
        "probe_seconds": probing,
        "solver_seconds": solving,
        "trial_seconds": trying,
        "probe_share": probing / seconds if probing is not None and seconds else None,
        "solver_share": solving / seconds if solving is not None and seconds else None,
        "trial_share": trying / seconds if trying is not None and seconds else None,
        "trials": len(trials),
        "trials_overruled": sum(row.get("snip/trial_name", "solver") != "solver" for row in trials),
        "trial_increase": ends("snip/trial_increase")[1],
        "trial_error": ends("snip/trial_increase_standard_error")[1],
        "trial_predicted": ends("snip/trial_predicted")[1],
        "top_token": ends("snip/top_token")[1],
    }


def rows_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary table: (name, value with its unit)."""

    def pair(first: str, last: str) -> str:
        if values[first] is None:
            return "none recorded"
        return f"{values[first]:.4f} -> {values[last]:.4f}"

    def time(seconds: float | None, share: float | None) -> str:
        if seconds is None:
            return "none recorded"
        of_run = f" ({share:.2%} of the run)" if share is not None else ""
        return _duration(seconds) + of_run

    reached, precision = "no plan", values["precision"]
    if precision == "plan":
        share, file = values["precision_plan_share"], values["precision_plan"]
        reached = f"as {file} says" if share is None else f"{share:.2%} of the linears' FLOPs ({file})"
    elif precision not in (None, "snip"):
        reached = f"{_fp4_share(str(precision))} of the linears' FLOPs (--precision {precision})"
    elif values["fp4_share"] is not None:
        unit = "" if values["target_unit"] == MEASURES["fp4"] else f" in {values['target_unit']}"
        reached = f"{values['fp4_share']:.2%} of the linears' FLOPs (target {values['target']:.2%}{unit})"
    plans = str(values["plans"])
    if values["last_churn"] is not None:
        plans += f" (the last changed {values['last_churn']:.1%} of the linears)"
    iterations = str(values["iterations"])
    if values["skipped"]:
        iterations += f" ({values['skipped']} skipped)"
    tried = []
    if values["trials"]:
        tried = [("trials", _trials(values)), ("time in trials", time(values["trial_seconds"], values["trial_share"]))]
    if values["top_token"] is not None:
        tried += [("top token", f"{values['top_token']:.1%} of a linear's loss divergence, in the last probe")]
    return [
        ("validation loss", pair("first_validation_loss", "last_validation_loss")),
        ("training loss", pair("first_loss", "last_loss")),
        ("in FP4", reached),
        ("plans", plans),
        ("iterations", iterations),
        ("time in probes", time(values["probe_seconds"], values["probe_share"])),
        ("time in the solver", time(values["solver_seconds"], values["solver_share"])),
        *tried,
        ("time in all iterations", time(values["seconds"], None)),
    ]


def _trials(values: Mapping[str, Any]) -> str:
    """What trials found, in words."""
    others = values["trials_overruled"]
    text = f"{values['trials']} ({others or 'none'} took another plan than the solver's)"
    if values["trial_increase"] is not None:
        error = f" ± {values['trial_error']:.2g}" if values["trial_error"] is not None else ""
        text += f"; the last plan costs {values['trial_increase']:.4g}{error} nats above BF16"
        text += f", predicted {values['trial_predicted']:.4g}" if values["trial_predicted"] is not None else ""
    return text


def _share_of_file(run: Run) -> float | None:
    """FP4's share in the file of --precision plan; None unless it is the run's last plan."""
    try:
        plan = Plan.load(str(run.options.get("precision", {}).get("precision_plan")))
    except ValueError:
        return None
    return plan.achieved if run.metrics and run.metrics[-1].get("snip/plan_hash") == plan.hash else None


def _fp4_share(precision: str) -> str:
    """FP4's share under one precision for all linears; "?" for an unknown format."""
    try:
        return f"{saving(LinearPrecision.parse(precision)):.2%}"
    except ValueError:
        return "?"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(round(seconds), 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
