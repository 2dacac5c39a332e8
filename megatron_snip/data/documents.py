"""Text documents to tokenise, from several kinds of files, cut into pieces for worker processes.

    *.gz, *.zst          compressed JSON lines     one process reads them and sends whole lines to the workers
    *.parquet, *.arrow   one document per row      the same, with rows
    *.txt                one document              its text is the value of every key
    other files          one JSON object per line  cut into byte ranges that the workers read
    folders              files of these kinds in order of name, without hidden ones, or a dataset saved by Hugging
                         Face's `save_to_disk`

Pieces, and documents within a piece, keep the order of the input.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files.io import parse_json
from megatron_snip.files.json import checked, in_file, read_json

LOGGER = logging.getLogger("megatron_snip.data")
PIECE_BYTES = 1 << 19  # input per piece: a few tenths of a second of work
LONGEST_LINE = 1 << 30
_ROWS = 1000
#: Files read from a folder that has no list of its own.
_KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet", ".arrow", ".txt")

#: A function that returns a document's location, and its JSON object or the bytes of one.
Record = tuple[Callable[[], str], "bytes | dict[str, Any]"]


class Piece(Protocol):
    """A part of the input, small enough to send to another process."""

    @property
    def size(self) -> int:
        """Bytes of input, as stored on disk."""

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """The documents, without blank lines."""


@dataclass(frozen=True)
class Range:
    """The lines of a file that start in a byte range."""

    path: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.stop - self.start

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """One document per line."""
        with open(self.path, "rb") as stream:
            if self.start:
                # a line that starts before the range belongs to the previous piece
                stream.seek(self.start - 1)
                stream.readline()
            position = stream.tell()
            while position < self.stop and (line := stream.readline()):
                if line.strip():
                    yield partial(self._place, position), line
                position += len(line)

    def _place(self, position: int) -> str:
        number, chunk = 1, 1 << 20
        with open(self.path, "rb") as stream:
            for start in range(0, position, chunk):
                number += stream.read(min(chunk, position - start)).count(b"\n")
        return f"{self.path}:{number}"


@dataclass(frozen=True)
class Lines:
    """Whole lines.  ``first`` counts from 1."""

    path: str
    first: int
    data: bytes
    size: int

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """One document per line."""
        for number, line in enumerate(self.data.split(b"\n"), self.first):
            if line.strip():
                yield partial(f"{self.path}:{{}}".format, number), line


@dataclass(frozen=True)
class Rows:
    """Rows of a table.  ``first`` counts from 0."""

    path: str
    first: int
    rows: list[dict[str, Any]]
    size: int

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """One document per row."""
        for number, row in enumerate(self.rows, self.first):
            yield partial("{} row {}".format, self.path, number), row


@dataclass(frozen=True)
class Text:
    """A file that is one document."""

    path: str
    size: int

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """The file's only document."""
        try:
            text = Path(self.path).read_bytes().decode("utf-8-sig")  # bytes, to keep every line ending
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8 text ({error})") from None
        yield partial(str, self.path), dict.fromkeys(keys, text)


def input_files(inputs: Sequence[str]) -> list[str]:
    """The files that --input names; * and ? are expanded.  Raises UserError if there are none."""
    result: list[str] = []
    for name in inputs:
        found = [name] if Path(name).exists() else sorted(glob.glob(name))
        if not found:
            raise UserError(f"--input {name} does not exist; check the path")
        result += [path for one in found for path in files_of(one)]
    return result


