"""Indexed datasets: token ids in ``<prefix>.bin``, and the position of each sequence in ``<prefix>.idx``.

Source: Megatron-LM core 0.16.1, megatron/core/datasets/indexed_dataset.py; the files are interchangeable.
Convention: little endian, no padding.  .idx: magic (9 bytes), uint64 version 1, uint8 dtype code, uint64 S,
uint64 D, int32[S] lengths in tokens, int64[S] byte offsets in .bin, int64[D] first sequence of each document
and finally S.  A document without tokens adds no sequence but repeats a document index.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import weakref
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_snip.data.identity import fingerprint, record_path, recorded_ids, write_record
from megatron_snip.errors import UserError
from megatron_snip.files.io import about, temporary_beside

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}
CHECKED_AT_ONCE = 1 << 22  # Sequences whose offsets are verified at once; bounds the memory of the check.
COPIED_AT_ONCE = 1 << 24  # Bytes.

Array = npt.NDArray[Any]


class IndexedDatasetError(UserError):
    """An unusable .bin/.idx pair.  The message names the file and the problem."""


class MissingDatasetFileError(IndexedDatasetError, FileNotFoundError):
    """One file of a .bin/.idx pair does not exist."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron's tools choose for ids below ``vocab_size``: uint16 below 65500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def _require_file(path: Path, prefix: str) -> None:
    if path.is_file():
        return
    hint = f"; give the prefix without {prefix[-4:]}" if prefix.endswith((".bin", ".idx")) else ""
    raise MissingDatasetFileError(f"dataset {prefix} has no file {path}{hint or '; check the prefix'}")


