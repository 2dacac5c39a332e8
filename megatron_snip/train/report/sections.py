"""report.html: what happened in a run, from its folder alone, optionally compared with other runs.

The report is one file of 2 to 5 MB.  Pictures are thinned out (pictures/figures.py), and the page loads nothing
(page.py).  To add a section, write a function of the run that returns a `Section`, or None if the run has nothing to
show, and add it to ``_SECTIONS``.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.files.json import write_atomic
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.options import measured_options
from megatron_snip.snip.planner import Planner
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import get_objective
from megatron_snip.snip.predict.sampling import top_token
from megatron_snip.train.pictures import figures as pictures
from megatron_snip.train.pictures.curve_picture import WHAT
from megatron_snip.train.report.evaluations import read_evaluations, score_rows
from megatron_snip.train.report.headline import difference_text, headline, verdict
from megatron_snip.train.report.page import Section, folded, page, table
from megatron_snip.train.report.run_summary import Curve, Run, is_finite, read_run, rows_of
from megatron_snip.train.report.trials import trials
from megatron_snip.train.setup import snip_shapes

#: Most lines in the table of plans; the solver's seconds per point of the trade-off.
MOST_LINES, POINT_SECONDS = 100, 1.0
_KINDS = {"loss_divergence": "nats", "weight_divergence": "of the squared update"}
_GIB = 2**30


def write_report(run_dir: str | Path, others: Sequence[str | Path] = (), file: Path | None = None) -> Path:
    """Write a run's report, by default report.html in its folder.  Returns the path.

    others: folders of runs to compare with.  Raises UserError if a folder holds no run, OSError if writing fails.
    """
    run, rest = read_run(run_dir), [read_run(other) for other in others]
    found = [_compared(run, rest), *(section(run) for section in _SECTIONS)]
    sections = [section for section in found if section is not None]
    facts = [*headline(run), *rows_of(run)]
    notes = [note for one in (run, *rest) for note in one.notes]
    name, *more = _names([run, *rest])
    title = f"{name} compared with {', '.join(more)}" if more else name
    text = page(title, str(run.path), facts, notes, sections, verdict(run))
    path = file or run.path / "report.html"
    write_atomic(path, text.encode("utf-8", "replace").decode())  # a folder's name may not be UTF-8
    return path


def _compared(run: Run, others: Sequence[Run]) -> Section | None:
    """Loss with plan changes, and the difference from each other run."""
    runs = dict(zip(_names([run, *others]), [run, *others]))
    if not any(one.metrics for one in runs.values()):
        return None
    marks = [(plan.iteration, plan.achieved) for plan in run.plans]
    shown = {name: (one.column("lm loss"), one.column("lm loss validation")) for name, one in runs.items()}
    plain = {name: html.escape(name, quote=False) for name in shown}  # plotly interprets tags in texts
    figures, text = [pictures.loss({plain[name]: curves for name, curves in shown.items()}, marks)], ""
    (name, (mine, _)), *rest = shown.items()
    for other, (theirs, _) in rest:
        if differing := _other_options(run.config, runs[other].config):
            run.notes.append(f"{name} and {other} differ in more than precision: {differing}")
        figure = pictures.difference(plain[name], plain[other], mine, theirs)
        if figure is None:
            run.notes.append(f"{name} and {other} have no iteration in common, so no difference is shown")
        else:
            figures.append(figure | {"title": f"{name} - {other}"})
            text += f"{difference_text(name, other, run, runs[other])} "
    if len(figures) > 1:
        text += "Bands are two standard errors, if iterations are independent. "
    if others and marks:
        text += f"New plans are those of {name}."
    return Section("Loss", text.rstrip(), figures)


def compared(runs: Sequence[str | Path]) -> str:
    """How the first run ends beside each of the others: a line each."""
    run, *others = map(read_run, runs)
    name, *more = _names([run, *others])
    return "\n".join(difference_text(name, other, run, one) for other, one in zip(more, others, strict=True))


def _optimisation(run: Run) -> Section | None:
    """Gradient norm, learning rate, and how much of the updates reaches the weights."""
    figures = []
    for title, key in (("Gradient norm", "grad-norm"), ("Learning rate", "learning-rate")):
        if (curve := run.column(key))[0]:
            figures.append(pictures.curves({title.lower(): curve}, title.lower()) | {"title": title})
    reached = {name: run.column(f"optim/{key}") for name, key in (("descent", "edq"), ("lost elements", "lost"))}
    if reached["descent"][0]:
        figures.append(pictures.curves(reached, "share") | {"title": "Updates that reach the weights"})
    return Section("Optimisation", "", figures) if figures else None


def _other_options(mine: Config | None, theirs: Config | None) -> str:
    """Options of model, training and data that differ between two runs, with both values."""
    if mine is None or theirs is None:
        return ""
    found = []
    for group in ("model", "training", "data"):
        there = theirs.to_dict()[group]
        for key, value in mine.to_dict()[group].items():
            if value != there[key]:
                found.append(f"--{key.replace('_', '-')} {_shown(value)} and {_shown(there[key])}")
    return ", ".join(sorted(found))


def _names(runs: Sequence[Run]) -> list[str]:
    """Folder names of runs, or whole paths if the names are not unique."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def _plans(run: Run) -> Section | None:
    if not run.plans:
        return None
    heads = ("iteration", "objective", "target", "in FP4", "changed", "solver", "gap", "seconds", "hash")
    lines = []
    kept = set(pictures.picked(len(run.plans), MOST_LINES))
    for number, (before, plan) in enumerate(zip([None, *run.plans], run.plans)):
        cells = [
            str(plan.iteration), plan.objective, plan.asked, f"{plan.achieved:.2%}",
            f"{plan.churn(before):.1%}" if before else "", plan.solver.status, f"{plan.solver.gap:.1e}",
            f"{plan.solver.seconds:.2f}", plan.hash,
        ]  # fmt: skip
        lines += [cells] if number in kept else []
    text = "The precision of each linear. The bands of a cell are, from the top, fprop, dgrad and wgrad."
    figures = [pictures.plans(run.plans), *([pictures.shares(run.plans)] if len(run.plans) > 1 else [])]
    some = f" ({len(kept)} of {len(run.plans)} are listed)" if len(kept) < len(run.plans) else ""
    return Section("Plans", text + some, figures, table(heads, lines))


