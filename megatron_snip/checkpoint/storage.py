"""Tensors in torch's distributed checkpoints: a CRC-32 of each record, kept as it is written and checked as it is read.

A record is one process's shard of one tensor.  torch's own reader would load a flipped bit as another weight, and
would run whatever a crafted `.metadata` pickles; this one refuses both.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_snip.checkpoint.manifest import Damaged, Manifest, check, folder_of

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


@dataclass(frozen=True)
class Record:
    """Where a shard lies, and what is told of it beside torch's metadata."""

    info: _StorageInfo
    crc: int
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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, then read back what is in the system's cache for the CRCs."""
        sums = {item.index: cast(Tensor, planner.resolve_data(item)).sum() for item in plan.items}
        finite = {index: bool(torch.isfinite(total)) for index, total in sums.items()}
        results = super().write_data(plan, planner).wait()
        out = []
        for result in results:
            info = result.storage_data
            record = Record(info, _crc_of(Path(self.path) / info.relative_path, info), finite[result.index])
            out.append(dataclasses.replace(result, storage_data=record))
        future: Future[list[WriteResult]] = Future()
        future.set_result(out)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and publish; one process calls it, with what all have written."""
        plain = [[dataclasses.replace(r, storage_data=r.storage_data.info) for r in share] for share in results]
        super().finish(metadata, plain)
        self._publish([(result.index.fqn, result.storage_data) for share in results for result in share])


def _crc_of(path: Path, info: _StorageInfo) -> int:
    """CRC-32 of one record as it lies in its file."""
    crc, left = 0, info.length
    with open(path, "rb", buffering=0) as file:
        file.seek(info.offset)
        while left and (part := file.read(min(left, 1 << 22))):
            crc, left = crc32(part, crc), left - len(part)
    return crc


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
    """torch's reader of a folder that `manifest` describes; raises Damaged where a record is not what was written."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._crcs = {
            (name, offset): (length, crc)
            for name, records in manifest.tensors.items()
            for offset, length, crc in records
        }

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

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """The record's bytes, read once and checked before anything is made of them."""
        where = f"{sinfo.relative_path} at byte {sinfo.offset}"
        length, crc = self._crcs.get((sinfo.relative_path, sinfo.offset), (None, None))
        if length != sinfo.length:
            raise Damaged(f"{where}: {METADATA} tells of a record that the manifest does not")
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        if len(content) != length or crc32(content) != crc:
            raise Damaged(f"{where} is not what was written: its CRC-32 differs")
        return io.BytesIO(content)


def load_tensors(save: Path, iteration: int, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place, each by its name, from any layout; every process calls it.

    ValueError, before anything is read, if one is missing or has another shape.  Damaged, on every process, if the
    checkpoint is not what was written; some tensors may have been read by then.
    """
    folder = folder_of(save, iteration)
    manifest = check(save, iteration)
    reader = CheckedReader(folder, manifest)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise ValueError(
                f"{folder}: holds no {name}; it is a checkpoint of another model: match the model options "
                "to its state.json"
            )
        size = getattr(saved[name], "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            raise ValueError(
                f"{folder}: {name} has shape {list(size or [])}, the model's is {list(tensor.shape)}; "
                "match the model options to its state.json"
            )
    try:
        dcp_load(dict(tensors), storage_reader=reader)
    except CheckpointException as error:  # a BaseException, the same on every process
        rank, (first, _) = min(error.failures.items())
        if not isinstance(first, (Damaged, OSError)):
            raise RuntimeError(f"{folder}: rank {rank} could not read it") from error
        raise Damaged(f"{first} (rank {rank})" if rank else str(first)) from error
