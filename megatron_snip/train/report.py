"""What happened in a run, from its folder alone: a summary as text, and report.html with pictures.

    python -m megatron_snip.train.report RUN_DIR

Reads metrics.jsonl (one JSON object per iteration) and plans/*.json, writes report.html (self-contained),
report_loss.png and report_plans.png, and report_divergence.png where there are statistics.
Convention: a run may be cut short anywhere.  A last line without its end is dropped, files that cannot be
read are named in the report, and what was not recorded is left out.
"""

from __future__ import annotations

import base64
import html
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError
from megatron_snip.files import one_line, parse_json, read_file
from megatron_snip.snip.jsonfile import is_count, is_finite
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.plan.cost import MEASURES
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.evaluations import evaluation_table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 1080px }
body { margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p.path { color: #667; margin-top: .2rem; font-family: ui-monospace, monospace; font-size: 13px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e3e7ec; text-align: left }
img { max-width: 100% } p.note { color: #8a4b00 } table.plans { font-size: 13px; margin-top: 1rem }
"""


@dataclass(frozen=True)
class Run:
    """A run folder as read: metrics in file order, plans by iteration, and what could not be read."""

    path: Path
    metrics: list[dict[str, Any]]
    plans: list[Plan]
    notes: list[str]

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Iterations and values of a metric, where it was recorded as a finite number."""
        pairs = [(int(m["iteration"]), m[key]) for m in self.metrics if is_finite(m.get(key))]
        return [iteration for iteration, _ in pairs], [float(value) for _, value in pairs]


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder.  Raises UserError if it is no folder or holds neither metrics nor plans."""
    path = Path(run_dir)
    metrics_file, plan_files = path / "metrics.jsonl", sorted(path.glob("plans/*.json"))
    if not metrics_file.is_file() and not plan_files:
        raise UserError(f"{path} holds neither metrics.jsonl nor plans/*.json; give a run folder (--run-dir)")
    notes: list[str] = []
    metrics = _read_metrics(metrics_file, notes) if metrics_file.is_file() else []
    plans = []
    for file in plan_files:
        try:
            plans.append(Plan.load(file))
        except ValueError as error:
            notes.append(str(error))
    return Run(path, metrics, sorted(plans, key=lambda plan: plan.iteration), notes)


def summary(run_dir: str | Path) -> dict[str, Any]:
    """The run in numbers: name -> value, or None where it was not recorded.

    Losses in nats; "fp4_share" of the last plan, 0..1; seconds of wall clock; shares of the total seconds.
    """
    return _summary(read_run(run_dir))


def format_summary(run_dir: str | Path) -> str:
    """``summary`` as a small table of text."""
    rows = _rows(summary(run_dir))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def write_report(run_dir: str | Path) -> Path:
    """Write report.html and its pictures into the run folder; returns the path of report.html."""
    from megatron_snip.train import (
        report_pictures,  # matplotlib takes a second that training need not wait for
    )

    run = read_run(run_dir)
    sections = []
    if run.metrics:
        picture = report_pictures.loss(run.path / "report_loss.png", _curves(run), _plan_marks(run.plans))
        sections.append(("Loss", "", picture))
    if run.plans:
        picture = report_pictures.plans(run.path / "report_plans.png", run.plans)
        text = "Precision of each linear, block by block, as each plan set it."
        sections.append(("Plans", text, picture))
    if divergences := _divergences(run):
        file = run.path / "report_divergence.png"
        text = "By the last statistics, of the costliest format. Grey: none."
        sections.append(("Divergences", text, report_pictures.divergences(file, divergences)))
    more = [_plan_table(run.plans)] if run.plans else []
    more += [_stage_table(stages)] if (stages := _last_stages(run)) else []
    more += [evaluation_table(run.path, run.notes)]
    text = page(run.path.resolve().name, str(run.path), _rows(_summary(run)), run.notes, sections, more)
    path = run.path / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def _read_metrics(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a broken last line is expected of a killed run, others are noted."""
    lines = read_file(file, "metrics", "cut them back", most=1 << 30).split(b"\n")
    metrics, broken = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict) or not is_count(entry.get("iteration")):
                raise UserError("no iteration")
            metrics.append(entry)
        except ValueError:
            broken.append(number)
    if broken and broken[-1] == len(lines):  # no newline behind it: cut off while it was written
        broken.pop()
    if broken:
        notes.append(f"{file}: {len(broken)} unreadable lines left out, the first is line {broken[0]}")
    return metrics


def _summary(run: Run) -> dict[str, Any]:
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
    last_plan = run.plans[-1] if run.plans else None
    return {
        "iterations": sum(row["iteration"] > 0 for row in run.metrics),  # 0: validation of the new weights
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
        "last_churn": run.plans[-1].churn(run.plans[-2]) if len(run.plans) > 1 else None,
        "seconds": seconds,
        "probe_seconds": probing,
        "solver_seconds": solving,
        "probe_share": probing / seconds if probing is not None and seconds else None,
        "solver_share": solving / seconds if solving is not None and seconds else None,
    }


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
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

    reached = "no plan"
    if values["fp4_share"] is not None:
        unit = "" if values["target_unit"] == MEASURES["fp4"] else f" in {values['target_unit']}"
        reached = f"{values['fp4_share']:.2%} of the linears' FLOPs (target {values['target']:.2%}{unit})"
    plans = str(values["plans"])
    if values["last_churn"] is not None:
        plans += f" (the last changed {values['last_churn']:.1%} of the linears)"
    iterations = str(values["iterations"])
    if values["skipped"]:
        iterations += f" ({values['skipped']} skipped)"
    return [
        ("validation loss", pair("first_validation_loss", "last_validation_loss")),
        ("training loss", pair("first_loss", "last_loss")),
        ("in FP4", reached),
        ("plans", plans),
        ("iterations", iterations),
        ("time in probes", time(values["probe_seconds"], values["probe_share"])),
        ("time in solving, aside", time(values["solver_seconds"], values["solver_share"])),
        ("time in all iterations", time(values["seconds"], None)),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(round(seconds), 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _curves(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    return {"training": run.column("lm loss"), "validation": run.column("lm loss validation")}


def _plan_marks(plans: Sequence[Plan]) -> list[tuple[int, float]]:
    """(iteration, FP4 share) of each plan."""
    return [(plan.iteration, plan.achieved) for plan in plans]


def _divergences(run: Run) -> dict[str, dict[str, float]]:
    """Kind -> linear -> value at the coarsest format, from the last statistics file that can be read."""
    for path in sorted(run.path.glob("stats/iter_*.json"), reverse=True):
        try:
            found = Predictions.of(Statistics.load(path))
        except ValueError as error:
            run.notes.append(str(error))
            continue
        tables = {"loss_divergence": found.loss, "weight_divergence": found.weight}
        known = {kind: table for kind, table in tables.items() if table}
        return {kind: {name: max(row.values()) for name, row in table.items()} for kind, table in known.items()}
    return {}


def page(
    title: str,
    path: str,
    rows: Sequence[tuple[str, str]],
    notes: Sequence[str],
    sections: Sequence[tuple[str, str, Path]],
    more: Sequence[str] = (),
) -> str:
    """A self-contained page: facts, notes, pictures with (heading, text, file), and further HTML."""
    facts = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class='path'>{html.escape(path)}</p><table>{facts}</table>",
        *(f"<p class='note'>{html.escape(note)}</p>" for note in notes),
    ]
    for heading, text, picture in sections:
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f"<h2>{heading}</h2>{f'<p>{text}</p>' if text else ''}")
        parts.append(f"<img alt='{heading}' src='data:image/png;base64,{data}'>")
    return "\n".join([*parts, *more]) + "</html>\n"


def _plan_table(plans: Sequence[Plan]) -> str:
    """One line per plan: what it saves, how it was found, how much it changed."""
    heads = ("iteration", "objective", "target", "in FP4", "changed", "solver", "gap", "seconds", "hash")
    lines = []
    for before, plan in zip([None, *plans], plans):
        cells = [
            str(plan.iteration), plan.objective, plan.asked, f"{plan.achieved:.2%}",
            f"{plan.churn(before):.1%}" if before else "", plan.solver.status, f"{plan.solver.gap:.1e}",
            f"{plan.solver.seconds:.2f}", plan.hash,
        ]  # fmt: skip
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table class='plans'><tr>{head}</tr>{''.join(lines)}</table>"


def _last_stages(run: Run) -> list[tuple[int, float, float]]:
    """(stage, FP4 share, modelled time) of the last plan that several pipeline stages took; empty with one stage."""
    found: dict[int, dict[str, float]] = {}
    for row in run.metrics:
        stages: dict[int, dict[str, float]] = {}
        for key, value in row.items():
            if (match := re.fullmatch(r"snip/stage_(\d+)/(achieved|modelled_time)", key)) and is_finite(value):
                stages.setdefault(int(match[1]), {})[match[2]] = float(value)
        found = stages or found
    return [(stage, of["achieved"], of["modelled_time"]) for stage, of in sorted(found.items()) if len(of) == 2]


def _stage_table(stages: Sequence[tuple[int, float, float]]) -> str:
    """One line per pipeline stage under the last plan."""
    lines = [f"<tr><td>{stage}</td><td>{share:.2%}</td><td>{time:.4f}</td></tr>" for stage, share, time in stages]
    return (
        "<h2>Pipeline stages</h2><p>Under the last plan; times as shares of all linears' in BF16.</p>"
        "<table class='stages'><tr><th>stage</th><th>in FP4</th><th>modelled time</th></tr>"
        f"{''.join(lines)}</table>"
    )


def main(arguments: Sequence[str]) -> int:
    """Write the report of the folder named on the command line and print its summary."""
    if len(arguments) != 1 or arguments[0].startswith("-") or not arguments[0]:
        print("usage: python -m megatron_snip.train.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        path = write_report(arguments[0])
    except (UserError, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 1
    print(format_summary(arguments[0]))
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