def _divergences(run: Run) -> Section | None:
    """Divergences by iteration from metrics, and by linear from the last statistics."""
    figures = []
    for kind, unit in _KINDS.items():
        name = kind.replace("_", " ")
        curves = _curves_of(run, f"snip/{kind}/")
        blocks = {key.removeprefix("block_"): curve for key, curve in curves.items() if key.startswith("block_")}
        kinds = {key: curve for key, curve in curves.items() if not key.startswith("block_")}
        if any(len(xs) > 1 for xs, _ in kinds.values()):
            figure = pictures.divergence_over_iterations(kinds, f"{name} ({unit})")
            figures.append(figure | {"title": f"{name.capitalize()} by kind of linear"})
            figure = pictures.blocks_over_iterations(dict(sorted(blocks.items())), unit)
            figures.append(figure | {"title": f"{name.capitalize()} by block"})
        if values := _by_linear(run, kind):
            figure = pictures.divergence_heatmap(values, unit)
            figures.append(figure | {"title": f"{name.capitalize()} of each linear, by the last statistics"})
    if run.stats is not None and run.stats.formats:
        options = [LinearPrecision.uniform(fmt) for fmt in run.stats.formats]
        shares = dict(zip(run.stats.names, np.nan_to_num(top_token(run.stats, options).max(axis=1)).tolist()))
        figure = pictures.divergence_heatmap(shares, "of its loss divergence")
        figures.append(figure | {"title": "Top token: the share of each linear's loss divergence from one token"})
    text = "Each linear in its costliest format, on a log scale. Empty cells have no finite value above 0."
    return Section("Divergences", text, figures) if figures else None