def files_of(name: str) -> list[str]:
    """A file itself, or the files of a folder.  Raises UserError for a folder without any, and for a pipe."""
    folder = Path(name)
    if folder.is_file():
        return [name]
    if not folder.is_dir():
        raise UserError(f"{name} is neither a file nor a folder")
    if (state := folder / "state.json").is_file():  # Hugging Face's save_to_disk
        return [str(folder / one.filename) for one in _saved(state)]
    if (splits := folder / "dataset_dict.json").is_file():
        raise UserError(f"{splits} names several splits; give one of their folders, such as {folder / 'train'}")
    files = sorted(str(path) for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    found = [path for path in files if path.endswith(_KINDS)]
    if not found:
        raise UserError(f"{folder} holds none of {', '.join(_KINDS)}; give files")
    if others := [path for path in files if not path.endswith(_KINDS)]:
        LOGGER.warning(
            f"{folder}: reads {len(found)} files and skips {len(others)} of other kinds, such as {others[0]}"
        )
    return found


class _DataFile(msgspec.Struct, frozen=True):
    """One file of a saved dataset, in the dataset's own folder."""

    filename: Annotated[str, Meta(pattern=r"\A[^/\x00]{1,255}\Z")]


class _Saved(msgspec.Struct, frozen=True):
    """state.json of Hugging Face's save_to_disk."""

    files: list[_DataFile] = msgspec.field(name="_data_files")


def _saved(state: Path) -> list[_DataFile]:
    """The files that a saved dataset lists."""
    way_out = "save the dataset again"
    with in_file(state, way_out):
        return checked(read_json(state, "dataset's list of files", way_out), _Saved).files


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether a path is a copy or cache of another program, such as .ipynb_checkpoints."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def pieces(paths: Sequence[str], keys: Sequence[str]) -> Iterator[Piece]:
    """The inputs as pieces, in order.  Raises UserError for a file that does not match its kind."""
    for path in paths:
        size = Path(path).stat().st_size
        if path.endswith((".gz", ".zst")):
            yield from _compressed(path)
        elif path.endswith((".parquet", ".arrow")):
            yield from _tables(path, keys, size)
        elif path.endswith(".txt"):
            yield Text(path, size)
        else:
            for start in range(0, size, PIECE_BYTES):
                yield Range(path, start, min(start + PIECE_BYTES, size))


def texts_of(record: bytes | dict[str, Any], keys: Sequence[str], option: str) -> dict[str, str]:
    """Key -> text of a document.  Raises ValueError if it is not JSON or lacks a text.  option: names the keys."""
    values = parse_json(record) if isinstance(record, bytes) else record
    if not isinstance(values, dict):
        raise UserError(f"it is a {type(values).__name__}, not an object")
    for key in keys:
        if key not in values:
            raise UserError(f'it has no key "{key}"; name the key of its text with {option}')
        if not isinstance(text := values[key], str):
            kind = "null" if text is None else f"a {type(text).__name__}"
            raise UserError(f'it has {kind} for the key "{key}", not a string')
    return {key: values[key] for key in keys}


def _compressed(path: str) -> Iterator[Piece]:
    """Whole lines of about ``PIECE_BYTES``."""
    number, rest, before = 1, b"", 0
    with open(path, "rb") as raw:
        stream = _decompressed(path, raw)
        if not os.fstat(raw.fileno()).st_size:
            raise UserError(f"{path} is empty, but a compressed file has at least a header; is it whole?")
        while True:
            try:
                block = stream.read(PIECE_BYTES)
            except (OSError, EOFError, zlib.error, _zstd_error()) as error:
                raise UserError(f"{path} cannot be decompressed ({error}); is it whole?") from None
            lines, newline, more = block.rpartition(b"\n")
            if not newline and block and len(rest) < LONGEST_LINE:
                rest += block
                continue
            if len(rest) >= LONGEST_LINE:
                raise UserError(f"{path}:{number} has more than {LONGEST_LINE} bytes; is it JSON lines?")
            data = rest + lines
            if data:
                yield Lines(path, number, data, raw.tell() - before)
                before = raw.tell()
            number, rest = number + data.count(b"\n") + 1, more
            if not block:
                return


def _decompressed(path: str, raw: IO[bytes]) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    return _Zstd(_needed("zstandard", path), raw)


class _Zstd:
    """Reads all frames of a file.  Raises EOFError if the last one is cut; zstandard's own reader just ends there."""

    def __init__(self, zstandard: Any, raw: IO[bytes]) -> None:
        # datasets use windows of up to 2 GiB; the library refuses them by default
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._raw, self._frame = raw, self._decompressor.decompressobj()
        self._begun, self._left, self._out = False, b"", memoryview(b"")

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; empty at the end."""
        if not self._out:
            self._out = memoryview(self._more(size))
        part, self._out = self._out[:size], self._out[size:]
        return bytes(part)

    def _more(self, size: int) -> bytes:
        """Decompress the next ``size`` compressed bytes or more; empty at the end."""
        while True:
            data = self._left or self._raw.read(size)
            self._left = b""
            if not data:
                if self._begun:
                    raise EOFError("the file ends within a frame")
                return b""
            out: bytes = self._frame.decompress(data)
            self._begun = True
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, self._decompressor.decompressobj()
                self._begun = False
            if out:
                return out


def _zstd_error() -> type[Exception]:
    try:
        error: type[Exception] = importlib.import_module("zstandard").ZstdError
    except ImportError:
        return zlib.error
    return error


def _needed(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{path} needs {package}: pip install {package}") from None


def _tables(path: str, keys: Sequence[str], size: int) -> Iterator[Piece]:
    """Rows of about ``PIECE_BYTES`` of text.  All rows count the same, because their bytes on disk are unknown."""
    arrow = _needed("pyarrow", path)
    try:
        batches, total = _batches(path, keys)
        first = 0
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                rows = batch.slice(start, _ROWS).to_pylist()
                for part in _by_bytes(rows):
                    yield Rows(path, first, part, size * len(part) // max(total, 1))
                    first += len(part)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); is it whole?") from None


def _batches(path: str, keys: Sequence[str]) -> tuple[Iterator[Any], int]:
    """Record batches with the columns of these keys, and the number of rows."""
    if path.endswith(".parquet"):
        file = _needed("pyarrow.parquet", path).ParquetFile(path)
        there = [key for key in keys if key in file.schema_arrow.names]
        return file.iter_batches(batch_size=_ROWS, columns=there), file.metadata.num_rows
    arrow = _needed("pyarrow", path)
    memory = arrow.memory_map(path)
    try:
        reader = arrow.ipc.open_stream(memory)  # as Hugging Face writes it
        total = sum(batch.num_rows for batch in reader)
        source: Any = arrow.ipc.open_stream(arrow.memory_map(path))
    except arrow.ArrowInvalid:
        reader = arrow.ipc.open_file(memory)
        total = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
        source = (reader.get_batch(i) for i in range(reader.num_record_batches))
    there = [key for key in keys if key in reader.schema.names]
    return (batch.select(there) for batch in source), total


def _by_bytes(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group rows, in order, into pieces."""
    part: list[dict[str, Any]] = []
    held = 0
    for row in rows:
        part.append(row)
        held += sum(len(value) for value in row.values() if isinstance(value, str))
        if held >= PIECE_BYTES:
            yield part
            part, held = [], 0
    if part:
        yield part
