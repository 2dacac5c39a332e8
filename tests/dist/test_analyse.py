"""tools/analyse.py: from a Hugging Face folder and a text to sensitivities, plans and a page."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.program import BUDGET_TOLERANCE
from tests.dist.helpers.converting import analyse, analyse_unprobed, plan
from tests.dist.helpers.harness import run_ranks
from tests.dist.test_convert import CASES, theirs
from tests.unit.train.recorded import named, shown

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.dist
TEXT = "".join(f"The {i}th sentence tells of {i * i} things, {i % 7} of them new.\n" for i in range(1200))
SMALL = "--seq-length 128 --batch-size 2 --batches 3 --formats fp8,fp4 --shares 0.5,0.9".split()
EXACT = [*SMALL, "--no-bf16", "--snip-granularity", "linear"]  # the same on every layout
NO_TRIALS = ["--snip-trials", "0"]


@pytest.fixture(scope="module", params=["small", pytest.param("qwen3", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """A random model with a tokenizer of its own, and a text."""
    folder = tmp_path_factory.mktemp("model")
    theirs(folder, **CASES[request.param])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "text.txt").write_text(TEXT)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.split("\n") if line))
    return folder


@pytest.fixture(scope="module")
def analysed(model, tmp_path_factory):
    """What it says and where it wrote."""
    out = tmp_path_factory.mktemp("analysed") / "out"
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(out), *EXACT]
    ((said, error),) = run_ranks(analyse, 1, *words)
    assert error == ""
    return said, out


def test_every_linear_in_every_format_with_its_error(analysed):
    said, out = analysed
    found = json.loads((out / "sensitivity.json").read_text())
    stats = Statistics.load(out / "stats.json")
    assert [*found] == stats.names and len(found) == 14
    for name, formats in found.items():
        assert 0 < formats["fp8"]["mean"] < formats["fp4"]["mean"], name
        assert all(0 < each["standard_error"] < each["mean"] for each in formats.values()), "as one text is like another"
    expected = stats.tokens / 2 * stats.column("token/fp4")
    assert np.allclose([found[name]["fp4"]["mean"] for name in stats.names], expected)
    worst = max(found, key=lambda name: found[name]["fp4"]["mean"])
    lines = said.splitlines()
    assert lines[0].split() == ["linear", "fp8", "(nats)", "fp4", "(nats)"] and lines[2].startswith(worst)


def test_plans_of_the_shares(analysed):
    said, out = analysed
    half, most = (Plan.load(out / f"plan_{share}.json") for share in (50, 90))
    assert 0.5 - BUDGET_TOLERANCE <= half.achieved < most.achieved and most.achieved >= 0.9 - BUDGET_TOLERANCE
    assert "plan_50" in said and f"{half.achieved:.1%}" in said
    assert sum(str(p) == "fp8" for p in half.linears.values()) > sum(str(p) == "fp8" for p in most.linears.values())


def test_the_page_needs_nothing_else(analysed):
    text = (analysed[1] / "report.html").read_text()
    assert "src=" not in text and "href=" not in text
    assert text.count("<tr><td>layers.") == 14
    sections = shown(analysed[1] / "report.html")
    assert [figure["title"] for figure in sections["Sensitivity"]] == ["fp8", "fp4"]
    assert len(sections["Plans"][0]["plans"]["steps"]) == 2


def test_sharded_it_is_the_same(model, analysed, tmp_path):
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "tp"), *EXACT]
    results = run_ranks(analyse, 2, *words, *NO_TRIALS, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert [error for _, error in results] == ["", ""] and results[1][0] == ""
    one, other = (Statistics.load(folder / "stats.json") for folder in (analysed[1], tmp_path / "tp"))
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    for fmt in ("fp8", "fp4"):  # shards of 64 rows cut blocks of 128: their scales are others
        assert other.column(f"token/{fmt}").sum() == pytest.approx(one.column(f"token/{fmt}").sum(), rel=0.1)


def test_in_bf16_it_says_the_same_within_its_error(model, analysed, tmp_path):
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "bf16"), *SMALL, *NO_TRIALS]
    assert run_ranks(analyse, 1, *words)[0][1] == ""
    exact, found = (json.loads((out / "sensitivity.json").read_text()) for out in (analysed[1], tmp_path / "bf16"))
    for name, formats in exact.items():
        one, other = formats["fp4"], found[name]["fp4"]
        assert 0 < abs(other["mean"] - one["mean"]) < 4 * (one["standard_error"] + other["standard_error"]), name


@pytest.mark.slow
def test_json_lines_are_read_too(model, analysed, tmp_path):
    words = [str(model), "--data", str(model / "text.jsonl"), "--output", str(tmp_path / "lines"), *SMALL, *NO_TRIALS]
    assert run_ranks(analyse, 1, *words)[0][1] == ""
    one, other = (Statistics.load(folder / "stats.json") for folder in (analysed[1], tmp_path / "lines"))
    assert other.loss == pytest.approx(one.loss, rel=0.1)


def test_a_model_without_a_tokenizer_takes_tokens(tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    (tmp_path / "text.txt").write_text("text")
    with IndexedDatasetBuilder(tmp_path / "tokens", "u2") as builder:
        builder.add_document([7] * 1024)
    words = [str(tmp_path / "hf"), "--output", str(tmp_path / "out"), *SMALL, *NO_TRIALS, "--data"]
    for data, message in (
        ("tokens", ""),
        ("tokens.bin", ""),
        ("text.txt", "names no tokenizer; give --tokenizer-model"),
    ):
        error = run_ranks(analyse, 1, *words, str(tmp_path / data))[0][1]
        assert message in error and bool(error) == bool(message), data


def test_formats_without_fp4_are_compared(model, tmp_path):
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *SMALL]
    assert run_ranks(analyse, 1, *words, *NO_TRIALS, "--formats", "fp8,mxfp8", "--shares", "0")[0][1] == ""
    assert Plan.load(tmp_path / "out/plan_0.json").achieved == 0


def test_a_share_out_of_reach_is_told_before_the_probe(model, tmp_path):
    """Hours of it would be lost."""
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *SMALL]
    for more, message in (
        (["--formats", "fp8", "--shares", "0.25"], "--shares 0.25 is more than the options fp8 can save (0.000)"),
        (["--snip-fix", "layers.0.*=bf16"], "--shares with --snip-fix 'layers.0.*=bf16': target 0.9 is out of reach"),
    ):
        assert run_ranks(analyse_unprobed, 1, *words, *more)[0][1].startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shares", "x"], "--shares x are not numbers"),
        (["--batches", "0"], "--batches is 0"),
        (["--formats", "fp8,fp3"], "fp3"),
        (["--data", "none.txt"], "none.txt"),
        (["--seq-length", "100000"], "seq-length"),
    ],
)
def test_errors_name_the_option(words, message, model, tmp_path):
    given = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *SMALL, *words]
    ((said, error),) = run_ranks(analyse, 1, *given)
    assert said == "" and message in error
    assert not (tmp_path / "out/report.html").exists()


def test_the_measured_curve(analysed):
    """Plans of --shares and others between, each beside its prediction, on tokens that the probe did not read."""
    said, out = analysed
    (figure,) = shown(out / "report.html")["Measured curve"]
    measured, predicted = named(figure)["measured"], named(figure)["predicted"]
    assert measured["x"] == predicted["x"] == sorted(measured["x"]) and len(measured["x"]) == 9
    assert measured["x"][0] == 0.0 and measured["x"][-1] == 1.0 and min(measured["error_y"]["array"]) > 0
    half = Plan.load(out / "plan_50.json")
    assert half.trial.tokens == 768 and half.trial.increase in [one.increase for one in half.trial.tried]
    assert len(half.trial.tried) == 9 and half.trial.name == "target 50%"
    assert "Measured on 768 tokens that the probe did not read." in said
    assert said.count("The curve ") == 1


def test_no_trials_leave_the_rest_as_it_is(model, analysed, tmp_path):
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *EXACT]
    ((said, error),) = run_ranks(analyse, 1, *words, *NO_TRIALS)
    assert error == "" and "The curve" not in said
    one, other = (json.loads((out / "sensitivity.json").read_text()) for out in (analysed[1], tmp_path / "out"))
    assert one == other
    ours, theirs = (Plan.load(out / "plan_50.json") for out in (analysed[1], tmp_path / "out"))
    assert theirs.trial is None and theirs.linears == ours.linears
    assert "Measured curve" not in shown(tmp_path / "out/report.html")


def test_sharded_it_measures_the_same(model, analysed, tmp_path):
    """Every process runs what rank 0 proposes."""
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "pp"), *EXACT]
    more = ["--pipeline-model-parallel-size", "2", "--snip-stage-constraint", "none"]
    results = run_ranks(analyse, 2, *words, *more)
    assert [error for _, error in results] == ["", ""] and results[1][0] == ""
    one, other = (Plan.load(folder / "plan_90.json") for folder in (analysed[1], tmp_path / "pp"))
    assert other.linears == one.linears and other.trial.tokens == one.trial.tokens
    assert other.trial.increase == pytest.approx(one.trial.increase, rel=0.02, abs=2e-4)


def test_a_loss_in_place_of_shares(model, tmp_path):
    words = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *SMALL[:-2]]
    ((said, error),) = run_ranks(analyse, 1, *words, "--snip-max-loss", "10", "--snip-trials", "4")
    assert error == "" and "target 100%" not in said and "\nplan  100.0%" in said
    assert Plan.load(tmp_path / "out/plan.json").trial.name == "target 100%"
    assert not list((tmp_path / "out").glob("plan_*.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shares", "0.5", "--snip-max-loss", "1"], "--shares and --snip-max-loss are alternatives, and both are given"),
        (["--snip-max-loss", "1", "--snip-trials", "0"], "--snip-max-loss 1 needs trials"),
        (["--snip-max-loss", "-1"], "--snip-max-loss is -1.0; give a number above 0"),
        (["--snip-trials", "-1"], "--snip-trials is -1; give 0 or more"),
    ],
)
def test_bad_trials_are_told_before_the_probe(words, message, model, tmp_path):
    given = [str(model), "--data", str(model / "text.txt"), "--output", str(tmp_path / "out"), *SMALL[:-2], *words]
    ((said, error),) = run_ranks(analyse_unprobed, 1, *given)
    assert said == "" and error.startswith(message)


def test_its_statistics_make_a_plan_that_several_processes_try(model, analysed, tmp_path):
    """One of them writes; all know what is wrong, and one says it."""
    out = analysed[1]
    words = ["--stats", str(out / "stats.json"), "--load", str(model), "--output-dir", str(tmp_path / "plans"), "--try"]
    words += ["--data-path", str(out / "data"), "--seq-length", "128", "--global-batch-size", "2", "--train-iters", "1"]
    words += ["--split", "1,0,0", "--snip-trials", "3", "--snip-trial-tokens", "512", "--snip-probe-tokens", "768"]
    words += ["--snip-target", "0.5", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model), "--tensor-model-parallel-size", "2"]
    first, other = run_ranks(plan, 2, *words)
    assert other == ("", "") and not first[1], first
    best = Plan.load(tmp_path / "plans/best.json")
    assert best.trial.tokens == 512 and f"'{best.trial.name}' is best" in first[0]
    first, other = run_ranks(plan, 2, *words, "--pipeline-model-parallel-size", "2")
    assert first == other and "world size 2 is not a multiple" in first[1]
