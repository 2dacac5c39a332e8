"""Scores of a run's checkpoints on benchmarks, one file per checkpoint.

    evaluations/iter_0001000.json
    {"version": 1, "iteration": 1000, "model": "0123456789abcdef",
     "scores": {"bf16": {"arc_easy": {"acc": [0.31, 0.01]}}, "plan 0123456789abcdef": {...}}}

Convention: scores[precision of the forward][task][metric] is the value with its standard error, or null if unknown.
Another evaluation of the same checkpoint adds to the file and replaces repeated measurements.  model is the run's id,
or the path of a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_snip.files.json import Count, Text, checked, in_file, read_json, write_json
from megatron_snip.train.report.run_summary import noted

_WAY_OUT = "evaluate the checkpoint again, or move the file away"
#: Metric -> (value, standard error or None).
Scores = dict[Text, tuple[float, float | None]]


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores of one checkpoint: precision of the forward -> task -> metric -> (value, standard error)."""

    iteration: Count
    scores: dict[Text, dict[Text, Scores]] = {}
    model: Text = ""
    version: Count = 1

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read a file from ``save``.  Raises UserError for anything else."""
        values = read_json(path, "evaluation", _WAY_OUT)
        with in_file(path, _WAY_OUT):
            return checked(values, cls, version=1)

    def save(self, path: Path) -> None:
        """Write the file, atomically."""
        write_json(path, msgspec.to_builtins(self))

    def with_scores(self, precision: str, tasks: Mapping[str, Scores]) -> Evaluation:
        """A copy with further measurements."""
        scores = {**self.scores, precision: {**self.scores.get(precision, {}), **tasks}}
        return msgspec.structs.replace(self, scores=scores)

    def row(self, precision: str) -> dict[str, Any]:
        """Row for wandb and TensorBoard: ``evaluation/<precision>/<task>/<metric>``, with plans named without hash."""
        word = precision.partition(" ")[0]
        tasks = self.scores[precision]
        values = {
            f"evaluation/{word}/{t}/{m}": value for t, metrics in tasks.items() for m, (value, _) in metrics.items()
        }
        return {"iteration": self.iteration, **values}


def evaluation_file(run_dir: Path, iteration: int) -> Path:
    """Path of a checkpoint's scores in a run folder."""
    return run_dir / "evaluations" / f"iter_{iteration:07d}.json"


def read_evaluations(run_dir: Path, notes: list[str]) -> list[Evaluation]:
    """All evaluations of a run folder, by iteration.  Unreadable files are added to the notes."""
    found = [noted(notes, Evaluation.load, path) for path in sorted(run_dir.glob("evaluations/iter_*.json"))]
    return sorted((one for one in found if one is not None), key=lambda evaluation: evaluation.iteration)


def shown(value: float, error: float | None) -> str:
    """A score with its standard error."""
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def score_rows(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table with a row per metric of a task, and a column per checkpoint and precision."""
    columns = [(each, precision) for each in evaluations for precision in each.scores]
    names = {
        (task, metric): None for each, p in columns for task, metrics in each.scores[p].items() for metric in metrics
    }
    rows = []
    for task, metric in names:
        found = (each.scores[precision].get(task, {}).get(metric) for each, precision in columns)
        rows.append([task, metric, *("" if score is None else shown(*score) for score in found)])
    return ["task", "metric", *(f"iteration {each.iteration}, {precision}" for each, precision in columns)], rows
