"""tools/gather_text.py: what is taken, the order, the split, and too little text."""

from __future__ import annotations

import gzip
import json

import pytest

from megatron_snip.cli.gather_text import main

LINE = "Some text that is long enough to be taken as a page of documentation, number {}.\n"


@pytest.fixture
def sources(tmp_path):
    """Two folders with text, packed text, duplicates, links, binaries and what must be skipped."""
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("b.py", "a.py", "sub/c.txt", "site-packages/x.py", "test/x.py", "sub/__pycache__/x.py"):
        path = first / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LINE.format(name) * 3)
    second.mkdir()
    (second / "page.gz").write_bytes(gzip.compress((LINE.format("caf\u00e9") * 3).encode()))
    (second / "again.txt").write_text(LINE.format("a.py") * 3)
    (second / "latin1").write_bytes(("caf\u00e9 " * 40).encode("latin-1"))
    (second / "binary").write_bytes(bytes(200))
    (second / "broken.gz").write_bytes(b"\x1f\x8b not gzip" * 10)
    (second / "cut.gz").write_bytes((second / "page.gz").read_bytes()[:-12])
    (second / "short").write_text("short")
    (tmp_path / "elsewhere").write_text(LINE.format("elsewhere") * 3)
    (second / "link").symlink_to(tmp_path / "elsewhere")
    return [str(first), str(second)]


def run(tmp_path, sources, *options):
    status = main(["--output", str(tmp_path / "out"), "--source", *sources, *options])
    texts = {}
    for name in ("train", "valid"):
        path = tmp_path / "out" / f"{name}.jsonl"
        texts[name] = [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else None
    return status, texts


def test_takes_text_once_in_a_fixed_order(tmp_path, sources, capsys):
    status, texts = run(tmp_path, sources, "--min-bytes", "100", "--valid-fraction", "0")
    expected = [LINE.format(name) * 3 for name in ("a.py", "b.py", "sub/c.txt", "caf\u00e9")]
    assert status == 0 and texts == {"train": expected, "valid": []}
    size = sum(len(text.encode()) for text in expected)
    assert f"train.jsonl: 4 files, {size:,} bytes" in capsys.readouterr().out


def test_split_is_by_content(tmp_path, sources):
    for number in range(200):
        (tmp_path / "first" / f"n{number}").write_text(LINE.format(number) * 2)
    _, texts = run(tmp_path, sources, "--min-bytes", "100", "--valid-fraction", "0.25")
    assert 25 < len(texts["valid"]) < 80 and len(texts["train"]) + len(texts["valid"]) == 204
    assert not set(texts["train"]) & set(texts["valid"])
    (tmp_path / "first" / "n7").rename(tmp_path / "first" / "zz")
    _, moved = run(tmp_path, sources, "--min-bytes", "100", "--valid-fraction", "0.25")
    assert set(moved["valid"]) == set(texts["valid"])


def test_max_bytes_stops(tmp_path, sources):
    _, texts = run(tmp_path, sources, "--min-bytes", "100", "--max-bytes", "300", "--valid-fraction", "0")
    assert len(texts["train"]) == 2


def test_too_little_text_is_told_and_nothing_is_left(tmp_path, sources, capsys):
    status, texts = run(tmp_path, sources)
    assert status == 2 and texts == {"train": None, "valid": None}
    assert list((tmp_path / "out").iterdir()) == []
    error = capsys.readouterr().err
    assert "less than --min-bytes 4000000" in error and error.count("\n") == 1


def test_bad_fraction(tmp_path, sources):
    assert run(tmp_path, sources, "--valid-fraction", "1") == (2, {"train": None, "valid": None})


def test_this_machine_has_text(tmp_path):
    """The default sources, as a newcomer's machine has them; stopped early."""
    assert main(["--output", str(tmp_path), "--max-bytes", "500000", "--min-bytes", "400000"]) == 0
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) > 5
