"""wandb and TensorBoard: the same names, told of what goes wrong, and never the end of a run."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.loop import train
from megatron_snip.train.run import metrics, trackers
from megatron_snip.train.run.metrics import MetricsWriter, read_metrics
from megatron_snip.train.run.trackers import TensorBoard, Wandb, check_trackers

PLAN = Plan.uniform(["layers.0.mlp.up_proj"], "fp4", iteration=3)


@pytest.mark.parametrize(
    ("options", "package"), [({"wandb_project": "p"}, "wandb"), ({"tensorboard_dir": "d"}, "tensorboard")]
)
def test_packages_are_asked_for_before_the_run(options, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(Config())
    with pytest.raises(ValueError, match=rf"needs {package}: pip install {package}, or drop the"):
        check_trackers(Config().replace(**options))


def test_a_wandb_that_cannot_start_costs_no_run(monkeypatch, tmp_path, caplog):
    def fail(**options):
        raise PermissionError(13, "Permission denied", "wandb/settings")

    settings = SimpleNamespace(init_timeout=90.0)
    begun = SimpleNamespace(settings=settings)
    calls = SimpleNamespace(init=fail, teardown=lambda: None, Settings=lambda **_: settings, setup=lambda: begun)
    monkeypatch.setitem(sys.modules, "wandb", calls)
    config = Config().replace(run_dir=str(tmp_path), wandb_project="p")
    assert trackers.start_trackers(config, "id", 0) == []
    (line,) = caplog.messages
    assert line.startswith("wandb cannot start: ") and "training goes on" in line


@pytest.mark.parametrize(("given", "waits"), [(90.0, 20.0), (3.0, 3.0), (300.0, 300.0)])
def test_how_long_the_start_waits_for_wandb(given, waits, monkeypatch, tmp_path):
    seen = []

    def init(settings, **options):
        seen.append(settings)
        return SimpleNamespace(define_metric=lambda *name, **how: None)

    calls = SimpleNamespace(
        init=init, setup=lambda: SimpleNamespace(settings=SimpleNamespace(init_timeout=given)),
        Settings=lambda init_timeout=90.0: SimpleNamespace(init_timeout=init_timeout),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", calls)
    Wandb(Config().replace(run_dir=str(tmp_path), wandb_project="p"), "id")
    assert [settings.init_timeout for settings in seen] == [waits]


def test_rows_of_a_plan():
    names = ["layers.0.mlp.gate_proj", "layers.0.mlp.down_proj"]
    plan = Plan(5, dict(zip(names, map(LinearPrecision.parse, ("fp4/fp8/bf16", "fp8")), strict=True)))
    predictions = Predictions({names[0]: {"fp4": 0.5}}, {names[0]: {"bf16": 0.0, "fp4": 2.0}})  # of fprop and of wgrad
    assert trackers.plan_rows(plan, predictions) == [
        [names[0], "fp4", "fp8", "bf16", 0.5, 0.0],
        [names[1], "fp8", "fp8", "fp8", None, None],
    ]
    assert [row[-2:] for row in trackers.plan_rows(plan, None)] == [[None, None]] * 2
    assert len(trackers.PLAN_COLUMNS) == 6


def test_a_plan_that_cannot_be_shown_costs_no_row(monkeypatch, tmp_path, caplog):
    logged = []
    wandb = object.__new__(Wandb)
    wandb.run = SimpleNamespace(log=logged.append)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    caplog.set_level("WARNING", "megatron_snip")
    wandb.log({"iteration": 3, "lm loss": 2.0}, PLAN, None)
    assert logged == [{"iteration": 3, "lm loss": 2.0}]
    board = TensorBoard(str(tmp_path), 0)
    board.log({"iteration": 3, "lm loss": 2.0}, PLAN, None)
    board.finish()
    assert events(tmp_path).Scalars("lm loss")[0].value == 2.0
    for name, line in zip(("wandb", "TensorBoard"), caplog.messages, strict=True):
        assert f"iteration 3: the plan is not shown in {name}" in line


def test_without_an_option_nobody_is_asked(monkeypatch, tmp_path):
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    one = MetricsWriter(Config().replace(run_dir=str(tmp_path)), "id", 0)
    one.write({"iteration": 1}, PLAN)
    one.close()


def test_people_are_told_of_what_goes_wrong(tmp_path, monkeypatch):
    """Through wandb's alerts: a solve that failed, the third skipped iteration in a row."""
    told, logged = [], []

    class Run:
        name = "wandb"

        def log(self, row, plan, predictions):
            logged.append(row["iteration"])

        def go_back(self, iteration):
            pass

        def alert(self, title, text, iteration):
            told.append((title, text))
            raise ConnectionError("no network")

        def finish(self):
            pass

    monkeypatch.setattr(metrics, "start_trackers", lambda config, run_id, iteration: [Run()])
    one = MetricsWriter(Config().replace(run_dir=str(tmp_path), wandb_project="p"), "id", 0)
    for i, skipped in enumerate([0, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10], 1):
        one.write({"iteration": i, "skipped": skipped, **({"snip/solve_error": "it took too long"} if i == 2 else {})})
    one.alert("the loss broke", "iteration 14")
    one.close()
    streak = "loss or gradient was not finite in 3 iterations in a row"
    assert told == [
        ("no new plan", "iteration 2: keeping the current plan: it took too long"),
        ("iterations are skipped", f"iteration 7: {streak}"),
        ("iterations are skipped", f"iteration 13: {streak}"),
        ("the loss broke", "iteration 14"),
    ]
    assert logged == list(range(1, 14)) and one.reason is None


