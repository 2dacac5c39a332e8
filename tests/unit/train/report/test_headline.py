"""The head of a report: which run, what it cost in words, and how it ends beside others."""

from __future__ import annotations

import json
import math

import pytest

from megatron_snip.cli.report import report
from megatron_snip.snip.plan.plan_file import Plan, TrialRecord, TriedRecord
from megatron_snip.train.pictures import figures
from megatron_snip.train.report.headline import headline, last_difference, number, verdict
from megatron_snip.train.report.run_summary import read_run
from megatron_snip.train.report.sections import write_report
from tests.unit.train.recorded import FP4, FP8, NAMES, line, named, run_of_everything, shown, two_plans, write_run


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0"), (0.0012345, "0.0012"), (0.00012, "0.00012"), (0.0000999, "1.0e-4"), (-3e-7, "-3.0e-7"), (1.26, "1.3"),
     (123.4, "123"), (math.nan, "nan")],
)  # fmt: skip
def test_small_numbers_have_one_notation(value, text):
    assert number(value) == text


def tried_run(folder):
    """A run whose last plan was tried and measured: 18 of 21 linears in FP4."""
    tried = [
        TriedRecord("solver", 0.02, 0.001, 0.004),
        TriedRecord("hold layers.0.mlp.up_proj", 0.0024, 0.0004, 0.0011),
    ]
    trial = TrialRecord("hold layers.0.mlp.up_proj", 0.0024, 0.0004, 4096, tried)
    linears = {name: FP8 if number < 3 else FP4 for number, name in enumerate(NAMES)}
    plan = Plan(4, linears, "snip", 0.75, 18 / 21, trial=trial)
    key = "snip/measured_loss_divergence"
    measured = {f"{key}_mean": 0.003, f"{key}_standard_error": 0.0005, f"{key}_count": 7, "snip/plan_hash": plan.hash}
    lines = [line(1, **{"consumed-samples": 4}), line(5, **{"consumed-samples": 16_000, **measured})]
    made = write_run(folder, lines, (two_plans()[0], plan), precision="snip", vocab_size=128, global_batch_size=4)
    values = json.loads((made / "config.json").read_text())
    values["parallel"]["tensor_model_parallel_size"] = 2
    values["versions"] |= {"processes": 8, "started": "2026-11-25 12:00:00", "command": "pretrain_llama.py --bf16"}
    (made / "config.json").write_text(json.dumps(values))
    return made


def test_the_verdict_says_what_the_last_plan_costs_and_saves(tmp_path):
    """18 of 21 equal linears at a quarter of BF16's time and 3 at a half, against all at a half: 14 / 8."""
    folder = tried_run(tmp_path / "run")
    assert verdict(read_run(folder)) == (
        "85.7% of the linears' FLOPs are in FP4 under the last plan. In its trial this cost 0.0024 ± 0.00080 nats; the "
        "probe predicted 0.0011. During training, 7 extra BF16 forwards measured 0.0030 ± 0.0010 nats. By nominal GEMM "
        "times, the linears are 1.8 times as fast as in fp8 everywhere."
    )
    assert "<p class='verdict'>85.7% of" in write_report(folder).read_text()


def test_the_headline_names_model_tokens_layout_and_command(tmp_path):
    rows = dict(headline(read_run(tried_run(tmp_path / "run"))))
    assert rows["model"].startswith("llama, 3 blocks of 8, ") and rows["model"].endswith(" parameters")
    assert rows["trained on"] == "2.05 million tokens, 512 tokens a batch"
    assert rows["ran on"] == "8 x CPU (test): tp 2 x dp 4"
    assert rows["last started"] == "2026-11-25 12:00:00: pretrain_llama.py --bf16"


def test_a_run_without_options_or_plans_has_neither(tmp_path):
    run = read_run(write_run(tmp_path / "bare", [line(1)]))
    assert headline(run) == [] and verdict(run) == ""


def test_a_command_is_no_markup(tmp_path):
    folder = tried_run(tmp_path / "run")
    values = json.loads((folder / "config.json").read_text())
    values["versions"]["command"] = "x --run-dir '<script>alert(1)</script>'"
    (folder / "config.json").write_text(json.dumps(values))
    text = write_report(folder).read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text


def test_the_last_difference_by_hand():
    mine = list(range(1, 101)), [1.0] * 92 + [3.0, 5.0] * 4
    theirs = list(range(1, 200)), [1.0] * 199
    mean, error, count = last_difference(mine, theirs)
    assert count == 10 and mean == pytest.approx((4 * 2 + 4 * 4) / 10)
    deviations = [-2.4] * 2 + [-0.4, 1.6] * 4
    assert error == pytest.approx(2 * math.sqrt(sum(d * d for d in deviations) / 9 / 10))
    assert last_difference(([1], [2.0]), ([2], [2.0])) is None
    assert math.isnan(last_difference(([1], [2.0]), ([1], [1.5]))[1])


def test_the_terminal_says_how_runs_end_beside_each_other(tmp_path):
    runs = [str(run_of_everything(tmp_path / name, shift)) for name, shift in (("a", 0.25), ("b", 0.0))]
    assert "a - b: training loss +0.2500 ± " in report(runs, True, None)
    assert "a - b" not in report(runs, False, None)


def test_ticks_of_blocks_are_whole_numbers():
    for blocks in (3, 4, 16, 17, 80):
        axis = figures.divergence_heatmap({f"layers.{b}.mlp.up_proj": 1.0 for b in range(blocks)}, "")["layout"][
            "xaxis"
        ]
        assert axis["tick0"] == 0 and axis["dtick"] == -(-blocks // 16) and axis["tickformat"] == "d"


def test_predicted_and_measured_have_equal_axes(tmp_path):
    _, against = shown(write_report(run_of_everything(tmp_path / "run")))["Measured against predicted"]
    x, y = against["layout"]["xaxis"], against["layout"]["yaxis"]
    assert x["range"] == y["range"] and y["scaleanchor"] == "x"
    low, high = x["range"]
    bars = named(against)["plans"]
    tops = [m + e for m, e in zip(bars["y"], bars["error_y"]["array"], strict=True)]
    assert low < min(bars["x"]) and high > max(tops)


def test_marks_show_their_share_of_fp4(tmp_path):
    marks = named(shown(write_report(run_of_everything(tmp_path / "run")))["Loss"][0])["new plan"]
    assert marks["text"][:3] == ["", marks["text"][1], ""] and marks["text"][1].endswith("%")
    assert not any(figures.loss({"": (([1], [1.0]), ([], []))}, [(i, 0.5) for i in range(13)])["data"][-1]["text"])
