"""Content of a run folder: rows of metrics, plans, options, and a summary in numbers.

Convention: a run may have been killed at any point.  A truncated last line is dropped, unreadable files are listed in
notes, and missing values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.files.io import read_file
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import saving
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.metrics import lines_of, metrics_file
from megatron_snip.train.run.state_file import read_run_file

Curve = tuple[list[int], list[float]]
_T = TypeVar("_T")


def is_finite(value: Any) -> bool:
    """Whether a value in a row is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Run:
    """A run folder's content: metrics in file order, plans by iteration, and notes on unreadable files.

    config, versions: from config.json; None and empty without it.  stats: the last readable statistics.
    """

    path: Path
    metrics: list[dict[str, Any]]
    plans: list[Plan]
    notes: list[str]
    config: Config | None
    versions: Mapping[str, str | int]
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
    read = [noted(notes, Plan.load, file) for file in plan_files]
    plans = sorted((plan for plan in read if plan is not None), key=lambda plan: plan.iteration)
    options = path / "config.json"
    of_run = noted(notes, read_run_file, options, "move it aside") if options.is_file() else None
    _, config, versions = of_run or ("", None, {})
    newest = sorted(path.glob("stats/iter_*.json"), reverse=True)
    stats = next((found for file in newest if (found := noted(notes, Statistics.load, file)) is not None), None)
    return Run(path, metrics, plans, notes, config, versions, stats)


def noted(notes: list[str], read: Callable[..., _T], *arguments: Any) -> _T | None:
    """``read(*arguments)``; None, and a note, if a file cannot be read."""
    try:
        return read(*arguments)
    except ValueError as error:
        notes.append(str(error))
        return None


def format_summary(run_dir: str | Path) -> str:
    """The run in numbers, as a small text table."""
    rows = rows_of(read_run(run_dir))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _read_metrics(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; damaged lines are noted."""
    lines, damaged = lines_of(read_file(file, "metrics", "cut them back", most=1 << 30), file)
    notes += damaged
    return [row for _, row in lines]


#: What planning takes: a row's name, and its metric.
PLANNING_TIMES = (("time in probes", "snip/probe_seconds"), ("time in the solver", "snip/solver_seconds"))


def rows_of(run: Run) -> list[tuple[str, str]]:
    """The run in numbers: (name, value with its unit).  Losses are in nats, times of the wall clock."""
    iterations = str(sum(row["iteration"] > 0 for row in run.metrics))  # 0: validation of initial weights
    if skipped := int(max(run.column("skipped")[1], default=0)):  # a running count
        iterations += f" ({skipped} skipped)"
    plans = str(len(run.plans))
    if len(run.plans) > 1:
        plans += f" (the last changed {run.plans[-1].churn(run.plans[-2]):.1%} of the linears)"
    tried = []
    if rows := [row for row in run.metrics if "snip/trial_passes" in row]:
        tried = [("trials", _trials(run, rows)), ("time in trials", _time(run, "snip/trial_seconds"))]
    if (top := _last(run, "snip/top_token")) is not None:
        tried += [("top token", f"{top:.1%} of a linear's loss divergence, in the last probe")]
    seconds = _total(run, "iteration-time")
    return [
        ("validation loss", _ends(run, "lm loss validation")),
        ("training loss", _ends(run, "lm loss")),
        ("in FP4", _in_fp4(run)),
        ("plans", plans),
        ("iterations", iterations),
        *((name, _time(run, key)) for name, key in PLANNING_TIMES if run.column(key)[1]),
        *tried,
        ("time in all iterations", "none recorded" if seconds is None else _duration(seconds)),
    ]


def _last(run: Run, key: str) -> float | None:
    values = run.column(key)[1]
    return values[-1] if values else None


def _total(run: Run, key: str) -> float | None:
    values = run.column(key)[1]
    return sum(values) if values else None


def _ends(run: Run, key: str) -> str:
    values = run.column(key)[1]
    return f"{values[0]:.4f} -> {values[-1]:.4f}" if values else "none recorded"


def _time(run: Run, key: str) -> str:
    """Seconds of a metric, with their share of the run."""
    spent, whole = _total(run, key), _total(run, "iteration-time")
    if spent is None:
        return "none recorded"
    return _duration(spent) + (f" ({spent / whole:.2%} of the run)" if whole else "")


def _in_fp4(run: Run) -> str:
    """FP4's share of the linears' FLOPs, by the last plan or by --precision."""
    precision, file = (run.config.precision.precision, run.config.precision.precision_plan) if run.config else ("", "")
    if precision == "plan":
        share = _share_of_file(run, file)
        return f"as {file} says" if share is None else f"{share:.2%} of the linears' FLOPs ({file})"
    if precision not in ("", "snip"):
        return f"{_fp4_share(precision)} of the linears' FLOPs (--precision {precision})"
    in_force = not run.metrics or run.metrics[-1].get("snip/plan_hash") != ""  # a run may return to warm-up precision
    if not (run.plans and in_force):
        return "no plan"
    return f"{run.plans[-1].achieved:.2%} of the linears' FLOPs (target {run.plans[-1].asked})"


def _trials(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    """What trials found, in words."""
    others = sum(row.get("snip/trial_name", "solver") != "solver" for row in rows)
    text = f"{len(rows)} ({others or 'none'} took another plan than the solver's)"
    error, predicted = _last(run, "snip/trial_increase_standard_error"), _last(run, "snip/trial_predicted")
    if (increase := _last(run, "snip/trial_increase")) is not None:
        text += f"; the last plan costs {increase:.4g}{'' if error is None else f' ± {error:.2g}'} nats above BF16"
        text += "" if predicted is None else f", predicted {predicted:.4g}"
    return text


def _share_of_file(run: Run, file: Any) -> float | None:
    """FP4's share in the file of --precision plan; None unless it is the run's last plan."""
    try:
        plan = Plan.load(str(file))
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