def events(folder) -> EventAccumulator:
    """What TensorBoard reads in a folder."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()


RUN = {
    "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "seq_length": 128,
    "vocab_size": 128, "global_batch_size": 1, "mock_data": True, "precision": "snip", "snip_start": 1,
    "snip_interval": 2, "snip_target": 0.5, "snip_trials": 2, "snip_trial_tokens": 256,
    "snip_probe_tokens": 256, "preflight": False,
}  # fmt: skip


def test_a_run_and_its_resume_in_tensorboard(tmp_path):
    """Read back by TensorBoard's own reader: every number of metrics.jsonl, plans as picture and table."""
    run, board = tmp_path / "run", tmp_path / "board"
    config = Config().replace(
        **RUN, run_dir=str(run), load=str(run / "checkpoints"), tensorboard_dir=str(board), train_iters=5
    )
    train(config.replace(exit_interval=3))
    train(config)
    found, rows = events(board), read_metrics(run / "metrics.jsonl")
    expected = {
        (name, row["iteration"]): value
        for row in rows
        for name, value in row.items()
        if isinstance(value, (int, float)) and name != "iteration"
    }
    seen = {(name, one.step): one.value for name in found.Tags()["scalars"] for one in found.Scalars(name)}
    assert seen.keys() == expected.keys() and {"lm loss", "snip/achieved", "snip/loss_divergence/q"} <= {
        n for n, _ in seen
    }
    assert all(seen[key] == pytest.approx(value, rel=1e-6) for key, value in expected.items())
    planned = [row["iteration"] for row in rows if "snip/achieved" in row]
    assert [one.step for one in found.Images("snip/plan_heatmap")] == planned and len(planned) >= 2
    text = found.Tensors("snip/plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| linear | fprop |" in text and "layers.0.mlp.up_proj" in text


def test_events_of_before_a_run_went_back_are_hidden(tmp_path):
    first = TensorBoard(str(tmp_path), 0)
    for i in range(1, 6):
        first.log({"iteration": i, "lm loss": float(i)}, None, None)
    first.finish()
    again = TensorBoard(str(tmp_path), 2)
    again.log({"iteration": 3, "lm loss": 30.0}, None, None)
    again.alert("the loss broke", "iteration 3", 3)
    again.finish()
    found = events(tmp_path)
    assert [(one.step, one.value) for one in found.Scalars("lm loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert b"**the loss broke**: iteration 3" in found.Tensors("alerts/text_summary")[0].tensor_proto.string_val[0]


def test_a_write_that_fails_costs_tensorboard_a_row(tmp_path, monkeypatch):
    """tensorboard's own writer would fail at every write from then on."""
    config = Config().replace(run_dir=str(tmp_path / "run"), tensorboard_dir=str(tmp_path / "board"))
    one = MetricsWriter(config, "id", 0)
    ((board, failed),) = one._trackers
    for i in range(1, 7):
        if i == 3:
            monkeypatch.setattr(board.writer, "add_scalar", lambda *_: [][0])
        one.write({"iteration": i, "lm loss": float(i)})
    one.go_back(4)
    one.write({"iteration": 5, "lm loss": 50.0})
    one.close()
    assert failed.in_a_row == 0 and one.reason is None
    found = [(event.step, event.value) for event in events(tmp_path / "board").Scalars("lm loss")]
    assert found == [(1, 1.0), (2, 2.0), (4, 4.0), (5, 50.0)]


def test_what_is_added_later_hides_nothing(tmp_path):
    """Scores of an older checkpoint."""
    for iteration, first in ((9, 0), (4, None)):
        board = TensorBoard(str(tmp_path), first)
        board.log({"iteration": iteration, "x": float(iteration)}, None, None)
        board.finish()
    assert sorted(event.step for event in events(tmp_path).Scalars("x")) == [4, 9]
