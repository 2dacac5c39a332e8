"""The training loop in one process: probes without a trace, skipped steps, leaving, what it writes."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time

import numpy as np
import pytest

from megatron_snip.checkpoint.manifest import newest
from megatron_snip.config import Config
from megatron_snip.quant import PLAIN, LinearPrecision
from megatron_snip.snip.measure.probe import Probe
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train import loop, setup
from megatron_snip.train.run.state_file import read_state
from megatron_snip.train.setup import snip_shapes
from megatron_snip.train.step import Stepper
from tests.unit.train.conftest import TINY

SNIP = {
    "snip_granularity": "linear",
    "snip_probe_tokens": 1,
    "snip_trials": 0,
    "precision": "snip",
    "snip_start": 2,
    "snip_interval": 2,
    "snip_target": 0.0,
    "train_iters": 6,
}
#: What else may notice a pass beside training: the compute dtype, and what a forward of its own recomputes.
HOW = pytest.mark.parametrize("how", [{}, {"bf16": True, "recompute_granularity": "full"}], ids=["", "bf16 recompute"])


def curve(rows: list[dict]) -> list[tuple]:
    return [(row["iteration"], row["lm loss"], row["grad-norm"], row["learning-rate"]) for row in rows]


@pytest.mark.parametrize("precision", ["bf16", "fp4"])
@HOW
def test_probes_whose_plan_never_changes_anything_are_not_seen(precision, how, train_here, tmp_path):
    """FP8 is probed beside FP4, but a target of 1 leaves every linear in FP4."""
    if precision == "bf16":
        snip = {"snip_options": "bf16", "snip_warmup_precision": "bf16"}
    else:
        snip = {"snip_options": "fp8,fp4", "snip_warmup_precision": "fp4", "snip_target": 1.0}
    without = train_here(precision=precision, train_iters=6, run_dir=str(tmp_path / "without"), **how)
    rows = train_here(**{**SNIP, **snip, **how})
    assert [row["iteration"] for row in rows if "snip/probe_seconds" in row] == [2, 4]
    assert [row["iteration"] for row in rows if row.get("snip/solve_failed") == 0] == [3, 5]
    assert curve(rows) == curve(without)


@HOW
def test_a_forward_in_bf16_is_not_seen(how, train_here, tmp_path):
    """Through a probe, a solve in flight and a swap from BF16 to FP8 and FP4 side by side."""
    options = {**SNIP, "snip_target": 0.5, "snip_apply_lag": 1, "eval_interval": 3, "eval_iters": 1, **how}
    without = train_here(**options, run_dir=str(tmp_path / "without"))
    rows = train_here(**options, snip_bf16_eval_interval=2)
    assert curve(rows[1:]) == curve(without[1:])
    assert [row["snip/plan_hash"] for row in rows[1:]] == [row["snip/plan_hash"] for row in without[1:]]
    assert [row.get("lm loss validation") for row in rows] == [row.get("lm loss validation") for row in without]
    measured = {row["iteration"]: row for row in rows if "snip/bf16_loss" in row}
    assert list(measured) == [2, 4, 6] and not any("snip/bf16_loss" in row for row in without)
    for row in measured.values():
        assert row["snip/measured_loss_divergence"] == row["lm loss"] - row["snip/bf16_loss"]
    assert measured[2]["snip/measured_loss_divergence"] == 0 == measured[2]["snip/predicted_loss_divergence"]
    assert measured[4]["snip/measured_loss_divergence"] != 0 < measured[4]["snip/predicted_loss_divergence"]
    changed = next(row["snip/churn"] for row in rows if row["iteration"] == 5) > 0  # from one plan to the next
    assert changed == (measured[4]["snip/predicted_loss_divergence"] != measured[6]["snip/predicted_loss_divergence"])
    plans = [row["snip/plan_hash"] for row in measured.values()]
    counts = [row["snip/measured_loss_divergence_count"] for row in measured.values()]
    assert counts == [plans[: i + 1].count(plan) for i, plan in enumerate(plans)], "a mean for each plan"
    assert measured[4]["snip/measured_loss_divergence_mean"] == measured[4]["snip/measured_loss_divergence"]


def test_a_forward_in_bf16_needs_no_planner(train_here, tmp_path):
    without = train_here(precision="fp4", run_dir=str(tmp_path / "without"))
    rows = train_here(precision="fp4", snip_bf16_eval_interval=3)
    assert curve(rows) == curve(without)
    assert [row["iteration"] for row in rows if row.get("snip/measured_loss_divergence")] == [3]
    assert not any("predicted" in key for row in rows for key in row)


def test_a_plan_that_changes_precision_is_seen(train_here, tmp_path):
    without = train_here(train_iters=6, run_dir=str(tmp_path / "without"))
    rows = train_here(**{**SNIP, "snip_target": 1.0})
    assert curve(rows)[:2] == curve(without)[:2] and curve(rows)[2] != curve(without)[2]


@HOW
def test_a_preflight_is_not_seen(how, train_here, tmp_path):
    options = {**SNIP, "snip_target": 0.5, "snip_weight": 1.0, **how}
    without = train_here(**options, preflight=False, run_dir=str(tmp_path / "without"))
    rows = train_here(**options)
    assert curve(rows) == curve(without)
    assert [row["snip/plan_hash"] for row in rows] == [row["snip/plan_hash"] for row in without]
    one, other = (Statistics.load(tmp_path / run / "stats/iter_0000004.json") for run in ("run", "without"))
    assert np.array_equal(one.values, other.values)


def test_a_preflight_runs_every_option_and_a_probe(train_here, tmp_path, monkeypatch, caplog):
    ran, probed = [], []
    gradients, run = Stepper.gradients, Probe.run

    def seen(self, batch, iteration, context=PLAIN, **how):
        if iteration == 0:
            linears = [linear for stage in self.pipeline.stages.values() for linear in stage.linears().values()]
            ran.append(({str(context.precision or linear.precision) for linear in linears}, len(batch.tokens)))
        return gradients(self, batch, iteration, context, **how)

    monkeypatch.setattr(Stepper, "gradients", seen)
    monkeypatch.setattr(Probe, "run", lambda self, *args, **how: probed.append(args[2]) or run(self, *args, **how))
    monkeypatch.setattr(logging.getLogger("megatron_snip"), "propagate", True)
    with caplog.at_level(logging.INFO, "megatron_snip"):
        train_here(**SNIP, snip_warmup_precision="fp4", global_batch_size=4)
    assert ran == [({"fp8"}, 2), ({"fp4"}, 2), ({"bf16"}, 2)] and probed == [0, 2, 4]
    assert sum("preflight: fp8, fp4 and a probe in " in line for line in caplog.messages) == 1
    ran.clear()
    train_here(**SNIP, preflight=False, run_dir=str(tmp_path / "without"))
    assert not ran


def test_what_a_run_will_not_come_to_is_told(train_here, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("megatron_snip"), "propagate", True)

    def told(**options) -> list[str]:
        caplog.clear()
        train_here(**{**SNIP, "train_iters": 2, "preflight": False, "snip_start": 1, **options})
        starts = ("no plan", "a plan", "--eval-interval", "no profile", "nothing is left")
        return [line for line in caplog.messages if line.startswith(starts)]

    saves, real = str(tmp_path / "run/checkpoints"), setup.build_datasets
    assert not told(run_dir=str(tmp_path / "in time"), eval_interval=1, profile=True, profile_step_start=2)
    monkeypatch.setattr(setup, "build_datasets", lambda *args: (real(*args)[0], None))
    assert [line.partition("; ")[0] for line in told(snip_start=2, eval_interval=1, profile=True)] == [
        "no plan will take effect: a probe is due at iteration 2, its plan 1 later, and the last iteration is 2",
        "--eval-interval is 1, but there is no validation data",
        "no profile will be written: --profile-step-start is 10, but this run makes iterations 1 to 2",
    ]
    resumed = told(load=saves, train_iters=3, snip_start=2, profile=True, profile_step_start=2)
    assert resumed[0].endswith("; all linears stay in bf16, unless you raise --train-iters")
    assert [line.partition("; ")[0] for line in resumed] == [
        "no plan will take effect: a probe is due at iteration 4, its plan 1 later, and the last iteration is 3",
        "no profile will be written: --profile-step-start is 2, but this run makes iterations 3 to 3",
    ]
    assert told(load=saves, train_iters=2) == [
        "nothing is left to train: iteration 3 is done, and --train-iters is 2; raise it"
    ]
    assert read_state(tmp_path / "run/checkpoints", 3)["iteration"] == 3
    shutil.copytree(tmp_path / "run", tmp_path / "past")
    past = {"load": str(tmp_path / "past/checkpoints"), "run_dir": str(tmp_path / "past"), "train_iters": 5}
    (line,) = told(**past, snip_start=2, snip_interval=10)
    assert line.endswith("; all linears stay in bf16, unless you give --snip-start 4"), "a lower one changes nothing"
    late = {"load": saves, "train_iters": 20, "snip_interval": 10, "snip_start": 2, "exit_interval": 4}
    assert told(**late) == [
        "no plan is in force: a probe is due at iteration 12, its plan 1 later; all linears are in bf16 until then, "
        "unless you give --snip-start 4"
    ]
    assert not told(**{**late, "snip_start": 5, "exit_interval": 6}), "its plan is in force from iteration 6 on"
    assert not told(**{**late, "exit_interval": 8})
    assert told(**{**late, "snip_fix": "layers.0.*=fp8", "exit_interval": 9}) == [
        "a plan from before the change (snip_fix:  -> layers.0.*=fp8) holds until iteration 13; "
        "give --snip-start 9 to plan at once"
    ]


def test_a_run_that_continues_in_another_folder_has_the_plan_in_force_there(train_here, tmp_path):
    options = {**SNIP, "snip_start": 1, "snip_interval": 10, "preflight": False}
    train_here(**{**options, "train_iters": 2})
    load, there = str(tmp_path / "run/checkpoints"), tmp_path / "there"
    (row,) = train_here(**{**options, "train_iters": 3}, load=load, run_dir=str(there))
    assert Plan.load(there / "plans/iter_0000002.json").hash == row["snip/plan_hash"] != ""


def test_a_resume_tells_that_a_plan_file_is_not_what_it_was(train_here, tmp_path, monkeypatch, caplog):
    """Rows name the plan that they ran under."""
    monkeypatch.setattr(logging.getLogger("megatron_snip"), "propagate", True)
    model, file = Config().replace(**TINY), tmp_path / "plan.json"
    options = {"precision": "plan", "precision_plan": str(file), "load": str(tmp_path / "run/checkpoints")}

    def train(precision: str, to: int) -> tuple[str, list[str]]:
        plan = Plan.by_hand({s.name: LinearPrecision.parse(precision) for s in snip_shapes(model)}, snip_shapes(model))
        plan.save(file)
        caplog.clear()
        rows = train_here(**options, train_iters=to)
        assert rows[-1]["snip/plan_hash"] == plan.hash
        return plan.hash, [line for line in caplog.messages if "precision_plan" in line]

    first, told = train("fp8", 1)
    assert not told and not train("fp8", 2)[1]
    second, told = train("fp4", 3)
    assert told == [f"this run continues with a changed option, precision_plan: plan {first} -> plan {second}"]


def test_every_iteration_has_its_row(train_here, tmp_path):
    rows = train_here(eval_interval=2, eval_iters=1)
    trained = [row for row in rows if row["iteration"] > 0]
    assert [row["iteration"] for row in trained] == [1, 2, 3, 4]
    for i, row in enumerate(trained, 1):
        assert row["consumed-samples"] == 2 * i and row["batch-size"] == 2 and row["skipped"] == 0
        assert row["learning-rate"] == 0.01 and row["grad-norm"] > 0 and row["iteration-time"] > 0
    assert [row["iteration"] for row in rows if "lm loss validation" in row] == [0, 2, 4]
    state = read_state(tmp_path / "run/checkpoints", 4)
    assert (state["optimizer_steps"], state["consumed_samples"], state["nan_iterations"]) == (4, 8, 0)
    assert state["config"]["model"]["hidden_size"] == 128


def test_a_progress_line_counts_iterations_alone(train_here, monkeypatch):
    """Neither the validations among them nor the start before them: 0.2 s each, and an iteration takes less."""
    said: list[str] = []
    validate, load = loop.Trainer._validate, loop.Trainer._load
    monkeypatch.setattr(loop.runtime, "say", said.append)
    monkeypatch.setattr(loop.Trainer, "_validate", lambda self: time.sleep(0.2) or validate(self))
    monkeypatch.setattr(loop.Trainer, "_load", lambda self: time.sleep(0.2) or load(self))
    rows = train_here(eval_interval=1, eval_iters=1, log_interval=2, preflight=False)
    lines = [line for line in said if "elapsed time" in line]
    seconds = [row["iteration-time"] for row in rows[1:]]
    for line, (one, other) in zip(lines, (seconds[:2], seconds[2:]), strict=True):
        assert f"elapsed time per iteration (ms): {(one + other) / 2 * 1000:.1f} |" in line
        assert re.search(r"\| tokens per second: \d+ \| time left: \d+:\d\d:\d\d \|$", line)
    assert "time left: 0:00:00" in lines[-1] and "time left: 0:00:00" not in lines[0]


def reading(monkeypatch) -> list[tuple[str, list[int]]]:
    """What is trained on and validated with from here on: ("step" or "evaluate", numbers of the samples)."""
    read: list[tuple[str, list[int]]] = []
    for name in ("step", "evaluate"):
        plain = getattr(Stepper, name)

        def seen(self, batch, *args, name=name, plain=plain, **how):
            read.append((name, batch.sample_index.flatten().tolist()))
            return plain(self, batch, *args, **how)

        monkeypatch.setattr(Stepper, name, seen)
    return read


def test_a_batch_that_grows_takes_the_samples_in_order_and_resumes_inside(train_here, tmp_path, monkeypatch):
    """2, 4 and 6 sequences, then 8: also through a probe and a resume in the middle of the ramp."""
    options = {
        **SNIP, "snip_target": 0.5, "snip_start": 3, "snip_interval": 9, "global_batch_size": 8, "lr_warmup_samples": 9,
        "rampup_batch_size": (2, 2, 12), "train_iters": 0, "train_samples": 44, "snip_probe_tokens": 600,
    }  # fmt: skip
    read = reading(monkeypatch)
    whole = train_here(**options, run_dir=str(tmp_path / "whole"))
    sizes = [2, 2, 4, 6, 8, 8, 8]  # at 0, 2, 4 and 8, then past the ramp; the 6 samples that are left make no batch
    assert [row["batch-size"] for row in whole] == sizes
    assert [row["consumed-samples"] for row in whole] == [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert [i for name, samples in read if name == "step" for i in samples] == list(range(sum(sizes)))
    assert whole[0]["learning-rate"] == 0.0 and whole[3]["learning-rate"] == pytest.approx(1e-2 * 8 / 9)
    assert Statistics.load(tmp_path / "whole/stats/iter_0000003.json").tokens == 4 * 128, "the batch in force"
    del read[:]
    train_here(**options, exit_interval=3)
    rows = train_here(**options, load=str(tmp_path / "run/checkpoints"))
    assert curve(rows) == curve(whole) and [row["batch-size"] for row in rows] == sizes
    assert [row["snip/plan_hash"] for row in rows] == [row["snip/plan_hash"] for row in whole]


def test_validations_move_on_and_a_resume_goes_on_with_them(train_here, tmp_path, monkeypatch):
    options = {"train_iters": 7, "eval_interval": 2, "eval_iters": 2}
    read = reading(monkeypatch)
    whole = train_here(**options, run_dir=str(tmp_path / "whole"))
    validated = [samples for name, samples in read if name == "evaluate"]
    # before training those of the first validation; then after iterations 2, 4, 6 and the last
    assert validated == [[0, 1], [2, 3], *([i, i + 1] for i in range(0, 16, 2))]
    told = [row.get("lm loss validation") for row in whole]
    assert len({loss for loss in told if loss is not None}) == 5
    del read[:]
    train_here(**options, exit_interval=4)
    saves = tmp_path / "run/checkpoints"
    assert read_state(saves, 4)["consumed_valid_samples"] == 8
    rows = train_here(**options, load=str(saves))
    assert [row.get("lm loss validation") for row in rows] == told
    assert [samples for name, samples in read if name == "evaluate"] == validated


def test_an_iteration_without_an_update_does_not_move_the_rate(train_here, tmp_path, monkeypatch):
    """The first update has the rate at 0 samples, each other one that of the samples behind the updates before it."""
    break_steps(monkeypatch, {2})
    rows = train_here(lr_warmup_iters=4, train_iters=4, rerun_mode="disabled")
    assert [row["learning-rate"] for row in rows] == pytest.approx([0.0, 0.0025, 0.0025, 0.005])
    assert read_state(tmp_path / "run/checkpoints", 4)["scheduled_samples"] == 6


def break_steps(monkeypatch, bad: set[int], *, loss: float = math.nan) -> None:
    """Make the loss of some iterations what it is not, on the way into the step."""
    build_parts = loop.build

    def build(*args, **how):
        parts = build_parts(*args, **how)
        gradients = parts.stepper.gradients

        def broken(batch, iteration, *context, **how):
            result, stop = gradients(batch, iteration, *context, **how)
            return (type(result)(loss, result.grad_norm, result.clip) if iteration in bad else result), stop

        parts.stepper.gradients = broken
        return parts

    monkeypatch.setattr(loop, "build", build)


def valid_json(path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_skips_the_step(loss, train_here, tmp_path, monkeypatch, capsys):
    break_steps(monkeypatch, {2, 4}, loss=loss)
    train_here(max_skipped_iterations=2, train_iters=5, log_interval=1)
    rows = valid_json(tmp_path / "run/metrics.jsonl")
    assert [row["lm loss"] is None for row in rows] == [False, True, False, True, False]
    assert [row["skipped"] for row in rows] == [0, 1, 1, 2, 2]
    state = read_state(tmp_path / "run/checkpoints", 5)
    assert (state["optimizer_steps"], state["nan_iterations"]) == (3, 2)
    assert "number of nan iterations:   2 |" in capsys.readouterr().out


def test_too_many_in_a_row_end_the_run(train_here, tmp_path, monkeypatch):
    break_steps(monkeypatch, {3, 4, 5})
    with pytest.raises(ValueError) as info:
        train_here(max_skipped_iterations=2, save_interval=1, train_iters=8)
    assert str(info.value) == (
        "loss or gradient was not finite in 2 iterations in a row, up to iteration 4; "
        "lower --lr or raise precision, and continue from the last checkpoint"
    )
    assert [row["iteration"] for row in valid_json(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]
    assert newest(tmp_path / "run/checkpoints")[0] == 2, "of before the trouble"


def test_a_validation_loss_that_is_not_finite_is_null(train_here, tmp_path, monkeypatch):
    build_parts = loop.build

    def build(*args, **how):
        parts = build_parts(*args, **how)
        parts.stepper.evaluate = lambda batch, iteration: math.nan
        return parts

    monkeypatch.setattr(loop, "build", build)
    train_here(eval_interval=2, eval_iters=1, train_iters=2)
    rows = valid_json(tmp_path / "run/metrics.jsonl")
    assert rows[-1]["lm loss validation"] is None and rows[-1]["lm loss validation ppl"] is None


def test_leaving_saves_and_a_restart_goes_on(train_here, tmp_path):
    whole = train_here(train_iters=6, run_dir=str(tmp_path / "whole"))
    saves = str(tmp_path / "run/checkpoints")
    rows = train_here(train_iters=6, exit_interval=4)
    assert len(rows) == 4 and newest(tmp_path / "run/checkpoints")[0] == 4
    assert len(train_here(train_iters=6, exit_duration_in_mins=0.0, load=saves)) == 5
    assert curve(train_here(train_iters=6, load=saves)) == curve(whole)
    assert curve(train_here(train_iters=6, load=saves)) == curve(whole), "nothing is left to do"


def test_the_start_counts_as_a_jobs_time(train_here, monkeypatch):
    build_parts = loop.build
    monkeypatch.setattr(loop, "build", lambda *args, **how: (time.sleep(0.7), build_parts(*args, **how))[1])
    assert len(train_here(train_iters=3, exit_duration_in_mins=0.01)) == 1


def test_a_report_that_cannot_be_written_does_not_fail_the_run(train_here, tmp_path, monkeypatch, caplog):
    def full(run_dir):
        raise OSError("no space left")

    monkeypatch.setattr(loop, "write_report", full)
    with caplog.at_level("WARNING", logger="megatron_snip"):
        assert len(train_here()) == 4
    assert any("no report was written" in message for message in caplog.messages)
