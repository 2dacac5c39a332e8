"""Which plan an evaluation runs in, what texts begin with, and what is kept of lm-eval's results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron_snip.cli import evaluate
from megatron_snip.cli.evaluate import (
    bos_of,
    check_own,
    check_plan,
    known,
    load_tasks,
    model_of,
    plan_of,
    run_folder_of,
    scores_of,
)
from megatron_snip.cli.parsers import PARSERS, PRESETS
from megatron_snip.config import Config
from megatron_snip.mesh import Axis
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.build_model import documents_of
from megatron_snip.train.report.evaluations import Evaluation
from megatron_snip.train.run.run_folder import Start

PLAN = Plan.uniform(["layers.0.mlp.up_proj"], "fp4", iteration=3)


ME = "0123456789abcdef"  # a run


def start_of(tmp_path, **precision):
    """A checkpoint's start whose run had these options; ``plan``: the plan in force."""
    plan = precision.pop("plan", None)
    config = Config().replace(**precision, run_dir=str(tmp_path / "run")).to_dict()
    return Start(3, {"config": config, "snip": {"plan": plan}}, tmp_path / "elsewhere/checkpoints", 3, ME)


def test_the_plan_of_a_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    config, plan = plan_of(str(tmp_path / "plan.json"), Config(), start_of(tmp_path))
    assert plan is not None and plan.hash == PLAN.hash and config == Config()
    assert plan_of(None, Config(), start_of(tmp_path, precision="fp8")) == (Config(), None)


def test_a_checkpoints_own(tmp_path):
    _, plan = plan_of("own", Config(), start_of(tmp_path, precision="snip", plan=PLAN.to_dict()))
    assert plan is not None and plan.hash == PLAN.hash
    config, plan = plan_of("own", Config(), start_of(tmp_path, precision="snip", snip_warmup_precision="fp8"))
    assert plan is None and config.precision.precision == "fp8"
    config, plan = plan_of("own", Config(), start_of(tmp_path, precision="fp4"))
    assert plan is None and config.precision.precision == "fp4"
    PLAN.save(tmp_path / "plan.json")
    start = start_of(tmp_path, precision="plan", precision_plan=str(tmp_path / "plan.json"))
    _, plan = plan_of("own", Config(), start)
    assert plan is not None and plan.hash == PLAN.hash


@pytest.mark.parametrize(("iters", "fprop"), [(1, "bf16"), (2, "bf16"), (0, "fp4")], ids=["first", "later", "before"])
def test_a_checkpoints_own_after_the_late_switch(tmp_path, iters, fprop):
    """The checkpoint is of iteration 3."""
    late = {"snip_final_precision": "bf16/plan/plan", "snip_final_iters": iters or 1, "train_iters": 3 if iters else 4}
    config, plan = plan_of("own", Config(), start_of(tmp_path, precision="fp4", **late))
    assert plan is None and LinearPrecision.parse(config.precision.precision) == LinearPrecision(fprop, "fp4", "fp4")
    PLAN.save(tmp_path / "plan.json")
    start = start_of(tmp_path, precision="plan", precision_plan=str(tmp_path / "plan.json"), **late)
    assert set(plan_of("own", Config(), start)[1].linears.values()) == {LinearPrecision(fprop, "fp4", "fp4")}


def test_the_plan_beside_an_exported_model(tmp_path):
    start = Start(0, None, tmp_path, 0, "")
    with pytest.raises(ValueError, match=r"has no precision_plan.json; give --plan FILE, or drop it"):
        plan_of("own", Config(), start)
    PLAN.save(tmp_path / "precision_plan.json")
    assert plan_of("own", Config(), start)[1].hash == PLAN.hash


def test_the_run_folder_is_the_one_with_the_runs_id(tmp_path):
    start = start_of(tmp_path)
    assert run_folder_of(start) is None
    for name, run_id in (("elsewhere", "5" * 16), ("run", ME)):
        (tmp_path / name).mkdir()
        options = {"run_id": run_id, **Config().to_dict(), "versions": {}}
        (tmp_path / name / "config.json").write_text(json.dumps(options))
    assert run_folder_of(start) == tmp_path / "run"
    (tmp_path / "elsewhere/config.json").write_text("{}")  # another program's
    assert run_folder_of(start) == tmp_path / "run"
    assert run_folder_of(Start(0, None, tmp_path, 0, "")) is None


