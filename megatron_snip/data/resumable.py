"""Indexed datasets whose construction can be killed and resumed.

During construction, ``<prefix>.partial/`` holds these files: ``n.bin``, the tokens of the n-th dataset; ``n.lengths``,
int32 tokens of each document, including empty ones; ``progress.json``, the valid part of both and the caller's
position; ``lock``, held by the writing process.  A resumed process overwrites everything after the last mark, so the
datasets have the same bytes even if the work was killed many times.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_snip.data.identity import Id
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.errors import UserError
from megatron_snip.files.io import about, check_folder, parse_json, read_file, temporary_beside
from megatron_snip.files.json import Count, Text, checked, write_json

LOGGER = logging.getLogger("megatron_snip.data")
VERSION = 1


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The valid part of a dataset, and its smallest and largest id."""

    tokens: Count
    documents: Count
    least: Id
    largest: Id


class _Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """progress.json; ``at`` is the caller's position."""

    identity: dict[Text, Any]
    at: dict[Text, Count]
    datasets: list[_Mark]


class _Builder(IndexedDatasetBuilder):
    """A builder that keeps tokens and lengths in resumable files until `finalize`."""

    def __init__(self, prefix: str, dtype: npt.DTypeLike, path: Path, mark: _Mark | None) -> None:
        self._tokens = path
        if not mark:  # the file may be a hard link to a finished dataset
            path.unlink(missing_ok=True)
        elif path.stat().st_size < mark.tokens * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} is shorter than it was")
        super().__init__(prefix, dtype, path)
        self._kept = path.with_suffix(".lengths")
        with about(self._kept):
            self._kept_stream = open(self._kept, "r+b" if mark else "w+b")  # noqa: SIM115 - lives until closed
        if mark:
            self._resume(mark)
        self._stream.truncate(self._stream.tell())  # drop what was written after the last mark

    def _resume(self, mark: _Mark) -> None:
        lengths = np.fromfile(
            self._kept_stream, "<i4", min(mark.documents, os.fstat(self._kept_stream.fileno()).st_size)
        )
        if len(lengths) != mark.documents or int(lengths.sum(dtype=np.int64)) != mark.tokens:
            raise ValueError(f"{self._kept} does not fit the tokens")
        self._lengths.frombytes(lengths[lengths > 0].astype(np.intc).tobytes())
        self._documents.frombytes(np.cumsum(lengths > 0, dtype=np.int64).tobytes())
        self._num_tokens, self._least, self._largest = mark.tokens, mark.least, mark.largest
        self._stream.seek(mark.tokens * self.dtype.itemsize)

    def add_encoded(self, data: bytes, lengths: Sequence[int]) -> None:
        """Append many documents, as in the base class, and keep their lengths."""
        super().add_encoded(data, lengths)
        with about(self._kept):
            self._kept_stream.write(np.asarray(lengths, "<i4").tobytes())

    def mark(self) -> dict[str, Any]:
        """Description of everything added so far, which is on disk when this returns."""
        for stream, path in ((self._stream, self._bin_temporary), (self._kept_stream, self._kept)):
            with about(path):
                stream.flush()
                os.fsync(stream.fileno())
        return {
            "tokens": self.num_tokens, "documents": self.num_documents,
            "least": self._least, "largest": self._largest,
        }  # fmt: skip

    def finalize(self) -> None:
        """Give the files their final names, as in the base class, but keep the tokens under their name here too.

        This keeps the work resumable at every point until all datasets are complete.
        """
        self._bin_temporary = temporary_beside(self.prefix + ".bin")
        try:
            os.link(self._tokens, self._bin_temporary)
        except OSError:  # a file system without hard links
            self._bin_temporary = self._tokens
        super().finalize()

    def abort(self) -> None:
        """Close the files but keep them."""
        if self._bin_temporary != self._tokens:
            self._bin_temporary.unlink(missing_ok=True)
        self._open = False
        for stream in (self._stream, self._kept_stream):
            with contextlib.suppress(OSError):  # a full disk has already been reported
                stream.close()


class ResumableBuilders:
    """One builder for each of ``prefixes``, all with ``dtype``, in a folder that outlives the process.

    ``identity`` is everything that the results depend on.  ``found`` is the argument of the last `mark` in the folder,
    or None if there is nothing to resume.  On exit, the context manager removes the folder after `finalize` or if there
    is no mark, and otherwise keeps it for the next process.
    Raises UserError for a folder with another identity, or one that another process is writing.
    """

    def __init__(
        self, folder: Path, prefixes: Sequence[str], dtype: npt.DTypeLike, identity: Mapping[str, Any]
    ) -> None:
        check_folder("the folder of unfinished work", folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._identity = folder, {"version": VERSION, **identity}
        self._progress = folder / "progress.json"
        self.builders: list[_Builder] = []
        self._lock = self._take_lock()
        try:
            self.found: dict[str, int] | None = self._open_all(prefixes, dtype)
        except BaseException:
            self._release(remove=not self.marked)
            raise

    def _open_all(self, prefixes: Sequence[str], dtype: npt.DTypeLike) -> dict[str, int] | None:
        """Open the builders and return the position to resume from."""
        state = self._read()
        paths = [self.folder / f"{number}.bin" for number in range(len(prefixes))]
        if state:
            try:
                for prefix, path, mark in zip(prefixes, paths, state.datasets, strict=True):
                    self.builders.append(_Builder(prefix, dtype, path, mark))
                return state.at
            except (ValueError, FileNotFoundError) as error:
                LOGGER.warning(f"{self.folder} cannot be resumed, so the work starts over: {error}")
                for builder in self.builders:
                    builder.abort()
                self._progress.unlink()
        self.builders = [_Builder(prefix, dtype, path, None) for prefix, path in zip(prefixes, paths, strict=True)]
        return None

    def _take_lock(self) -> int:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"{self.folder} is being written by another process; wait for it, or end it") from None
        except OSError as error:  # a file system without locks
            LOGGER.warning(f"{self.folder} cannot be locked ({error}); start nothing else with this output")
        return descriptor

    def _read(self) -> _Progress | None:
        if not self._progress.exists():
            return None
        try:
            state = checked(parse_json(read_file(self._progress, "progress", f"remove {self.folder}")), _Progress)
        except ValueError as error:
            raise UserError(f"{self._progress} is not a record of progress ({error}); remove {self.folder}") from None
        mine = json.loads(json.dumps(self._identity))
        if state.identity != mine:
            other = [name for name in mine if state.identity.get(name) != mine[name]] or ["version"]
            raise UserError(
                f"{self.folder} holds unfinished work with another {other[0]}; continue with the same options and "
                "inputs, or remove it to start over"
            )
        return state

    def mark(self, at: Mapping[str, int]) -> None:
        """Write everything added so far to disk, with ``at``, counts that give the position to resume from."""
        state = {"identity": self._identity, "at": at, "datasets": [builder.mark() for builder in self.builders]}
        write_json(self._progress, state)

    @property
    def marked(self) -> bool:
        """Whether there is anything to resume from."""
        return self._progress.exists()

    def finalize(self, at: Mapping[str, int]) -> None:
        """Give all datasets their final names.  ``at`` is the final position, in case the process is killed here."""
        if self.marked:
            self.mark(at)
        for builder in self.builders:
            builder.finalize()
        self._progress.unlink(missing_ok=True)

    def __enter__(self) -> ResumableBuilders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(remove=not self.marked)

    def _release(self, *, remove: bool) -> None:
        for builder in self.builders:
            builder.abort()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
