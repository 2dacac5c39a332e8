"""tools/analyse.py, what needs no model; tests/dist/test_analyse.py has the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_snip.cli import collect_stats
from megatron_snip.cli.analyse import Sensitivity, indexed, tokenised, warn_of_repeats, weights_of, write
from megatron_snip.cli.parsers import PARSERS
from megatron_snip.cli.shares import plan_and_try
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron_snip.errors import UserError
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.run_folder import Start
from tests.unit.snip.made_up import statistics
from tests.unit.train.recorded import MODEL, NAMES, SHAPES, shown


def test_what_json_has_no_word_for_is_null():
    found = Sensitivity(["a", "b"], ["fp4"], np.array([[0.5], [np.inf]]), np.full((2, 1), np.nan)).to_dict()
    assert found == {
        "a": {"fp4": {"mean": 0.5, "standard_error": None}},
        "b": {"fp4": dict.fromkeys(found["b"]["fp4"])},
    }


@pytest.mark.parametrize(("batches", "said"), [(4, ""), (5, "has 1,024 tokens and 5 batches of 2 x 128 take 1,280")])
def test_text_that_repeats_is_told(batches, said, tmp_path, caplog):
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([7] * 1024)
    words = f"model --data {tmp_path}/data --batches {batches} --batch-size 2 --seq-length 128"
    warn_of_repeats(str(tmp_path / "data"), PARSERS["analyse"]().parse_known_args(words.split())[0], 0)
    assert said in caplog.text and bool(caplog.text) == bool(said)


def test_text_that_trials_read_again_is_told(tmp_path, caplog):
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([7] * 1024)
    words = f"model --data {tmp_path}/data --batches 3 --batch-size 2 --seq-length 128"
    warn_of_repeats(str(tmp_path / "data"), PARSERS["analyse"]().parse_known_args(words.split())[0], 256)
    assert caplog.text == ""
    warn_of_repeats(str(tmp_path / "data"), PARSERS["analyse"]().parse_known_args(words.split())[0], 257)
    assert "3 batches of 2 x 128 and trials of 257 take 1,025: text repeats" in caplog.text
    assert "fewer --batches or --snip-trial-tokens" in caplog.text


@pytest.mark.parametrize(
    ("name", "data", "documents"),
    [
        ("a.txt", b"\xef\xbb\xbfone two\r\n", [[1, 2, 3]]),
        ("a.json", b'{"text": "one"}\n{"text": "two one"}\n', [[1, 3], [2, 1, 3]]),
    ],
    ids=["a byte order mark", "lines of JSON"],
)
def test_the_tokens_of_text(name, data, documents, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "</s>": 3}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / name).write_bytes(data)
    found = IndexedDataset(tokenised(tmp_path / name, "HuggingFaceTokenizer", str(tmp_path), tmp_path / "tokens"))
    assert [found.get(i).tolist() for i in range(len(found))] == documents


@pytest.mark.parametrize(
    ("data", "prefix"), [("a", "a"), ("a.bin", "a"), ("a.idx", "a"), ("b.c", "b.c"), ("b", None), (".", None)]
)
def test_a_dataset_by_its_prefix_or_a_file(data, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "b.c.idx"):
        (tmp_path / name).touch()
    assert indexed(Path(data)) == prefix


def test_a_runs_checkpoint_is_probed_on_other_data(monkeypatch):
    """With other batches and another split than it was trained with, whatever the run had read."""
    options = {
        "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "vocab_size": 256,
        "seq_length": 128, "micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1, "lr": 1e-4,
        "mock_data": True, "precision": "snip", "distributed_backend": "gloo",
    }  # fmt: skip
    config = Config().replace(**options).with_defaults()
    trained = config.replace(global_batch_size=64, split="90,10,0", seq_length=256)
    state = {"config": trained.to_dict(), "optimizer_steps": 7, "consumed_samples": 448, "weights_alone": False}
    start = Start(7, state, Path("checkpoints"), 7, "")

    class Accepted(Exception):
        pass

    def begin(*args, **more):
        raise Accepted

    monkeypatch.setattr(collect_stats.runtime, "start", begin)
    with pytest.raises(UserError, match="was trained with"):
        collect_stats.prepare(config, start, 1)
    alone = weights_of(start)
    with pytest.raises(Accepted):
        collect_stats.prepare(config, alone, 1)
    assert (alone.iteration, alone.load_iteration) == (0, 7) and alone.state is not None
    assert (alone.state["optimizer_steps"], alone.state["consumed_samples"]) == (0, 0)


def test_the_table_of_plans_by_hand(tmp_path):
    """Both formats of four bits count as FP4, shares that round alike are two plans, and the unknown comes first."""
    shapes, ones = SHAPES[:7], [1.0] * 7
    token = {"fp8": [1e-4] * 7, "mxfp4": [*[3e-3] * 3, math.nan, *[4e-3] * 3], "nvfp4_plain": [2e-3] * 7}
    stats = statistics(shapes, token, ones, dict.fromkeys(token, ones))
    own, _ = PARSERS["analyse"]().parse_known_args(["model", "--data", "text"])
    options = {**MODEL, "num_layers": 1, "snip_options": "fp8,mxfp4,nvfp4_plain"}
    options |= {"precision": "snip", "snip_granularity": "linear"}
    planned = plan_and_try(Config().replace(**options), [stats], (0.4, 0.404, 0.5), None)
    assert list(planned.plans) == ["plan_40", "plan_40.4", "plan_50"]
    text = write(tmp_path, own, stats, Sensitivity.of([stats]), planned)
    heads, *rows = text.split("\n\n")[1].splitlines()
    assert heads.endswith("linears without FP4")
    assert [[row.split()[0], *row.split()[3:]] for row in rows] == [
        ["plan_40", "-", "-", "4"], ["plan_40.4", "-", "-", "4"], ["plan_50", "-", "-", "3"]
    ], "one batch has no regret, and nothing was tried"  # fmt: skip
    assert "Measured curve" not in shown(tmp_path / "report.html") and len(text.split("\n\n")) == 4
    assert f"--precision-plan {tmp_path}/plan_40.json" in text.split("\n\n")[2]
    assert text.splitlines()[2].startswith(NAMES[3]), "what is not finite costs most"
    assert Plan.load(tmp_path / "plan_40.4.json").target == 0.404
    steps = shown(tmp_path / "report.html")["Plans"][0]["plans"]["steps"]
    assert [title.split(":")[0] for title, _ in steps] == list(planned.plans), "they belong to no iteration"
