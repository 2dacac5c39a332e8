"""Documents from every kind of file: the same ones in the same order, cut anywhere, and what is damaged is named."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_snip.data import documents
from megatron_snip.data.documents import Piece, files_of, pieces
from megatron_snip.files.io import parse_json

TEXTS = [f"{i} " + "wörter " * (i % 9) for i in range(60)]
LINES = "".join(json.dumps({"text": text, "note": "n"}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def zstd(data: bytes) -> bytes:
    """In two frames, as parallel writers make them."""
    half = len(data) // 2
    return zstandard.ZstdCompressor().compress(data[:half]) + zstandard.ZstdCompressor().compress(data[half:])


def table(texts=TEXTS) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": texts, "note": ["n"] * len(texts)})


def parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=7)


def arrow(path: Path, texts=TEXTS, *, stream: bool = True) -> None:
    made = table(texts)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, made.schema) as writer:
        writer.write_table(made, max_chunksize=11)


def saved_to_disk(folder: Path) -> None:
    """As `datasets.Dataset.save_to_disk` does."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    arrow(folder / names[0], TEXTS[:25])
    arrow(folder / names[1], TEXTS[25:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def mixed_folder(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    whole = LINES.splitlines(keepends=True)
    (folder / "data/a.jsonl").write_bytes(b"".join(whole[:20]))
    (folder / "data/b.jsonl.gz").write_bytes(gzip.compress(b"".join(whole[20:50])))
    arrow(folder / "data/c.arrow", TEXTS[50:])
    (folder / "README.md").write_text("not data")


KINDS = {
    "lines.jsonl": lambda path: path.write_bytes(LINES),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "lines.jsonl.zst": lambda path: path.write_bytes(zstd(LINES)),
    "no end.json.gz": lambda path: path.write_bytes(gzip.compress(b"\n" + LINES.rstrip(b"\n"))),
    "rows.parquet": parquet,
    "stream.arrow": arrow,
    "file.arrow": lambda path: arrow(path, stream=False),
    "saved": saved_to_disk,
    "folder": mixed_folder,
}


def texts_of(found: list[Piece]) -> list[str]:
    records = [record for piece in found for _, record in piece.records(["text"])]
    return [(record if isinstance(record, dict) else parse_json(record))["text"] for record in records]


@pytest.mark.parametrize("size", [1, 50, 700, 1 << 19])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_documents(kind, size, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    KINDS[kind](tmp_path / kind)
    files = files_of(str(tmp_path / kind))
    found = list(pieces(files, ["text"]))
    assert texts_of(found) == TEXTS
    whole = sum(Path(file).stat().st_size for file in files)
    assert 0.7 * whole <= sum(piece.size for piece in found) <= whole, "for the progress bar"
    assert len(found) > 5 or size > 50


def test_places_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 100)
    for kind, place in (
        ("lines.jsonl", ":60"), ("lines.jsonl.gz", ":60"), ("no end.json.gz", ":61"), ("rows.parquet", " row 59"),
    ):  # fmt: skip
        KINDS[kind](tmp_path / kind)
        places = [where() for piece in pieces([str(tmp_path / kind)], ["text"]) for where, _ in piece.records(["text"])]
        assert places[-1] == f"{tmp_path / kind}{place}" and len(set(places)) == 60


def test_columns_that_nobody_asks_for_are_not_read(tmp_path):
    parquet(tmp_path / "a.parquet")
    arrow(tmp_path / "a.arrow")
    arrow(tmp_path / "file.arrow", stream=False)
    for name in ("a.parquet", "a.arrow", "file.arrow"):
        (piece, *_) = pieces([str(tmp_path / name)], ["text", "body"])
        assert {*next(record for _, record in piece.records(["text"]))} == {"text"}


def test_a_text_is_a_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    (piece,) = pieces([str(path)], ["text", "body"])
    ((where, record),) = piece.records(["text", "body"])
    assert (where(), record, piece.size) == (str(path), {"text": "one\ntwo\n", "body": "one\ntwo\n"}, 8)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text"):
        list(piece.records(["text"]))


DAMAGED = {
    "half.jsonl.gz": (lambda: gzip.compress(LINES)[:-30], "cannot be decompressed .*; is it whole"),
    "no.jsonl.gz": (lambda: LINES, "cannot be decompressed"),
    "flipped.jsonl.gz": (lambda: gzip.compress(LINES)[:20] + b"\xff\xff" + gzip.compress(LINES)[22:], "decompressed"),
    "half.jsonl.zst": (lambda: zstd(LINES)[:-3], "half.jsonl.zst cannot be decompressed .*within a frame"),
    "a block.jsonl.zst": (lambda: zstandard.ZstdCompressor().compress(LINES)[:9], "within a frame"),
    "empty.jsonl.zst": (lambda: b"", "empty.jsonl.zst is empty, but a compressed file has at least a header"),
    "empty.jsonl.gz": (lambda: b"", "empty.jsonl.gz is empty"),
    "no.jsonl.zst": (lambda: LINES, "cannot be decompressed"),
    "no.parquet": (lambda: LINES, "no.parquet cannot be read"),
    "no.arrow": (lambda: LINES, "no.arrow cannot be read"),
    "empty.parquet": (lambda: b"", "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_named(name, tmp_path):
    make, said = DAMAGED[name]
    (tmp_path / name).write_bytes(make())
    with pytest.raises(ValueError, match=said):
        texts_of(list(pieces([str(tmp_path / name)], ["text"])))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(documents, "LONGEST_LINE", 1 << 12)
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb") as file:
        file.write(b"x" * (1 << 20))
    (tmp_path / "bomb.gz").write_bytes(stream.getvalue())
    with pytest.raises(ValueError, match="bomb.gz:1 has more than 4096 bytes; is it JSON lines"):
        list(pieces([str(tmp_path / "bomb.gz")], ["text"]))


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.zst", "zstandard")])
def test_a_missing_package_is_named(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name} needs {module}: pip install {module}"):
        list(pieces([str(tmp_path / name)], ["text"]))


def test_a_text_file_is_its_bytes_without_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    ((_, record),) = (one for piece in pieces([str(tmp_path / "a.txt")], ["text"]) for one in piece.records(["text"]))
    assert record == {"text": "one\r\ntwo\rthree\n"}


def test_a_folders_other_files_are_told_and_hidden_ones_are_left_out(tmp_path, caplog):
    for name in ("a.jsonl", "more/b.jsonl", "c.json", ".ipynb_checkpoints/a.jsonl", "more/._b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    assert files_of(str(tmp_path)) == [str(tmp_path / name) for name in ("a.jsonl", "more/b.jsonl")]
    assert caplog.messages == [f"{tmp_path}: reads 2 files and skips 1 of other kinds, such as {tmp_path / 'c.json'}"]


def test_folders_that_cannot_be_taken(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file nor a folder"):
        files_of(str(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="holds none of .jsonl, .jsonl.gz"):
        files_of(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match="names several splits; give one of their folders, such as .*/train"):
        files_of(str(tmp_path))
    for content in ({}, {"_data_files": 5}, {"_data_files": [{"filename": 5}]}):
        (tmp_path / "state.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="state.json: field _data_files"):
            files_of(str(tmp_path))
    for name in ("/etc/passwd", "../secret.jsonl"):  # which lies in another folder
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ValueError, match=rf"field _data_files\[0\]\.filename is '{name}'"):
            files_of(str(tmp_path))
