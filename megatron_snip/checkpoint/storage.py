"""Tensors in torch's distributed checkpoints: a CRC-32 of each record, kept as it is written and checked as it is read.

A record is one process's shard of one tensor.  torch's own reader would load a flipped bit as another weight, and
would run whatever a crafted `.metadata` pickles; this one refuses both.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from megatron_snip.checkpoint.manifest import Damaged, Manifest, check, folder_of
from megatron_snip.errors import UserError

try:  # the same numbers ten times as fast, with the instruction that processors have for them
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

METADATA = ".metadata"
#: Everything that torch pickles into the metadata of tensors; nothing else is looked up, let alone called.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},  # Python 3.13
}  # fmt: skip


#: Bytes that are read and checked in one piece: few enough to be in the processor's cache at the second look.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Record:
    """Where a shard lies, and what is told of it beside torch's metadata.

    start: the byte of the record where the shard's values begin, row by row; before and after them is what torch.save
    adds.
    """

    info: _StorageInfo
    crc: int
    start: int
    finite: bool


#: What becomes of a checkpoint whose tensors are written; called in one process, with all records by tensor's name.
Publish = Callable[[list[tuple[str, Record]]], None]


class CheckedWriter(FileSystemWriter):
    """torch's writer that also tells each record's CRC-32 and whether its values are finite.

    Every process gives it to `save` or `async_save`.  The first process's ``publish`` is then called, by the thread
    that saves; what it raises is raised on every process, as a failed write on any of them is.
    """

    def __init__(self, folder: Path, publish: Publish) -> None:
        super().__init__(folder, sync_files=True)
        self._publish = publish

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """torch's, which makes the folder; the first process may remove one of an earlier try at the same moment."""
        while True:
            try:
                return super().prepare_local_plan(plan)
            except FileExistsError:
                if os.path.lexists(self.path) and not os.path.isdir(self.path):
                    raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, then read back what is in the system's cache for the CRCs."""
        finite = {}
        for item in plan.items:
            values = cast(Tensor, planner.resolve_data(item))
            if not values.is_contiguous():
                raise UserError(f"{item.index.fqn} is not contiguous, and checkpoints hold values row by row")
            finite[item.index] = bool(torch.isfinite(values.sum()))
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch.save closes its archive, which fails with words that hide the reason
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        out = []
        for result in results:
            crc, start = _look_at(Path(self.path), result.storage_data)
            record = Record(result.storage_data, crc, start, finite[result.index])
            out.append(dataclasses.replace(result, storage_data=record))
        future: Future[list[WriteResult]] = Future()
        future.set_result(out)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and publish; one process calls it, with what all have written."""
        plain = [[dataclasses.replace(r, storage_data=r.storage_data.info) for r in share] for share in results]
        super().finish(metadata, plain)
        self._publish([(result.index.fqn, result.storage_data) for share in results for result in share])


def _look_at(folder: Path, info: _StorageInfo) -> tuple[int, int]:
    """CRC-32 of one record as it lies in its file, and the byte of it where the values begin."""
    crc, left = 0, info.length
    with open(folder / info.relative_path, "rb", buffering=0) as file:
        file.seek(info.offset)
        while left and (part := file.read(min(left, _PIECE))):
            crc, left = crc32(part, crc), left - len(part)
        view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
        return crc, torch._C.PyTorchFileReader(view).get_record_offset("data/0")  # type: ignore[attr-defined]


def _member(kind: Any, name: Any) -> Any:
    """The member of torch's one enumeration in metadata; nothing else has its attributes looked up."""
    if kind is not dcp._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise Damaged(
            f"{METADATA} looks up {name!r} of {kind!r}, which no checkpoint of tensors needs; do not trust it"
        )
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's metadata of tensors, and nothing else that a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        """The named class if it is one of torch's metadata; Damaged otherwise."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # by which Python up to 3.11.3 pickles members of an enumeration
        if name not in _ALLOWED.get(module, ()):
            raise Damaged(f"{METADATA} names {module}.{name}, which no checkpoint of tensors needs; do not trust it")
        return super().find_class(module, name)


