"""Trials in the training loop: what they leave alone, what they write, and what happens if they fail."""

from __future__ import annotations

import json
import math

import pytest

from megatron_snip.snip import coordinator
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.report.sections import write_report
from megatron_snip.train.step import Stepper
from tests.unit.train.recorded import named, run_of_everything, shown
from tests.unit.train.test_loop import HOW, SNIP, curve


@HOW
def test_trials_that_keep_the_plan_are_not_seen(how, train_here, tmp_path):
    """With or without them every linear is in FP4, which is all that the target allows."""
    snip = {"snip_options": "fp8,fp4", "snip_warmup_precision": "fp4", "snip_target": 1.0, **how}
    without = train_here(**{**SNIP, **snip}, run_dir=str(tmp_path / "without"))
    rows = train_here(**{**SNIP, **snip, "snip_trials": 8, "snip_trial_tokens": 256})
    assert [row["iteration"] for row in rows if "snip/trial_seconds" in row] == [3, 5]
    assert curve(rows) == curve(without)


def test_a_plan_that_was_tried_says_so(train_here, tmp_path, monkeypatch):
    """In its file, in metrics, and in the log of what was run beside it."""
    monkeypatch.setattr(Predictions, "total_loss_divergence", lambda self, linears: -math.inf)
    options = {"snip_target": 0.5, "snip_trials": 6, "snip_trial_tokens": 300, "train_iters": 3}
    rows = train_here(**{**SNIP, **options})
    (row,) = [row for row in rows if "snip/trial_passes" in row]
    assert row["snip/trial_tokens"] == 384, "whole sequences of 128"
    plan = Plan.load(tmp_path / "run/plans/iter_0000003.json")
    assert plan.trial is not None and plan.trial.tokens == 384
    assert row["snip/trial_passes"] == len(plan.trial.tried) + 1 == 6, "it costs more than predicted, which was made 0"
    assert plan.trial.increase == row["snip/trial_increase"]
    assert plan.trial.error == row["snip/trial_increase_standard_error"] > 0
    assert plan.trial.name == row["snip/trial_name"]
    tried = {one.name: one.increase for one in plan.trial.tried}
    assert tried["solver"] == row["snip/trial/solver"] and tried["lowest"] == row["snip/trial/lowest"]
    assert plan.achieved >= 0.5 and row["snip/plan_hash"] == plan.hash


def test_a_run_to_a_loss_in_place_of_a_share(train_here, tmp_path):
    """All that can be saved if it may cost anything, nothing if it may cost next to nothing."""
    plans = {}
    for nats in (10.0, 1e-9):
        folder = tmp_path / f"{nats}"
        options = {"snip_max_loss": nats, "snip_trials": 5, "snip_trial_tokens": 256, "train_iters": 3}
        rows = train_here(**{**SNIP, **options, "run_dir": str(folder)})
        plans[nats] = Plan.load(folder / "plans/iter_0000003.json")
        assert rows[-1]["snip/plan_hash"] == plans[nats].hash and rows[-1]["snip/solve_failed"] == 0
        assert 3 <= rows[-1]["snip/trial_passes"] <= 5
    assert plans[10.0].achieved == pytest.approx(1.0) and plans[10.0].trial.name == "target 100%"
    assert plans[1e-9].achieved == 0.0 and plans[1e-9].trial.name == "target 0%"


def test_a_run_to_a_loss_continues(train_here, tmp_path):
    """With the solve of a loss under way; by the target that is then given from the next probe on."""
    options = {**SNIP, "snip_max_loss": 10.0, "snip_trials": 3, "snip_trial_tokens": 256, "save_interval": 1}
    whole = train_here(**{**options, "run_dir": str(tmp_path / "whole")})
    train_here(**options, exit_interval=2)
    rows = train_here(**options, load=str(tmp_path / "run/checkpoints"))
    assert curve(rows) == curve(whole)
    assert [row["snip/plan_hash"] for row in rows] == [row["snip/plan_hash"] for row in whole]


def test_a_trial_that_fails_keeps_the_plan_in_force(train_here, monkeypatch):
    """Of the second plan: the first, which nothing was tried for, stays."""
    losses = Stepper.trial_runner

    def broken(self, batch, iteration):
        run = losses(self, batch, iteration)
        return lambda *context: run(*context) * math.nan

    monkeypatch.setattr(Stepper, "trial_runner", broken)
    rows = train_here(**{**SNIP, "snip_trials": 4})
    failed = [row["snip/solve_error"] for row in rows if row.get("snip/solve_failed")]
    assert failed == ["the trial failed: the loss in BF16 is nan"] * 2
    assert {row["snip/plan_hash"] for row in rows} == {""}


@pytest.mark.parametrize(("known", "tokens"), [(lambda seen: True, 512), (lambda seen: seen > 2, 1024)])
def test_a_probe_takes_tokens_until_the_cost_is_known(known, tokens, train_here, monkeypatch):
    """In batches of 256, here 512 at least; asked once there are as many."""
    asked = []
    monkeypatch.setattr(coordinator, "LEAST_TOKENS", 512)
    monkeypatch.setattr(coordinator, "suffices", lambda *of: asked.append(of) or known(len(asked)))
    rows = train_here(**{**SNIP, "snip_probe_tokens": "auto", "snip_interval": 100, "train_iters": 9})
    (row,) = [row for row in rows if "snip/probe_tokens" in row]
    assert row["snip/probe_tokens"] == tokens and len(asked) == tokens // 256 - 1
    assert 0 < row["snip/top_token"] < 1 and 0 < row["snip/cost_error"] < 2


def test_the_trade_off_of_a_run_to_a_loss(tmp_path):
    """Up to the most that can be reached, as of any run; the sentence says what was asked."""
    folder = run_of_everything(tmp_path / "run")
    assert "The target was 0.75." in write_report(folder).read_text()
    saved = json.loads((folder / "config.json").read_text())
    saved["snip"]["snip_max_loss"] = 0.05
    (folder / "config.json").write_text(json.dumps(saved))
    page = write_report(folder)
    assert "Each plan was the largest that measured below 0.05 nats." in page.read_text()
    saved = named(shown(page)["Trade-off"][0])["solved for each share"]["x"]
    assert (saved[0], saved[-1]) == (0, 1)