class IndexedDataset:
    """The sequences of one .bin/.idx pair.  The index is a memory map; tokens are read on demand.

    ``sequence_lengths`` int32 [S] in tokens, ``document_indices`` int64 [D]: read-only views of the file.
    Tokens are read, not mapped: a map would give zeros or SIGBUS if the .bin is truncated while open.
    checked: skip reading the whole index, which takes 20 bytes per sequence.  File sizes are always checked.
    Raises IndexedDatasetError (a UserError) if a file is missing or the two do not match.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, checked: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self._idx_path, bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        _require_file(self._idx_path, self.prefix)
        _require_file(bin_path, self.prefix)
        self.dtype, num_sequences, num_documents = self._read_header()
        index = np.memmap(self._idx_path, mode="r")
        self._index_map: mmap.mmap = index._mmap  # type: ignore[attr-defined]
        raw: Array = index.view(np.ndarray)
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        # The header is 34 bytes, so these views are unaligned; numpy reads such views correctly.
        self.sequence_lengths: Array = raw[HEADER.size : lengths_end].view("<i4")
        self._pointers: Array = raw[lengths_end:pointers_end].view("<i8")
        self.document_indices: Array = raw[pointers_end : pointers_end + 8 * num_documents].view("<i8")
        if not checked:
            self._check_documents()
        self.num_tokens = self._last_token() if checked else self._check_pointers()
        expected = self.num_tokens * self.dtype.itemsize
        self._bin = os.open(bin_path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._bin)
        if (size := os.fstat(self._bin).st_size) != expected:
            relation = "shorter" if size < expected else "longer"
            raise IndexedDatasetError(
                f"{bin_path} has {size} bytes, {relation} than the {expected} its .idx says; "
                "they are not from one run, or a copy was cut: make them again"
            )

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        path, size = self._idx_path, self._idx_path.stat().st_size
        with open(path, "rb") as stream:
            header = stream.read(HEADER.size)
        if not header.startswith(MAGIC[: len(header)]) or len(header) < len(MAGIC):
            raise IndexedDatasetError(f"{path} starts with {header[:9]!r}, not {MAGIC!r}: no Megatron .idx")
        if len(header) < HEADER.size:
            raise IndexedDatasetError(f"{path} is truncated: {size} bytes, its header has {HEADER.size}")
        _, version, code, num_sequences, num_documents = HEADER.unpack(header)
        if version != VERSION:
            raise IndexedDatasetError(f"{path} has format version {version}; only version {VERSION} is known")
        if code not in DTYPES:
            raise IndexedDatasetError(f"{path} has dtype code {code}; the known codes are {sorted(DTYPES)}")
        expected = HEADER.size + 12 * num_sequences + 8 * num_documents
        if size < expected:
            raise IndexedDatasetError(
                f"{path} is truncated: {size} bytes, but its {num_sequences} sequences need {expected}; make it again"
            )
        if size > expected:
            raise IndexedDatasetError(
                f"{path} has {size} bytes, more than the {expected} its counts need "
                "(multimodal datasets, which carry a mode per sequence, are not supported)"
            )
        return DTYPES[code], num_sequences, num_documents

    def _check_documents(self) -> None:
        documents, num_sequences = self.document_indices, len(self.sequence_lengths)
        problem = ""
        if not len(documents):
            problem = "there are none"
        elif documents[0] != 0:
            problem = f"the first is {documents[0]}, not 0"
        elif documents[-1] != num_sequences:
            problem = f"the last is {documents[-1]}, not the number of sequences, {num_sequences}"
        elif np.any(documents[1:] < documents[:-1]):
            problem = "they do not ascend"
        if problem:
            raise IndexedDatasetError(f"{self._idx_path} has inconsistent document indices: {problem}")

    def _last_token(self) -> int:
        """The number of tokens, for an index whose offsets are known to be right."""
        if not len(self):
            return 0
        return int(self._pointers[-1]) // self.dtype.itemsize + int(self.sequence_lengths[-1])

    def _check_pointers(self) -> int:
        """The number of tokens.  Raises unless each sequence starts at the end of the previous one."""
        total, itemsize = 0, self.dtype.itemsize
        for start in range(0, len(self), CHECKED_AT_ONCE):
            lengths = self.sequence_lengths[start : start + CHECKED_AT_ONCE].astype(np.int64)
            ends = total + np.cumsum(lengths)
            pointers = self._pointers[start : start + CHECKED_AT_ONCE]
            if lengths.min() < 0 or np.any(pointers != (ends - lengths) * itemsize):
                raise IndexedDatasetError(
                    f"{self._idx_path} has sequence offsets that do not fit its lengths; make it again"
                )
            total = int(ends[-1])
        return total

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[partial[IndexedDataset], tuple[str]]:
        # Pickling the memory map would copy the tokens.
        return partial(IndexedDataset, checked=True), (self.prefix,)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the data independently of file names; see data/identity.py."""
        return fingerprint(self._bin, self.dtype, self.sequence_lengths, self.document_indices)

    def check_recorded_ids(self, vocab_size: int) -> None:
        """Raise IndexedDatasetError if the dataset's record has an id outside ``vocab_size``.

        Without a record, ids are checked only as samples are read.
        """
        ids = recorded_ids(self.prefix, self.fingerprint)
        if ids is not None and not 0 <= ids[0] <= ids[1] < vocab_size:
            bad = ids[0] if ids[0] < 0 else ids[1]
            raise IndexedDatasetError(f"dataset {self.prefix} holds token id {bad}, {outside(vocab_size)}")

    def check_sizes(self) -> None:
        """Raise IndexedDatasetError if a file is shorter than when it was opened.  Costs two fstat calls.

        An index that is cut between this check and its use still causes SIGBUS; a cut .bin never does.
        """
        sizes = {".bin": os.fstat(self._bin).st_size, ".idx": self._index_map.size()}
        expected = {".bin": self.num_tokens * self.dtype.itemsize, ".idx": len(self._index_map)}
        for suffix, size in sizes.items():
            if size < expected[suffix]:
                raise IndexedDatasetError(
                    f"{self.prefix}{suffix} has {size} bytes, but had {expected[suffix]} when it was opened; "
                    "put the whole file back and continue"
                )

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Array:
        """Tokens [offset, offset + length) of one sequence, by default up to its end.

        Raises IndexError for a sequence or range that does not exist, IndexedDatasetError if the .bin was cut.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"dataset {self.prefix} has {len(self)} sequences, none is number {sequence}")
        available = int(self.sequence_lengths[sequence])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(
                f"sequence {sequence} of dataset {self.prefix} has {available} tokens, not [{offset}, {stop})"
            )
        first, size = int(self._pointers[sequence]) + offset * self.dtype.itemsize, self.dtype.itemsize
        return np.frombuffer(self._read(first, (stop - offset) * size), self.dtype)

    def _read(self, first: int, size: int) -> bytes:
        """Bytes of the .bin.  One pread may return fewer than requested."""
        with about(self.prefix + ".bin"):
            data = os.pread(self._bin, size, first)
            while len(data) < size:
                more = os.pread(self._bin, size - len(data), first + len(data))
                if not more:
                    self.check_sizes()
                    raise IndexedDatasetError(f"{self.prefix}.bin ends at byte {first + len(data)}; check its disk")
                data += more
        return data


def outside(vocab_size: int) -> str:
    """The problem with a token id, and the way out."""
    return f"outside the vocabulary of {vocab_size}; give the data's own tokenizer, or a --vocab-size above its ids"


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair.  `finalize` creates both files or neither, and then the record of token ids.

    As a context manager, it finalises at the end of the block, or removes its output if the block raises.
    ``tokens``: the file that collects the tokens, by default a temporary one.  Its content is kept until truncated.
    Raises UserError for a dtype that Megatron's format has no code for.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, tokens: Path | None = None) -> None:
        self.prefix = os.fspath(prefix)
        if self.prefix.endswith(os.sep):
            raise UserError(f"prefix {self.prefix} is a folder; add a name to it")
        wanted = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == wanted]
        if not codes:
            known = sorted(dtype.name for dtype in DTYPES.values())
            raise UserError(f"dtype {np.dtype(dtype)} has no code in an .idx; use one of {known}")
        self._code, self.dtype = codes[0], wanted
        self._lengths, self._documents = array("i"), array("q", [0])
        with about(self.prefix + ".bin"):
            self._bin_temporary = tokens or temporary_beside(self.prefix + ".bin")
            mode = "r+b" if tokens and tokens.exists() else "w+b"
            self._stream = open(self._bin_temporary, mode)  # noqa: SIM115 - lives until finalize or abort
        self._open = True
        self._num_tokens = 0
        self._least: int | None = None
        self._largest: int | None = None

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.finalize()

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._num_tokens

    def _write(self, values: Array) -> None:
        """Append tokens, and update the smallest and largest id."""
        if values.size:
            least, largest = values.min(), values.max()
            self._least = int(least) if self._least is None else min(self._least, int(least))
            self._largest = int(largest) if self._largest is None else max(self._largest, int(largest))
        with about(self.prefix + ".bin"):
            self._stream.write(values.tobytes())
        self._num_tokens += values.size

    def add_document(self, tokens: Sequence[int] | Array) -> None:
        """Append one document as one sequence.  An empty document adds no sequence.

        Raises UserError for an id that the dtype cannot hold.
        """
        assert self._open, "the builder is already finalised"
        values = np.asarray(tokens)
        if values.size:
            if self.dtype.kind in "iu" and values.dtype != self.dtype:
                limits = np.iinfo(self.dtype)
                if values.min() < limits.min or values.max() > limits.max:
                    raise UserError(
                        f"document {self.num_documents} for {self.prefix} has ids in [{values.min()}, "
                        f"{values.max()}], outside {self.dtype.name}; build with a wider dtype"
                    )
            self._write(values.astype(self.dtype, copy=False))
            self._lengths.append(values.size)
        self._documents.append(len(self._lengths))

    def add_encoded(self, data: bytes, lengths: Sequence[int]) -> None:
        """Append many documents.  ``data`` holds their ids in the dtype, ``lengths`` their sizes in tokens."""
        assert self._open and len(data) == sum(lengths) * self.dtype.itemsize, "bytes do not fit the lengths"
        self._write(np.frombuffer(data, self.dtype))
        for length in lengths:
            if length:
                self._lengths.append(length)
            self._documents.append(len(self._lengths))

    def merge(self, prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair.  Raises UserError if its dtype differs."""
        assert self._open, "the builder is already finalised"
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise UserError(
                f"dataset {other.prefix} holds {other.dtype.name}, {self.prefix} is being written as "
                f"{self.dtype.name}; tokenise both with one tokenizer"
            )
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.intc).tobytes())
        self._documents.frombytes((other.document_indices[1:] + first).astype(np.int64).tobytes())
        before = self._num_tokens
        with open(other.prefix + ".bin", "rb") as source:
            while data := source.read(COPIED_AT_ONCE):
                self._write(np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize))
        if self._num_tokens - before != other.num_tokens:
            raise IndexedDatasetError(f"{other.prefix}.bin changed while it was read; merge again")

    def finalize(self) -> None:
        """Write the index and rename both files into place, replacing an older pair of that name."""
        assert self._open, "the builder is already finalised"
        lengths = np.frombuffer(self._lengths, dtype=np.intc) if self._lengths else np.empty(0, np.intc)
        ends = np.cumsum(lengths, dtype=np.int64)
        idx_path = Path(self.prefix + ".idx")
        idx_temporary = temporary_beside(idx_path)
        try:
            with about(self.prefix + ".bin"):
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._stream.close()
            with open(idx_temporary, "wb") as stream:
                stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents)))
                stream.write(lengths.astype("<i4").tobytes())
                stream.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
                stream.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())
                stream.flush()
                os.fsync(stream.fileno())
            # Remove the old index first, so that it never meets the new tokens; its record of ids goes with it.
            idx_path.unlink(missing_ok=True)
            record_path(self.prefix).unlink(missing_ok=True)
            with about(self.prefix + ".bin"):
                os.replace(self._bin_temporary, self.prefix + ".bin")
                os.replace(idx_temporary, idx_path)
            self._open = False
            if self._least is not None and self._largest is not None and self.dtype.kind in "iu":
                write_record(self.prefix, IndexedDataset(self.prefix).fingerprint, self._least, self._largest)
        finally:
            idx_temporary.unlink(missing_ok=True)
            self.abort()

    def abort(self) -> None:
        """Remove the output so far.  Does nothing after `finalize`."""
        self._open = False
        with contextlib.suppress(OSError):  # a full disk has already been reported
            self._stream.close()
        self._bin_temporary.unlink(missing_ok=True)
