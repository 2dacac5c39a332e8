"""tools/preprocess_data.py: contents, independence of the workers, errors, and the bare command."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_snip.cli import preprocess_data
from megatron_snip.cli.preprocess_data import main
from megatron_snip.data import documents as documents_of
from megatron_snip.data.indexed import IndexedDataset

ROOT = Path(__file__).resolve().parents[3]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def documents(count, seed=0):
    random = np.random.RandomState(seed)
    return [random.randint(0, 999, size=random.randint(0, 40)).tolist() for _ in range(count)]


def write(path, docs):
    lines = [json.dumps({"text": " ".join(map(str, d)), "note": "7 \u2003 8"}, ensure_ascii=False) for d in docs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(prefix):
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [dataset.get(a).tolist() if b > a else [] for a, b in pairwise(bounds)]


def files(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".jsonl")


def test_contents_and_names(tmp_path, capsys):
    docs = [*documents(30), []]
    source = write(tmp_path / "a.jsonl", docs)
    out = str(tmp_path / "out")
    assert main(["--input", source, "--output-prefix", out, "--append-eod", "--json-keys", "text", "note", *NULL]) == 0
    assert files(tmp_path) == sorted(
        f"out_{k}_document.{e}" for k in ("text", "note") for e in ("bin", "idx", "ids.json")
    )
    assert read(f"{out}_text_document") == [[*d, 999] if d else [] for d in docs]
    assert read(f"{out}_note_document") == [[7, 8, 999]] * 31
    assert IndexedDataset(f"{out}_text_document").dtype == np.uint16
    assert json.loads((tmp_path / "out_note_document.ids.json").read_text())["largest_id"] == 999
    assert "31 documents" in capsys.readouterr().out


def test_without_eod_and_with_a_large_vocabulary(tmp_path):
    source = write(tmp_path / "a.jsonl", [[1, 2], [65499]])
    out = str(tmp_path / "o")
    assert main(["--input", source, "--output-prefix", out, *NULL[:2], "--vocab-size", "65500"]) == 0
    assert read(f"{out}_text_document") == [[1, 2], [65499]]
    assert IndexedDataset(f"{out}_text_document").dtype == np.int32


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_pieces_lose_and_repeat_nothing(tmp_path, monkeypatch, size):
    docs = documents(25, seed=size)
    inputs = [write(tmp_path / "a.jsonl", docs[:20]), write(tmp_path / "b.jsonl", docs[20:])]
    text = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text("\n \r\n" + text.rstrip("\n"))  # blank lines; no newline at the end
    monkeypatch.setattr(documents_of, "PIECE_BYTES", size)
    assert len(list(documents_of.pieces(inputs, ["text"]))) >= 1500 // size
    out = str(tmp_path / "out")
    assert main(["--input", *inputs, "--output-prefix", out, *NULL]) == 0
    assert read(f"{out}_text_document") == docs


def test_wildcards_are_expanded_in_order(tmp_path):
    docs = documents(9)
    for number, start in enumerate((0, 3, 6)):
        write(tmp_path / f"part{number}.jsonl", docs[start : start + 3])
    out = str(tmp_path / "out")
    assert main(["--input", str(tmp_path / "part*.jsonl"), "--output-prefix", out, *NULL]) == 0
    assert read(f"{out}_text_document") == docs


def test_workers_change_nothing_and_the_command_runs(tmp_path):
    """The bare command, with several processes."""
    docs = documents(3000)
    source = write(tmp_path / "a.jsonl", docs * 4)
    assert Path(source).stat().st_size > 2 * documents_of.PIECE_BYTES
    results = []
    for workers in (1, 2):
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", source, *NULL]
        command += ["--output-prefix", str(tmp_path / f"w{workers}"), "--workers", str(workers), "--partitions", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "docs/s" in done.stderr and "B/s" in done.stderr and "MB/s" in done.stdout
        results.append([(tmp_path / f"w{workers}_text_document.{e}").read_bytes() for e in ("bin", "idx")])
    assert results[0] == results[1]
    assert read(tmp_path / "w2_text_document") == docs * 4


def test_results_of_many_pieces_stay_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_of, "PIECE_BYTES", 300)
    docs = documents(200)
    source = write(tmp_path / "a.jsonl", docs)
    assert len(list(documents_of.pieces([source], ["text"]))) > 4 * 2 * preprocess_data.PENDING_PER_WORKER
    out = str(tmp_path / "out")
    assert main(["--input", source, "--output-prefix", out, "--workers", "2", *NULL]) == 0
    assert read(f"{out}_text_document") == docs


BAD_LINES = {
    "json": (b'{"text": "1 2"', "unusable"),
    "no object": (b"[1]", "it is a list, not an object"),
    "no key": (b'{"body": "1"}', 'it has no key "text"; name the key of its text with --json-keys'),
    "no string": (b'{"text": [1]}', 'it has a list for the key "text", not a string'),
    "null": (b'{"text": null}', 'it has null for the key "text", not a string'),
    "no utf-8": (b'{"text": "\xff\xfe"}', "unusable"),
    "half a pair": (b'{"text": "1 \\ud800"}', "half of a surrogate pair"),
    "a key twice": (b'{"text": "1", "text": "2"}', "key 'text' appears twice"),
    "deep": (b'{"text": ' + b"[" * 10**5, "nested too deeply"),
    "no ids": (b'{"text": "hello"}', "ids below 1000"),
}


def test_more_workers_than_a_machine_can_hold_are_refused(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", [[1, 2]])
    assert main(["--input", source, "--output-prefix", str(tmp_path / "o"), "--workers", "10000", *NULL]) == 2
    assert "--workers is 10000; give at most" in capsys.readouterr().err and not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, capsys, monkeypatch, case, workers):
    line, message = BAD_LINES[case]
    monkeypatch.setattr(documents_of, "PIECE_BYTES", 100)
    source = write(tmp_path / "a.jsonl", documents(20))
    with open(source, "ab") as stream:
        stream.write(b"\n" + line + b"\n")
    status = main(["--input", source, "--output-prefix", str(tmp_path / "o"), "--workers", workers, *NULL])
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and f"{source}:22 is unusable" in error and re.search(message, error), error
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "nowhere*.jsonl", *NULL], "--input nowhere*.jsonl does not exist"),
        (["--input", "SOURCE", "--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        (["--input", "SOURCE", "--tokenizer-type", "Nil"], "Nil is unknown"),
        (["--input", "EMPTY", *NULL], "holds no text; wrote nothing"),
    ],
)
def test_other_errors_leave_nothing(tmp_path, capsys, options, message):
    names = {"SOURCE": write(tmp_path / "a.jsonl", documents(3)), "EMPTY": write(tmp_path / "b.jsonl", [[]])}
    options = [names.get(option, option) for option in options]
    assert main([*options, "--output-prefix", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err and files(tmp_path) == []


def test_a_killed_worker_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preprocess_data, "_encode", lambda *_: os._exit(9))
    source = write(tmp_path / "a.jsonl", documents(3))
    assert main(["--input", source, "--output-prefix", str(tmp_path / "o"), "--workers", "2", *NULL]) == 2
    assert "a worker was killed" in capsys.readouterr().err and files(tmp_path) == []


@pytest.mark.parametrize("option", ["--workers", "--partitions", "--log-interval"])
def test_counts_are_positive(tmp_path, capsys, option):
    assert main(["--input", "a", "--output-prefix", "o", *NULL, option, "0"]) == 2
    assert f"{option} is 0" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_other_kinds_of_input_give_the_same_dataset(tmp_path, workers):
    docs = documents(300)
    plain = Path(write(tmp_path / "a.jsonl", docs))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    texts = [json.loads(line)["text"] for line in plain.read_text().splitlines()]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    for source in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        out = str(tmp_path / f"out_{source}")
        assert main(["--input", str(tmp_path / source), "--output-prefix", out, "--workers", workers, *NULL]) == 0
        assert read(f"{out}_text_document") == docs, source


def test_a_bad_row_is_named(tmp_path, capsys):
    pq.write_table(pa.table({"text": ["1 2", None]}), tmp_path / "a.parquet")
    assert main(["--input", str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "o"), *NULL]) == 2
    assert (
        f'{tmp_path / "a.parquet"} row 1 is unusable: it has null for the key "text", not a string'
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", preprocess_data.REFUSED)
def test_megatrons_options_without_a_meaning_here_tell_what_to_do(tmp_path, capsys, option):
    value = ["gpt2-vocab.json"] if option.endswith("-file") else []
    assert main(["--input", "a", "--output-prefix", "o", *NULL, option, *value]) == 2
    assert f"{option}: {preprocess_data.REFUSED[option]}" in capsys.readouterr().err


def test_a_sample_is_the_same_documents_of_every_kind_of_input(tmp_path, monkeypatch, capsys):
    docs = [[i, i + 1, 7] for i in range(900)]
    plain = Path(write(tmp_path / "a.jsonl", docs))
    texts = [json.loads(line)["text"] for line in plain.read_text().splitlines()]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    monkeypatch.setattr(documents_of, "PIECE_BYTES", 3000)
    found = {}
    for source, *more in (["a.jsonl"], ["a.parquet"], ["a.jsonl", "--workers", "2"], ["a.jsonl", "--sample-seed", "1"]):
        words = ["--input", str(tmp_path / source), "--output-prefix", str(tmp_path / "o"), *NULL, *more]
        assert main([*words, "--sample-fraction", "0.1"]) == 0
        found[source, *more] = read(tmp_path / "o_text_document")
    taken = found["a.jsonl",]
    assert 60 < len(taken) < 120 and taken == sorted(taken)  # 90 are expected, 9 is the standard deviation
    assert taken == found["a.parquet",] == found["a.jsonl", "--workers", "2"]
    assert len([doc for doc in found["a.jsonl", "--sample-seed", "1"] if doc in taken]) < 30
    assert main([*words, "--sample-fraction", "1.5"]) == 2
    assert "--sample-fraction is 1.5; give a share" in capsys.readouterr().err
    assert main([*words, "--sample-fraction", "1e-9"]) == 2
    assert "holds no text in its sample of 1e-09" in capsys.readouterr().err
