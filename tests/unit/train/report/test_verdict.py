"""The report's verdict and headline, from made-up runs."""

from __future__ import annotations

import pytest

from megatron_snip.cli.report import report
from megatron_snip.quant.linears.shape import LinearShape
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.plan.cost import NOMINAL
from megatron_snip.snip.plan.plan_file import TrialRecord
from megatron_snip.train.report.run_summary import read_run
from megatron_snip.train.report.sections import write_report
from megatron_snip.train.report.verdict import headline, speed_over_fp8, verdict
from tests.unit.train.recorded import FP4, FP8, NAMES, line, run_of_everything, write_run


def tried(increase: float) -> Plan:
    seen = {"name": "solver", "increase": increase, "error": 0.0004, "predicted": 0.001}
    trial = TrialRecord("solver", increase, 0.0004, 64, (seen,))
    return Plan(2, dict.fromkeys(NAMES, FP4), "snip", 0.75, 0.75, trial=trial)


@pytest.mark.parametrize(
    ("increase", "told"),
    [
        (0.0012, "cost 0.0012 ± 0.0004 nats a token"),
        (0.0007, "cost nothing that shows above the noise: 0.0007 ± 0.0004 nats a token"),
    ],
)
def test_the_verdict_of_a_trial(increase, told, tmp_path):
    run = read_run(write_run(tmp_path, [line(i) for i in (1, 2)], (tried(increase),)))
    words = f"75% of the linears' FLOPs in FP4 {told}; predicted 0.001"
    assert verdict(run, None) == f"{words}." and verdict(run, 1.4) == f"{words}; modelled 1.4 times as fast as FP8."
    assert f"<td>{words}.</td>".replace("'", "&#39;") in write_report(tmp_path).read_text().replace("&#x27;", "&#39;")


def test_bf16_measurements_count_before_the_trial(tmp_path):
    key, plan = "snip/measured_loss_divergence", tried(0.0012)
    rows = {"snip/plan_hash": plan.hash, f"{key}_mean": 0.5, f"{key}_standard_error": 0.01}
    run = read_run(write_run(tmp_path, [line(3, **rows, **{"snip/predicted_loss_divergence": 0.25})], (plan,)))
    assert "cost 0.5 ± 0.01 nats a token; predicted 0.25." in verdict(run, None)


def test_nothing_measured_is_no_verdict(tmp_path):
    plan = Plan(2, dict.fromkeys(NAMES, FP4), "snip", 0.75, 0.75)
    assert verdict(read_run(write_run(tmp_path / "a", [line(1)], (plan,))), 1.4) == ""
    back = [line(3, **{"snip/plan_hash": ""})]  # the guard returned to the precision before
    assert verdict(read_run(write_run(tmp_path / "b", back, (tried(0.1),))), 1.4) == ""


def test_the_modelled_speed_by_hand():
    """Half of equal linears in FP4, at half of FP8's time: 1 / (0.5 + 0.25)."""
    shapes = [LinearShape("a", 8, 8), LinearShape("b", 8, 8)]
    plan = Plan(1, {"a": FP4, "b": FP8})
    assert speed_over_fp8(plan, shapes, NOMINAL) == pytest.approx(4 / 3)


def test_the_headline(tmp_path):
    rows = dict(headline(read_run(run_of_everything(tmp_path / "run"))))
    assert rows["model"].startswith("llama, ") and "3 blocks" in rows["model"]
    assert rows["layout"].startswith("tp 1, pp ") and rows["device"] == "CPU (test)"
    assert "pretrain_llama.py" in rows["command"] and "--global-batch-size 4" in rows["command"]


def test_a_comparison_tells_the_last_difference_in_the_terminal(tmp_path):
    mine = write_run(tmp_path / "mine", [line(i) for i in range(1, 101)])
    theirs = write_run(tmp_path / "theirs", [line(i, **{"lm loss": 4.75 - 0.1 * i}) for i in range(1, 101)])
    told = report([str(mine), str(theirs)], True, None)
    assert (
        "mine minus theirs: 0.25 ± " in told and "(two standard errors) nats over the last 8 common iterations." in told
    )
    page = (mine / "compare.html").read_text()
    assert "mine minus theirs: 0.25 ± " in page and '"title":"Training loss: mine minus theirs"' in page
