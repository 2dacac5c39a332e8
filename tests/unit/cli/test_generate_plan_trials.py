"""tools/generate_plan.py --try and --snip-max-loss: the best plan is run before it is written."""

from __future__ import annotations

import json
import math

import pytest

from megatron_snip import runtime
from megatron_snip.cli import trials
from megatron_snip.config import Config
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train import loop
from megatron_snip.train.step import Stepper
from tests.unit.cli.conftest import TINY
from tests.unit.cli.test_generate_plan import NAMES, generate
from tests.unit.train.recorded import named, shown

__all__ = ["generate"]


@pytest.fixture
def trying(generate, finished_run, monkeypatch):
    """Call it to try plans of the run's statistics with the weights that they were collected from."""
    monkeypatch.setattr(runtime, "stop", lambda: None)
    words = ["--load", str(finished_run / "checkpoints/iter_0000002"), "--snip-probe-tokens", "256"]
    words += ["--snip-trial-tokens", "256", "--snip-trials", "4", "--snip-options", "fp8,fp4"]
    words += ["--snip-granularity", "linear"]
    return lambda *more, **how: generate(*words, *more, **how)


def last_line(said: str) -> str:
    return said.splitlines()[-2]


def test_a_plan_that_was_tried(trying, generate, tmp_path, finished_run, monkeypatch):
    """The file of the best has what was measured; the others were not tried."""
    monkeypatch.setattr(trials.Predictions, "total_loss_divergence", lambda self, linears: -math.inf)
    said = trying("--try", "--snip-target", "0.5")
    best = Plan.load(tmp_path / "plans/best.json")
    assert best.trial is not None and best.trial.tokens == 256
    assert [one.name for one in best.trial.tried] == ["solver", "lowest", "layer_id"], "three passes beside BF16's"
    assert last_line(said).startswith(
        f"of 3 plans on 256 tokens '{best.trial.name}' is best: {best.trial.increase:.4g}"
    )
    assert all(Plan.load(tmp_path / f"plans/{name}.json").trial is None for name in NAMES[1:])
    assert best.achieved >= 0.5 and best.iteration == 3
    rows = json.loads((tmp_path / "plans/pareto.json").read_text())["plans"]
    before = best.linears
    generate("--snip-target", "0.5", "--snip-granularity", "linear")
    plain = Plan.load(tmp_path / "plans/best.json")
    assert {row["bound"] for row in rows.values()} == {plain.solver.bound}, "whatever plan measured best"
    assert plain.trial is None and (plain.linears == before) == (best.trial.name == "solver")


def test_it_measures_what_the_run_would(trying, finished_run, tmp_path, monkeypatch):
    """A run from that checkpoint tries the same plans on the same tokens, if its plan takes effect at once."""
    monkeypatch.setattr(loop, "write_report", lambda run_dir: run_dir)
    monkeypatch.setattr(loop, "format_summary", lambda run_dir: "")
    snip = {"precision": "snip", "snip_start": 3, "snip_interval": 9, "snip_apply_lag": 0, "snip_probe_tokens": 256,
            "snip_target": 0.5, "snip_trials": 4, "snip_trial_tokens": 256, "snip_granularity": "linear",
            "train_iters": 4}  # fmt: skip
    folders = {"load": str(finished_run / "checkpoints"), "ckpt_step": 2, "save": str(tmp_path / "saves")}
    loop.train(Config().replace(**{**TINY, **snip, **folders, "run_dir": str(tmp_path / "run")}))
    trying("--try", "--snip-target", "0.5")
    best, applied = Plan.load(tmp_path / "plans/best.json"), Plan.load(tmp_path / "run/plans/iter_0000003.json")
    assert best.hash == applied.hash and best.trial == applied.trial


def test_a_loss_in_place_of_a_saving(trying, tmp_path):
    said = trying("--snip-max-loss", "10")
    best = Plan.load(tmp_path / "plans/best.json")
    assert best.achieved == best.target == 1.0 and best.trial.name == "target 100%"
    assert last_line(said).startswith("of 2 plans on 256 tokens 'target 100%' is the largest below 10 nats: ")
    said = trying("--snip-max-loss", "1e-9", "--try")
    best = Plan.load(tmp_path / "plans/best.json")
    assert best.achieved == best.target == 0.0 and best.trial.name == "target 0%"
    assert last_line(said).startswith("of 3 plans on 256 tokens 'target 0%' is taken, as no plan stays below 1e-09")
    found = json.loads((tmp_path / "plans/pareto.json").read_text())
    assert {row["target"] for row in found["plans"].values()} == {0.0}, "others are of the share that was found"
    (figure,) = shown(tmp_path / "plans/pareto.html")["Measured"]
    measured, predicted = named(figure)["measured"], named(figure)["predicted"]
    assert measured["x"] == predicted["x"] and measured["x"][0] == 0.0 and measured["x"][-1] == 1.0
    assert measured["y"][0] == pytest.approx(best.trial.increase, rel=1e-4)


def test_weights_of_another_iteration_are_told(trying, finished_run, caplog):
    trying("--try", "--load", str(finished_run / "checkpoints"))
    assert "the statistics are of iteration 3, but --load has the weights before iteration 5" in caplog.text


def test_a_trial_that_fails_is_told(trying, monkeypatch):
    losses = Stepper.trial_runner

    def breaks(*, bf16: bool):
        def broken(self, batch, iteration):
            run = losses(self, batch, iteration)
            return lambda *context: run(*context) * (math.nan if bf16 or not context else 1.0)

        monkeypatch.setattr(Stepper, "trial_runner", broken)

    breaks(bf16=True)
    with pytest.raises(ValueError, match="--load .*: the trial failed: the loss in BF16 is nan"):
        trying("--try")
    breaks(bf16=False)
    with pytest.raises(ValueError, match="no plan has a finite loss in the trial"):
        trying("--try")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--try"], "--try runs the model, so it needs --load; give a folder of checkpoints"),
        (["--snip-max-loss", "0.1"], "--snip-max-loss runs the model, so it needs --load"),
        (["--try", "--snip-trials", "1"], "--try runs BF16 and plans, and --snip-trials is 1; give 2 or more"),
        (["--snip-max-loss", "0.1", "--snip-trials", "0"], "--snip-max-loss 0.1 .* --snip-trials is 0; give 3 or more"),
        (["--snip-max-loss", "0.1", "--snip-target", "0.5"],
         "--snip-target and --snip-max-loss are alternatives, and both are given; drop one"),
        (["--try", "--load", "nowhere"], "--load nowhere: no checkpoint is there"),
    ],
)  # fmt: skip
def test_bad_trials(words, said, generate):
    with pytest.raises(ValueError, match=said):
        generate(*words)


def test_a_saving_replaces_the_loss_of_a_file(generate, tmp_path):
    """The command line wins, and nothing is tried."""
    (tmp_path / "options.toml").write_text("snip-max-loss = 0.1\n")
    generate("--config", str(tmp_path / "options.toml"), "--snip-target", "0.5")
    best = Plan.load(tmp_path / "plans/best.json")
    assert best.target == 0.5 and best.trial is None


def test_a_bad_loss(trying):
    with pytest.raises(ValueError, match="--snip-max-loss is -1.0; give a number above 0"):
        trying("--snip-max-loss=-1")