def test_a_request_is_one_document_whatever_the_run_was_trained_on(tmp_path, monkeypatch):
    """The model of a run whose attention ends with each document is asked for no tokens of a batch."""
    run = {"num_layers": 2, "seq_length": 128, "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "t"}
    ends = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    found = (Config().replace(**run, **ends), start_of(tmp_path))
    monkeypatch.setattr(evaluate, "with_saved_options", lambda words, groups: found)
    config, _, length = evaluate.options_of(*PARSERS["evaluate"]().parse_known_args(["model", "--tasks", "piqa"]))
    assert documents_of(config, Axis(1, 0, None)) is None and length == 128


def test_what_texts_begin_with():
    own, one, none = argparse.Namespace(add_bos=None), SimpleNamespace(bos=7), SimpleNamespace(bos=None)
    assert [bos_of(own, one, hf=True), bos_of(own, one, hf=False), bos_of(own, none, hf=True)] == [7, None, None]
    assert bos_of(argparse.Namespace(add_bos=False), one, hf=True) is None
    assert bos_of(argparse.Namespace(add_bos=True), one, hf=False) == 7
    with pytest.raises(ValueError, match="you gave --add-bos, but the tokenizer puts nothing before a text"):
        bos_of(argparse.Namespace(add_bos=True), none, hf=False)


def test_results_keep_values_with_their_errors():
    task = {
        "alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "em_stderr,strict": "N/A", "n": 3,
    }  # fmt: skip
    assert scores_of({"arc": task, "nothing": {"alias": "x"}}) == {
        "arc": {"acc": (0.5, 0.1), "em, strict": (1.0, None)}
    }


@pytest.mark.parametrize("word", ["--limit", "--batch-size", "--max-length", "--num-fewshot", "--bootstrap"])
def test_numbers_out_of_range(word):
    own, _ = PARSERS["evaluate"]().parse_known_args(["model", "--tasks", "piqa", word, "-1"])
    with pytest.raises(ValueError, match=rf"{word} is -1; give [012] or more"):
        check_own(own)


def test_without_the_harness_it_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs lm-evaluation-harness; pip install lm-eval"):
        load_tasks("piqa", None)


class FakeManager:
    """lm-eval's index of tasks, with one of each kind."""

    all_tasks = ("sums", "texts", "writing", "odd")
    kinds: ClassVar = {"sums": "multiple_choice", "texts": "loglikelihood_rolling", "writing": "generate_until"}

    def load(self, names):
        if "odd" in names:
            raise FileNotFoundError("no none.jsonl\nat all")
        kinds = {name: self.kinds[name] for name in names}
        return {"tasks": {name: SimpleNamespace(get_config={"output_type": kind}.get) for name, kind in kinds.items()}}


@pytest.fixture
def harness(monkeypatch):
    """load_tasks believes that lm-eval is installed and has the fake's tasks."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(evaluate, "_manager", lambda names, include_path: FakeManager())


def test_tasks_are_named_one_by_one(harness, tmp_path):
    assert load_tasks("sums, texts", str(tmp_path))[1] == ["sums", "texts"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sums,writing", "--tasks: writing is of kind generate_until"),
        ("sums,text", "--tasks: unknown task 'text'; did you mean texts?"),
        ("odd", r"--tasks odd: cannot be loaded \(no none.jsonl\);"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused(harness, words, message):
    with pytest.raises(ValueError, match=message):
        load_tasks(words, None)


def test_a_folder_of_tasks_that_is_not_there_is_refused(harness, tmp_path):
    with pytest.raises(ValueError, match="--include-path .*none is not a folder"):
        load_tasks("sums", str(tmp_path / "none"))


def test_a_plan_beside_a_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match="you gave both --plan fp4 and --precision fp8; drop one"):
        plan_of("fp4", Config().replace(precision="fp8"), start_of(tmp_path))


def test_a_plan_of_another_model_is_refused(tmp_path):
    config = Config().replace(num_layers=1)
    with pytest.raises(ValueError, match=r"--plan.*layers\.0\.self_attn\.q_proj"):
        check_plan(PLAN, config, torch.device("cpu"))
    check_plan(Plan.uniform(LLAMA.linear_names(1), "fp4"), config, torch.device("cpu"))


def test_scores_of_another_checkpoint_are_kept_apart(tmp_path):
    assert known(tmp_path / "scores.json", 3, ME) == Evaluation(3, model=ME)
    Evaluation(3).with_scores("bf16", {}).save(tmp_path / "scores.json")
    assert known(tmp_path / "scores.json", 3, ME).scores == {"bf16": {}}
    with pytest.raises(ValueError, match=r"scores.json is from iteration 3, not 4; give another --output"):
        known(tmp_path / "scores.json", 4, ME)


def test_scores_of_another_model_are_kept_apart(tmp_path):
    """All Hugging Face folders are at iteration 0, and share evaluation.json."""
    one, other = (Start(0, None, tmp_path / name, 0, "") for name in ("one", "other"))
    known(tmp_path / "scores.json", 0, model_of(one)).with_scores("bf16", {}).save(tmp_path / "scores.json")
    assert known(tmp_path / "scores.json", 0, model_of(one)).scores == {"bf16": {}}
    with pytest.raises(ValueError, match=r"scores.json has the scores of .*/one, not .*/other; give another --output"):
        known(tmp_path / "scores.json", 0, model_of(other))
    assert model_of(start_of(tmp_path)) == ME


def test_scores_of_another_evaluation_that_ends_meanwhile_stay(tmp_path, monkeypatch):
    path, start, config = tmp_path / "scores.json", start_of(tmp_path), Config().replace(num_attention_heads=1)

    def run(*_):
        known(path, 3, ME).with_scores("fp8", {"arc": {"acc": (0.5, None)}}).save(path)
        return {"arc": {"acc": (0.75, None)}}

    for name, value in {
        "options_of": (config, start, 128), "plan_of": (config, None), "check": (config, None), "bos_of": None,
        "load_tasks": (None, ["arc"]), "build_tokenizer": None, "make_model": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(evaluate, name, lambda *_, value=value, **__: value)
    here = SimpleNamespace(rank=0, device=torch.device("cpu"))
    monkeypatch.setattr(evaluate, "runtime", SimpleNamespace(
        start=lambda *_, **__: here, stop=lambda: None, environment_world_size=lambda: 1))  # fmt: skip
    model = SimpleNamespace(SnipLM=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "megatron_snip.interop.lm_eval_model", model)
    monkeypatch.setattr(evaluate, "run", run)
    evaluate.main(["model", "--tasks", "arc", "--output", str(path)])
    assert known(path, 3, ME).scores == {"fp8": {"arc": {"acc": (0.5, None)}}, "bf16": {"arc": {"acc": (0.75, None)}}}


def test_a_try_does_not_pass_for_the_task(monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **_: {"results": {"arc": {"acc,none": 0.5}}})
    words = ["model", "--tasks", "arc"]
    for more, name in ([], "arc"), (["--limit", "3", "--num-fewshot", "0"], "arc, num-fewshot 0, limit 3"):
        own, _ = PARSERS["evaluate"]().parse_known_args([*words, *more])
        assert evaluate.run(own, None, None, ["arc"]) == {name: {"acc": (0.5, None)}}


def test_the_run_s_trackers_get_the_row(tmp_path, monkeypatch, caplog):
    """With the run's own options, under its id; whatever fails there costs no score."""
    start, row, said = start_of(tmp_path, wandb_project="p", precision="fp8"), {"iteration": 3}, []
    fake = SimpleNamespace(log=lambda *what: said.append(what), finish=lambda: said.append("end"))

    def start_trackers(config, run_id, iteration):
        said.append((config.logging.wandb_project, config.logging.run_dir, run_id, iteration))
        return [fake]

    monkeypatch.setattr(evaluate, "start_trackers", start_trackers)
    monkeypatch.setattr(evaluate, "write_report", said.append)
    evaluate.track(tmp_path, start, row)
    assert said == [tmp_path, ("p", str(tmp_path), ME, None), (row, None, None), "end"]
    monkeypatch.setattr(evaluate, "write_report", lambda folder: 1 / 0)
    with caplog.at_level("WARNING", "megatron_snip"):
        evaluate.track(tmp_path, start, row)
    assert caplog.messages == ["the scores are not in the report, wandb or TensorBoard: division by zero"]


def test_no_tracker_writes_to_a_folder_that_only_a_checkpoint_names(tmp_path):
    """Such as one of yours that a stranger's checkpoint names; one in which the run has logged is its own."""
    named = {"tensorboard_dir": str(tmp_path / "events"), "wandb_project": "p", "wandb_save_dir": str(tmp_path / "w")}
    start = start_of(tmp_path, **named)
    for folder in ("events", "w"):
        (tmp_path / folder).mkdir()
    found = evaluate.tracked(start.state).logging
    assert (found.tensorboard_dir, found.wandb_project) == (None, None)
    (tmp_path / "events/events.out.tfevents.1").touch()
    (tmp_path / "w/wandb").mkdir()
    found = evaluate.tracked(start.state).logging
    assert (found.tensorboard_dir, found.wandb_project) == (named["tensorboard_dir"], "p")


@pytest.mark.slow
def test_tasks_of_the_lists_are_known():
    tasks = pytest.importorskip("lm_eval.tasks")
    known = set(tasks.TaskManager().all_tasks)
    assert not {task for names in PRESETS.values() for task in names} - known
