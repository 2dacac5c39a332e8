"""Paths that cannot be used: every tool ends with one line that names the path, and leaves nothing."""

from __future__ import annotations

import os

import pytest

from megatron_snip.cli import (
    collect_stats,
    gather_text,
    generate_plan,
    merge_datasets,
    preprocess_data,
    profile_gemms,
    show_plan,
    train_tokenizer,
)

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
MODEL = ["--num-layers=1", "--hidden-size=128", "--ffn-hidden-size=128", "--num-attention-heads=2", "--seq-length=128"]
#: Tool -> its words with OUT where the output goes.
OUTPUTS = {
    "preprocess_data": (preprocess_data.main, ["--input", "TEXT", "--output-prefix", "OUT", *NULL]),
    "train_tokenizer": (train_tokenizer.main, ["--input", "TEXT", "--vocab-size", "270", "--output-prefix", "OUT"]),
    "gather_text": (gather_text.main, ["--source", "FOLDER", "--min-bytes", "1", "--output", "OUT"]),
    "profile_gemms": (profile_gemms.main, ["--output", "OUT", *MODEL, "--repeats", "1", "--warmup", "0"]),
    "generate_plan": (generate_plan.main, ["--stats", "TEXT", "--output-dir", "OUT"]),
    "collect_stats": (collect_stats.main, ["--output", "OUT", "--load", "FOLDER"]),
    "merge_datasets": (merge_datasets.main, ["--input", "PAIR", "--output-prefix", "OUT"]),
}
#: Tool -> its words with IN where something is read.
INPUTS = {
    "preprocess_data": (preprocess_data.main, ["--input", "IN", "--output-prefix", "NEW", *NULL]),
    "preprocess_data, tokenizer": (
        preprocess_data.main,
        ["--input", "TEXT", "--output-prefix", "NEW", "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "IN"],
    ),
    "train_tokenizer": (train_tokenizer.main, ["--input", "IN", "--output-prefix", "NEW"]),
    "merge_datasets": (merge_datasets.main, ["--input", "IN", "--output-prefix", "NEW"]),
    "generate_plan": (generate_plan.main, ["--stats", "IN", "--output-dir", "NEW"]),
    "show_plan": (show_plan.main, ["IN"]),
    "show_plan, options": (show_plan.main, ["PLAN", "--config", "IN"]),
}
BAD = {"below a file": "FOLDER/file/x", "too long": "FOLDER/" + "n" * 300, "in no file system": "/proc/nowhere/x"}


@pytest.fixture
def place(tmp_path):
    """Words with the names in capitals replaced, and what lies in the folder."""
    from megatron_snip.data.indexed import IndexedDatasetBuilder
    from megatron_snip.snip.plan.plan_file import Plan

    (tmp_path / "file").write_text("x")
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3"}\n' * 50)
    os.mkfifo(tmp_path / "pipe")
    Plan.uniform(["layers.0.mlp.up_proj"], "fp4").save(tmp_path / "plan.json")
    with IndexedDatasetBuilder(tmp_path / "pair", "u2") as builder:
        builder.add_document([1, 2])
    names = {
        "TEXT": "text.jsonl", "PAIR": "pair", "PLAN": "plan.json", "NEW": "new", "FOLDER": "",
    }  # fmt: skip

    def replaced(words, **more):
        for name, path in {**more, **names}.items():
            words = [word.replace(name, path if name in more else f"{tmp_path}/{path}".rstrip("/")) for word in words]
        return words

    return replaced


def one_error(main, words, capsys, lines=1):
    try:
        status = main(words)
        text = capsys.readouterr().err
    except ValueError as error:  # of a command on many ranks, which leaves it to report_errors
        status, text = 2, str(error)
    said = [line for line in text.splitlines() if not line.startswith("tokenise:")]
    assert status == 2 and len(said) == lines, text
    return said[-1]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tool", OUTPUTS)
def test_an_output_that_cannot_be_written(tool, bad, place, tmp_path, capsys):
    main, words = OUTPUTS[tool]
    before = sorted(tmp_path.rglob("*"))
    said = one_error(main, place(words, OUT=BAD[bad]), capsys)
    assert (place([BAD[bad]])[0] in said or f"{tmp_path}/file" in said or "/proc/nowhere" in said) and "; " in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bad", [*BAD, "pipe"])
@pytest.mark.parametrize("tool", INPUTS)
def test_an_input_that_cannot_be_read(tool, bad, place, tmp_path, capsys):
    main, words = INPUTS[tool]
    path = {**BAD, "pipe": "FOLDER/pipe"}[bad]
    before = sorted(p for p in tmp_path.rglob("*") if p.name != "new")
    said = one_error(main, place(words, IN=path), capsys)
    assert place([path])[0] in said, said
    assert sorted(p for p in tmp_path.rglob("*") if p.name != "new") == before


@pytest.mark.parametrize("tool", {**OUTPUTS, **INPUTS})
def test_an_empty_path_is_refused(tool, place, tmp_path, capsys, monkeypatch):
    """It would mean the current folder."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for table, word in ((OUTPUTS, "OUT"), (INPUTS, "IN")):
        if tool not in table or "," in tool:
            continue
        main, words = table[tool]
        assert "the path is ''; give one" in one_error(main, place(words, **{word: ""}), capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merged_pair_needs_a_name(place, tmp_path, capsys):
    said = one_error(merge_datasets.main, place(["--input", "PAIR", "--output-prefix", "FOLDER/out/"]), capsys)
    assert said.endswith("is a folder; add a name to it") and not (tmp_path / "out").exists()