def _curves_of(run: Run, prefix: str) -> dict[str, Curve]:
    """Metrics with a prefix, by the rest of their names."""
    return {key.removeprefix(prefix): curve for key, curve in run.columns.items() if key.startswith(prefix)}


def _by_linear(run: Run, kind: str) -> dict[str, float]:
    """Linear -> value in its costliest format, from the last statistics."""
    if run.stats is None:
        return {}
    found = Predictions.of(run.stats)
    return {n: max(row.values()) for n, row in (found.loss if kind == "loss_divergence" else found.weight).items()}


def _measured(run: Run) -> Section | None:
    """Measured cost of low precision, from extra BF16 forwards, next to the prediction for each plan."""
    key, expected = "snip/measured_loss_divergence_mean", "snip/predicted_loss_divergence"
    last: dict[str, Mapping[str, Any]] = {}
    predicted: dict[str, float | None] = {}  # from a plan's first iteration; a probe may precede its last
    for row in run.metrics:
        plan = str(row.get("snip/plan_hash", ""))
        if is_finite(row.get(expected)):
            predicted.setdefault(plan, _number(row, expected))
        if is_finite(row.get(key)):
            last[plan] = row
    if len(last) > 1:
        last.pop("", None)  # before the first plan
    points = [
        (int(row["iteration"]), float(row[key]), _number(row, f"{key.removesuffix('mean')}standard_error"),
         predicted.get(plan))
        for plan, row in last.items()
    ]  # fmt: skip
    count = len(run.column("snip/bf16_loss")[0])
    text = (
        f"Mean over the extra BF16 forwards under each plan, {count} in all, with two standard errors, next to the "
        "prediction."
    )
    return Section("Measured against predicted", text, pictures.measured(points)) if points else None


def _number(row: Mapping[str, Any], key: str) -> float | None:
    return float(row[key]) if is_finite(row.get(key)) else None


def _trade_off(run: Run) -> Section | None:
    """Quality loss over savings, by the last statistics: the best plans, and the run's own."""
    if not run.plans or run.stats is None or run.config is None or run.config.precision.precision != "snip":
        return None
    try:
        planner = _planner(run.config, run.stats)
        objective = planner.config.snip.snip_objective
        if not get_objective(objective).needs_stats:
            return None
        request = planner.request(objective)
        frontier = planner.frontier(objective, time_limit=POINT_SECONDS, gap=1e-3)
    except ValueError as error:  # options that do not fit the statistics, or a missing table
        run.notes.append(f"no trade-off is shown: {error}")
        return None
    known = set(planner.choices.options)
    mine = [plan for plan in run.plans if set(plan.linears.values()) <= known]
    dots = [(planner.saved_by(p), planner.quality_of(p, request), f"iteration {p.iteration}") for p in mine]
    kept = [dots[i] for i in pictures.picked(len(dots) - 1, MOST_LINES)] if len(dots) > 1 else []
    figure = pictures.pareto(
        [(planner.saved_by(plan), planner.quality_of(plan, request)) for plan in frontier],
        {**({"chosen (the last plan)": dots[-1:]} if dots else {}), **({"plans before it": kept} if kept else {})},
        WHAT[planner.choices.measure],
    )
    text = f"All plans are scored with the statistics of iteration {run.stats.iteration} and the objective {objective}."
    asked = f"The target was {run.config.snip.snip_target}."
    if (nats := run.config.snip.snip_max_loss) is not None:
        asked = f"Each plan was the largest that measured below {nats} nats."
    return Section("Trade-off", f"{text} {asked}", [figure])


def _planner(config: Config, stats: Statistics) -> Planner:
    """A planner with a run's options and these statistics."""
    config = config.replace(snip_options=measured_options(config.snip.snip_options, stats.formats))
    shapes = snip_shapes(config)
    if [shape.name for shape in shapes] != list(stats.names):
        raise UserError("config.json and the statistics are of different models")
    return Planner.of(config, stats, shapes)


