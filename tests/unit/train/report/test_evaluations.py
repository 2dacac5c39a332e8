"""Scores of checkpoints: their files, what the report and wandb make of them."""

from __future__ import annotations

import json

import pytest

from megatron_snip.train.report.evaluations import Evaluation, evaluation_file, read_evaluations
from megatron_snip.train.report.sections import write_report

SCORES = {"arc": {"acc": (0.25, 0.01), "acc_norm": (0.5, None)}}


def test_a_file_keeps_what_was_measured_before(tmp_path):
    path = evaluation_file(tmp_path, 1000)
    assert path == tmp_path / "evaluations/iter_0001000.json"
    Evaluation(1000).with_scores("bf16", SCORES).save(path)
    again = Evaluation.load(path).with_scores("plan 12", SCORES).with_scores("bf16", {"arc": {"acc": (0.3, 0.02)}})
    again.with_scores("bf16", {"piqa": {"acc": (0.6, 0.0)}}).save(path)
    found = Evaluation.load(path)
    assert found.scores["plan 12"] == SCORES
    assert found.scores["bf16"] == {"arc": {"acc": (0.3, 0.02)}, "piqa": {"acc": (0.6, 0.0)}}


def test_a_row_names_precision_task_and_metric():
    row = Evaluation(7).with_scores("plan 12", SCORES).row("plan 12")
    assert row == {"iteration": 7, "evaluation/plan/arc/acc": 0.25, "evaluation/plan/arc/acc_norm": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "field version is 2, but this code reads version 1"),
        ({"scores": {"bf16": {"arc": {"acc": 0.5}}}}, "field scores.*: expected array, got float"),
        ({"scores": {"bf16": [1]}}, "field scores.*: expected object, got array"),
        ({"iteration": -1}, "field iteration is -1"),
        ({"more": 1}, "field more is unknown"),
    ],
)
def test_another_file_is_refused(change, message, tmp_path):
    path = evaluation_file(tmp_path, 1)
    Evaluation(1).with_scores("bf16", SCORES).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as error:
        Evaluation.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    notes = []
    assert read_evaluations(tmp_path, notes) == [] and notes == [str(error.value)]


def test_the_report_has_a_table_of_all(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0}\n{"iteration": 2, "lm loss": 1.5}\n')
    assert "Benchmarks" not in write_report(tmp_path).read_text()
    Evaluation(20).with_scores("fp4", {"<odd>": {"acc": (0.125, 0.01)}}).save(evaluation_file(tmp_path, 20))
    Evaluation(10).with_scores("bf16", SCORES).save(evaluation_file(tmp_path, 10))
    text = write_report(tmp_path).read_text()
    heads = ("iteration 10, bf16", "iteration 20, fp4")
    assert "<th>task</th><th>metric</th>" + "".join(f"<th class='number'>{head}</th>" for head in heads) in text
    empty, cell = "<td class='number'></td>", "<td class='number'>{} ± 0.01</td>".format
    assert f"<tr><td>arc</td><td>acc</td>{cell(0.25)}{empty}</tr>" in text
    assert f"<tr><td>&lt;odd&gt;</td><td>acc</td>{empty}{cell(0.125)}</tr>" in text