class CheckedReader(FileSystemReader):
    """torch's reader of a folder that `manifest` describes; raises Damaged where a record is not what was written.

    It takes types and shapes from the metadata and the values' place from the manifest, and unpickles no record.  So
    values are read to where they belong, and checked there.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._records = {
            (name, offset): (length, crc, start)
            for name, records in manifest.tensors.items()
            for offset, length, crc, start in records
        }
        self._shards: dict[tuple[str, torch.Size], tuple[torch.Size, torch.dtype]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """torch's metadata, by an unpickler that knows its classes alone."""
        try:
            with open(Path(self.path) / METADATA, "rb") as file:
                found = _MetadataUnpickler(file).load()
            assert isinstance(found, dcp.Metadata)
        except Damaged:
            raise
        except Exception as error:  # a damaged pickle fails in many ways
            raise Damaged(f"{METADATA} cannot be read ({error!r})") from error
        return found

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep type and shape of every shard."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            for chunk in tensor.chunks:
                self._shards[name, chunk.offsets] = (chunk.sizes, tensor.properties.dtype)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, file by file from front to back."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._checked(item).relative_path].append(item)
        for name, items in by_file.items():
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    target = planner.resolve_tensor(item).detach()
                    self._read(file, item, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _checked(self, item: ReadItem) -> _StorageInfo:
        """Where a shard lies by the metadata; Damaged if the manifest has no such record, or a smaller one."""
        info: _StorageInfo = self.storage_data[item.storage_index]
        length, _, start = self._records.get((info.relative_path, info.offset), (None, 0, 0))
        sizes, dtype = self._shards[_place(item)]
        if length != info.length or start + math.prod(sizes) * dtype.itemsize > length:
            raise Damaged(
                f"{info.relative_path} at byte {info.offset}: {METADATA} tells of a record that the manifest does not"
            )
        return info

    def _read(self, file: BinaryIO, item: ReadItem, target: Tensor) -> None:
        """Read a shard into a tensor if it is the whole of it, else into memory of its own for a part of it."""
        info = self.storage_data[item.storage_index]
        sizes, dtype = self._shards[_place(item)]
        whole = item.lengths == sizes and target.shape == sizes
        if whole and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu":
            self._read_values(file, info, target)
            return
        shard = torch.empty(sizes, dtype=dtype)
        self._read_values(file, info, shard)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            shard = shard.narrow(dim, first, length)
        target.copy_(shard)

    def _read_values(self, file: BinaryIO, info: _StorageInfo, values: Tensor) -> None:
        """Read a record's values into a contiguous tensor of their type, and check the whole record."""
        length, crc, start = self._records[info.relative_path, info.offset]
        inside = values.view(-1).view(torch.uint8).numpy().data
        found = 0
        file.seek(info.offset)
        for part in (memoryview(bytearray(start)), inside, memoryview(bytearray(length - start - len(inside)))):
            for at in range(0, len(part), _PIECE):
                found = crc32(_fill(file, part[at : at + _PIECE]), found)
        if found != crc:
            raise Damaged(f"{info.relative_path} at byte {info.offset} is not what was written: its CRC-32 differs")


def _place(item: ReadItem) -> tuple[str, torch.Size]:
    """The saved tensor's name, and where in it the shard begins."""
    return item.storage_index.fqn, cast(torch.Size, item.storage_index.offset)


def _fill(file: BinaryIO, into: memoryview) -> memoryview:
    """Read until a buffer is full or the file ends; what the end leaves is caught by the CRC."""
    got = 0
    while got < len(into) and (read := file.readinto(into[got:])):  # type: ignore[attr-defined]
        got += read
    return into


def load_tensors(save: Path, iteration: int, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place, each by its name, from any layout; every process calls it.

    UserError, before anything is read, if one is missing or has another shape.  Damaged, on every process, if the
    checkpoint is not what was written; some tensors may have been read by then.
    """
    folder = folder_of(save, iteration)
    manifest = check(save, iteration)
    reader = CheckedReader(folder, manifest)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise UserError(
                f"{folder}: holds no {name}; it is a checkpoint of another model: match the model options "
                "to its state.json"
            )
        size = getattr(saved[name], "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {name} has shape {list(size or [])}, the model's is {list(tensor.shape)}; "
                "match the model options to its state.json"
            )
    try:
        with warnings.catch_warnings():  # torch says that a single process loads, as export means to
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(dict(tensors), storage_reader=reader)
    except CheckpointException as error:  # a BaseException, the same on every process
        rank, (first, _) = min(error.failures.items())
        if not isinstance(first, (Damaged, OSError)):
            raise RuntimeError(f"{folder}: rank {rank} could not read it") from error
        raise Damaged(f"{first} (rank {rank})" if rank else str(first)) from error
