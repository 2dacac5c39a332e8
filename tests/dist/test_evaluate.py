"""tools/evaluate.py: its scores are those of lm-eval's own model of transformers, and where they go."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.report.evaluations import Evaluation
from megatron_snip.train.setup import snip_shapes
from tests.dist.helpers.converting import convert
from tests.dist.helpers.evaluating import by_transformers, evaluate, local_tasks, one_after_another
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import train_run
from tests.dist.test_convert import CASES, theirs

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed"),
]
METRICS = {"sums": ["acc", "acc_norm"], "texts": ["word_perplexity", "bits_per_byte"]}
MODEL = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A random Llama with a tokenizer that begins texts with BOS, a plan for it, and tasks."""
    folder = tmp_path_factory.mktemp("evaluate")
    hf, tasks = folder / "hf", local_tasks(folder / "tasks")
    theirs(hf, **CASES["small"])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([path.read_text() for path in tasks.glob("*.jsonl")], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.save(str(hf / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    shapes = snip_shapes(Config().replace(**MODEL))
    cycle = ["fp4", "fp8", "bf16"]
    Plan.by_hand({s.name: LinearPrecision.parse(cycle[i % 3]) for i, s in enumerate(shapes)}, shapes).save(
        folder / "plan.json"
    )
    return folder


def assert_equal(scores, results):
    """Ours, of a file, and lm-eval's."""
    for task, metrics in METRICS.items():
        for metric in metrics:
            assert scores[task][metric][0] == pytest.approx(results[task][f"{metric},none"], rel=1e-5), (task, metric)


def test_scores_are_those_of_transformers_on_the_exported_model(place, tmp_path):
    """The checkpoint's as it is, and the export's under a plan that transformers' model runs in, too."""
    checkpoint, exported, plan = tmp_path / "checkpoints", tmp_path / "exported", place / "plan.json"
    words = ("--include-path", str(place / "tasks"), "--tasks", "sums,texts", "--batch-size", "3")
    outputs = [tmp_path / f"scores_{i}.json" for i in range(2)]
    calls = [
        (str(checkpoint), *words, "--output", str(outputs[0]), "--add-bos"),
        (str(exported), *words, "--output", str(outputs[1]), "--plan", str(plan)),
    ]
    ((*refused, (plain, planned), found),) = run_ranks(
        one_after_another, 1,
        (convert, "import", "--hf", str(place / "hf"), "--save", str(checkpoint)),
        (convert, "export", "--load", str(checkpoint), "--hf", str(exported)),
        (by_transformers, tmp_path, exported, place / "tasks", plan),
        (evaluate, tmp_path, *calls),
    )  # fmt: skip
    assert [*refused, *(error for _, error in found)] == [""] * 4
    scores = {name: each for path in outputs for name, each in Evaluation.load(path).scores.items()}
    assert [*scores] == ["bf16", f"plan {Plan.load(plan).hash}"]
    assert_equal(scores["bf16"], plain)
    assert_equal([*scores.values()][1], planned)
    assert abs(planned["texts"]["bits_per_byte,none"] - plain["texts"]["bits_per_byte,none"]) > 1e-3
    assert scores["bf16"]["sums"]["acc"][1] is not None
    assert found[0][0].split("\n")[0].split() == ["task", "metric", "iteration", "0,", "bf16"]


@pytest.fixture(scope="module")
def run(place):
    """A run of one iteration in FP4 from the model's weights, on two tensor parallel processes."""
    options = {
        **MODEL, "vocab_size": 500, "make_vocab_size_divisible_by": 4, "untie_embeddings_and_output_weights": True,
        "seq_length": 128, "max_position_embeddings": 256, "load": str(place / "hf"), "run_dir": str(place / "run"),
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "train_iters": 1, "precision": "fp4",
        "tensorboard_dir": str(place / "events"), "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(place / "hf"),
    }  # fmt: skip
    run_ranks(train_run, 2, options)
    return place / "run"


@pytest.mark.slow
def test_a_checkpoint_its_export_and_the_run_folder(place, run, tmp_path):
    exported = tmp_path / "exported"
    assert run_ranks(convert, 1, "export", "--load", str(run / "checkpoints"), "--hf", str(exported)) == [""]
    ((theirs_,),) = run_ranks(by_transformers, 1, tmp_path, exported, place / "tasks", None)
    words = (str(run / "checkpoints"), "--include-path", str(place / "tasks"), "--tasks", "sums,texts", "--add-bos")
    two = (*words, "--tensor-model-parallel-size", "2")
    found = run_ranks(evaluate, 2, tmp_path, two, (*two, "--plan", "own"))
    assert [[error for _, error in each] for each in found] == [["", ""], ["", ""]]
    assert [bool(said) for said, _ in found[1]] == [False, False]
    evaluation = Evaluation.load(run / "evaluations/iter_0000001.json")
    assert_equal(evaluation.scores["bf16"], theirs_)
    assert evaluation.scores["fp4"]["texts"] != evaluation.scores["bf16"]["texts"]
    assert "<td>sums</td><td>acc_norm</td>" in (run / "report.html").read_text()
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = events.EventAccumulator(str(place / "events"))
    seen.Reload()
    (event,) = seen.Scalars("evaluation/fp4/sums/acc")
    assert event.step == 1 and event.value == pytest.approx(evaluation.scores["fp4"]["sums"]["acc"][0])


@pytest.mark.slow
def test_an_unknown_task_is_told_with_the_nearest(place, tmp_path):
    """By all that lm-eval has, whose index takes seconds."""
    words = (str(place / "hf"), "--include-path", str(place / "tasks"), "--tasks", "texts,sums_")
    (((said, error),),) = run_ranks(evaluate, 1, tmp_path, (*words, "--output", str(tmp_path / "scores.json")))
    assert said == "" and "--tasks: unknown task 'sums_'; did you mean sums?" in error


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_errors_name_the_option(number, refused):
    (said, error), message = refused[number]
    assert said == "" and message in error and "\n" not in error, error


@pytest.fixture(scope="module")
def refused(place, tmp_path_factory):
    """What it says to bad words, and what it should say."""
    folder, hf = tmp_path_factory.mktemp("refused"), str(place / "hf")
    bare = folder / "bare"
    shutil.copytree(place / "hf", bare)
    (bare / "tokenizer.json").unlink()
    tasks = ["--include-path", str(place / "tasks"), "--tasks"]
    (folder / "odd.yaml").write_text(
        "task: odd\ndataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\n"
    )
    cases = [
        ([hf, *tasks, "writing"], "writing is of kind generate_until"),
        ([hf, "--tasks", "sums", "--include-path", str(folder / "none")], "is not a folder"),
        ([hf, "--tasks", str(folder / "odd.yaml")], "cannot be loaded"),
        ([hf, *tasks, "sums", "--batch-size", "0"], "--batch-size is 0"),
        ([hf, *tasks, "sums", "--plan", "own"], "has no precision_plan.json"),
        ([hf, *tasks, "sums", "--plan", "fp4", "--precision", "fp8"], "drop one"),
        ([hf, *tasks, "sums", "--plan", str(folder / "none.json")], "none.json"),
        ([hf, *tasks, "sums", "--tensor-model-parallel-size", "2"], "1 ranks, --tensor-model-parallel-size 2"),
        ([str(bare), *tasks, "sums"], "bare"),
        ([str(folder), *tasks, "sums"], "no checkpoint is there"),
    ]
    output = ("--output", str(folder / "scores.json"))
    (found,) = run_ranks(evaluate, 1, folder, *((*words, *output) for words, _ in cases))
    assert not (folder / "scores.json").exists()
    return list(zip(found, (message for _, message in cases), strict=True))