def _stages(run: Run) -> Section | None:
    """Balance of several pipeline stages under the last plan."""
    ends = {
        (int(match[1]), match[2]): (at[-1], values[-1])
        for key, (at, values) in run.columns.items()
        if at and (match := re.fullmatch(r"snip/stage_(\d+)/(achieved|modelled_time)", key))
    }
    newest = max((at for at, _ in ends.values()), default=0)
    found: dict[int, dict[str, float]] = {}
    for (stage, what), (at, value) in ends.items():
        if at == newest:  # an earlier plan may have had other stages
            found.setdefault(stage, {})[what] = value
    last = [(stage, of["achieved"], of["modelled_time"]) for stage, of in sorted(found.items()) if len(of) == 2]
    if not last:
        return None
    times = [time for _, _, time in last]
    ratio = max(times) * len(times) / sum(times)
    text = f"Modelled times under the last plan. The slowest stage takes {ratio:.3f} times the mean."
    return Section("Pipeline stages", text, [pictures.stages(last)])


def _pace(run: Run) -> Section | None:
    """Tokens per second, the share of time spent on SNIP, and memory."""
    at, seconds = run.column("iteration-time")
    if not at or not sum(seconds):
        return None
    figures, sizes = [], dict(zip(*run.column("batch-size")))
    if run.config is not None and sizes:
        sequence = run.config.model.seq_length
        pace = [(i, sizes[i] * sequence / s) for i, s in zip(at, seconds) if i in sizes and s > 0]
        figures.append(
            pictures.curves({"tokens/s": ([i for i, _ in pace], [v for _, v in pace])}, "tokens a second")
            | {"title": "Pace"}
        )
    spent = {
        "probes": "probe_seconds",
        "waiting for the solver": "wait_seconds",
        "trials": "trial_seconds",
        "applying plans": "apply_seconds",
    }
    so_far = np.cumsum(seconds)
    shares: dict[str, Curve] = {}
    for name, key in spent.items():
        taken = dict(zip(*run.column(f"snip/{key}")))
        if taken:
            shares[name] = (at, (np.cumsum([taken.get(i, 0.0) for i in at]) / so_far).tolist())
    if shares:
        figures.append(pictures.curves(shares, "share of all time so far", ".1%") | {"title": "Time spent on SNIP"})
    memory = {key: (xs, [y / _GIB for y in ys]) for key, (xs, ys) in _curves_of(run, "mem-").items() if xs}
    if memory:
        named = {key.removesuffix("-bytes"): curve for key, curve in memory.items()}
        figures.append(pictures.curves(named, "GiB of rank 0") | {"title": "Memory"})
    return Section("Pace and memory", "", figures) if figures else None


def _benchmarks(run: Run) -> Section | None:
    heads, rows = score_rows(read_evaluations(run.path, run.notes))
    if not rows:
        return None
    text = "Scores of lm-evaluation-harness with standard errors, by iteration and precision of the linears' forward."
    return Section("Benchmarks", text, body=table(heads, rows))


def _configuration(run: Run) -> Section | None:
    """Options that differ from their defaults, versions, and a folded list of all options."""
    if run.config is None:
        return None
    default = Config().to_dict()
    every = [(name, key, value) for name, group in run.config.to_dict().items() for key, value in group.items()]
    changed = [[f"--{k.replace('_', '-')}", _shown(v)] for name, k, v in every if default[name][k] != v]
    all_of = [[name, f"--{key.replace('_', '-')}", _shown(value)] for name, key, value in every]
    versions = [[key, str(value)] for key, value in run.versions.items()]
    body = table(("option", "value"), changed) + (
        table(("made with", "in the last start"), versions) if versions else ""
    )
    text = "Options that differ from their defaults."
    return Section("Configuration", text, (), body + folded("all options", table(("group", "option", "value"), all_of)))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


#: Sections after the loss, in the page's order.
_SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
    _optimisation, _plans, _divergences, trials, _measured, _trade_off, _benchmarks, _stages, _pace, _configuration,
)  # fmt: skip
