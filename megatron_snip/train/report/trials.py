"""The report's section on trials: measured and predicted loss of every plan that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_snip.snip.plan.plan_file import TrialRecord, TriedRecord
from megatron_snip.train.pictures.figures import MOST_MARKS, PALETTE, Figure, axes, line, picked
from megatron_snip.train.report.page import Section
from megatron_snip.train.report.run_summary import Run

#: The newest trials, which are shown plan by plan.
MOST_TRIALS = 10
_APPLIED = {"symbol": "star", "size": 14}


def trials(run: Run) -> Section | None:
    """The section on a run's trials, or None if there were none."""
    tried = [(plan.iteration, plan.trial) for plan in run.plans if plan.trial is not None]
    if not tried:
        return None
    figures = [_over_iterations(tried)] if len(tried) > 1 else []
    newest = tried[-MOST_TRIALS:]
    figures += [_one(trial) | {"title": f"Trial before iteration {iteration}"} for iteration, trial in newest[::-1]]
    others = sum(trial.name != "solver" for _, trial in tried)
    some = f" The newest {MOST_TRIALS} are shown one by one." if len(tried) > MOST_TRIALS else ""
    text = (
        f"{len(tried)} plans were tried before they took effect; {others or 'none'} of them replaced the solver's own. "
        f"Losses are above BF16's, with two standard errors, beside the probe's prediction.{some}"
    )
    return Section("Trials", text, figures)


def _points(name: str, xs: Sequence[Any], tried: Sequence[TriedRecord], colour: str, **more: Any) -> Figure:
    """Measured increases with two standard errors."""
    bars = {"type": "data", "array": [2 * (one.error or 0.0) for one in tried], "thickness": 1.2}
    points = line(name, ([0.0], [0.0]), colour, mode="markers", error_y=bars, **more)
    return points | {"x": list(xs), "y": [one.increase for one in tried]}


def _one(trial: TrialRecord) -> Figure:
    """All plans of a trial, in the order of trying."""
    names = [one.name for one in trial.tried]
    known = [one for one in trial.tried if one.predicted is not None]
    data = [
        _points("measured", names, trial.tried, PALETTE[0]),
        _points("applied", [trial.name], [trial.taken], PALETTE[1], marker=_APPLIED),
    ]
    if known:
        predicted = line("predicted", ([0.0], [0.0]), PALETTE[2], mode="markers", marker={"symbol": "x", "size": 9})
        data.append(predicted | {"x": [one.name for one in known], "y": [one.predicted for one in known]})
    layout = axes("", f"loss above BF16, nats ({trial.tokens} tokens)")
    layout["xaxis"] |= {"type": "category", "automargin": True}
    layout["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def _over_iterations(tried: Sequence[tuple[int, TrialRecord]]) -> Figure:
    """All trials: the applied plans, their predictions, and the other plans."""
    tried = [tried[i] for i in picked(len(tried), MOST_MARKS)]
    at = [iteration for iteration, _ in tried]
    applied = [trial.taken for _, trial in tried]
    others = [(i, one) for i, trial in tried for one in trial.tried if one.name != trial.name]
    known = [(i, one.predicted) for i, one in zip(at, applied) if one.predicted is not None]
    data = []
    if others:
        xs, rest = zip(*others)
        data.append(_points("tried beside it", xs, rest, "#9db7d6", text=[one.name for one in rest]))
    names = [one.name for one in applied]
    data.append(_points("applied", at, applied, PALETTE[1], marker=_APPLIED, text=names))
    if known:
        data.append(line("predicted of the applied plan", tuple(zip(*known)), PALETTE[2], mode="lines+markers"))
    return {"data": data, "layout": axes("iteration", "loss above BF16 (nats)"), "title": "All trials"}
