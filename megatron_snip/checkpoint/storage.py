"""Tensors in torch's distributed checkpoints, with a CRC-32 of each record, computed on write and checked on read.

A record is one rank's shard of one tensor.  torch's own reader loads a flipped bit as a different weight, and runs any
code that a crafted `.metadata` has pickled.  This reader uses the manifest and never opens that file.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

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

from megatron_snip.checkpoint.low_parts import readable
from megatron_snip.checkpoint.manifest import (
    DTYPES,
    Damaged,
    Manifest,
    SavedTensor,
    Shard,
    check,
    file_of,
    folder_of,
    open_file,
)
from megatron_snip.errors import UserError

try:  # the same values ten times as fast, with hardware CRC
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

#: Bytes read and checked at once, small enough to stay in the CPU's cache between the passes.
_PIECE = 1 << 20


#: Finishes a checkpoint after its tensors are written.  Called on one rank with all tensors by name, and the names of
#: those that are not finite.
Publish = Callable[[Mapping[str, SavedTensor], Sequence[str]], None]


@dataclasses.dataclass(frozen=True)
class _Record:
    """A rank's report of a record that it wrote: its position, and what torch does not report."""

    info: _StorageInfo
    crc: int
    start: int  # the byte in the record where the values begin
    finite: bool


class CheckedWriter(FileSystemWriter):
    """torch's writer, with each record's CRC-32 and whether its values are finite.

    Every rank passes it to `save` or `async_save`.  The saving thread of rank 0 then calls its ``publish``.  If that or
    any rank's write fails, every rank raises the error.
    """

    def __init__(self, folder: Path, publish: Publish) -> None:
        super().__init__(folder, sync_files=True)
        self._publish = publish

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """torch's, which creates the folder.  Retries if the first rank removes an older one at the same moment."""
        while True:
            try:
                return super().prepare_local_plan(plan)
            except FileExistsError:
                if os.path.lexists(self.path) and not os.path.isdir(self.path):
                    raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the records, then read them back from the page cache for their CRCs."""
        finite = {}
        for item in plan.items:
            values = cast(Tensor, planner.resolve_data(item))
            if not values.is_contiguous():
                raise UserError(f"{item.index.fqn} is not contiguous, but checkpoints hold values row by row")
            if (dtype := _name(values.dtype)) not in DTYPES:
                raise UserError(f"{item.index.fqn} is of type {dtype}, but checkpoints hold {' and '.join(DTYPES)}")
            finite[item.index] = bool(torch.isfinite(values.sum()))
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch.save's error on closing its archive hides the cause
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        out = []
        for result in results:
            crc, start = _crc_and_start(Path(self.path), result.storage_data)
            record = _Record(result.storage_data, crc, start, finite[result.index])
            out.append(dataclasses.replace(result, storage_data=record))
        future: Future[list[WriteResult]] = Future()
        future.set_result(out)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and publish.  Called on one rank with the results of all."""
        plain = [[dataclasses.replace(r, storage_data=r.storage_data.info) for r in share] for share in results]
        super().finish(metadata, plain)
        shards: defaultdict[str, list[Shard]] = defaultdict(list)
        sizes = {
            (name, chunk.offsets): chunk.sizes
            for name, tensor in metadata.state_dict_metadata.items()
            for chunk in cast(dcp.TensorStorageMetadata, tensor).chunks
        }
        not_finite = set()
        for result in (result for share in results for result in share):
            name, first, record = result.index.fqn, cast(torch.Size, result.index.offset), result.storage_data
            where = (_rank(record.info), record.info.offset, record.info.length)
            shards[name].append(Shard(*where, record.crc, record.start, tuple(first), tuple(sizes[name, first])))
            if not record.finite:
                not_finite.add(name)
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            dtype = _name(tensor.properties.dtype)
            tensors[name] = SavedTensor(dtype, tuple(tensor.size), tuple(shards[name]))
        self._publish(tensors, sorted(not_finite))


def _name(dtype: torch.dtype) -> str:
    """Name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def _rank(info: _StorageInfo) -> int:
    """The rank whose file holds a record."""
    found = re.fullmatch(r"__(\d+)_0\.distcp", info.relative_path)
    assert found is not None, f"torch's writer names files otherwise: {info.relative_path}"
    return int(found[1])


def _crc_and_start(folder: Path, info: _StorageInfo) -> tuple[int, int]:
    """CRC-32 of one record in its file, and the byte in the record where the values begin."""
    crc, left = 0, info.length
    with open(folder / info.relative_path, "rb", buffering=0) as file:
        file.seek(info.offset)
        while left and (part := file.read(min(left, _PIECE))):
            crc, left = crc32(part, crc), left - len(part)
        view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
        return crc, torch._C.PyTorchFileReader(view).get_record_offset("data/0")  # type: ignore[attr-defined]


class CheckedReader(FileSystemReader):
    """torch's reader for a folder that `manifest` describes.  Raises Damaged if a record differs from what was written.

    It takes dtypes, shapes and positions from the manifest, and unpickles nothing.  It reads values straight into their
    tensors and checks them there.

    tensors: names of the tensors to read.
    """

    def __init__(self, folder: Path, manifest: Manifest, tensors: Sequence[str]) -> None:
        super().__init__(folder)
        self._tensors = {name: manifest.tensors[name] for name in tensors}
        self._shards = {
            (name, shard.first): shard
            for name, tensor in self._tensors.items()
            for shard in tensor.shards
            if 0 not in shard.sizes  # an empty shard may start where another does
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The metadata that torch needs for the tensors."""
        found: dict[str, dcp.STORAGE_TYPES] = {}
        for name, tensor in self._tensors.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(shard.first), torch.Size(shard.sizes))
                for shard in tensor.shards
                if 0 not in shard.sizes
            ]
            properties = dcp.TensorProperties(dtype=getattr(torch, tensor.dtype))
            found[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return dcp.Metadata(found)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the manifest is known."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan, file by file, front to back."""
        by_rank: dict[int, list[tuple[Shard, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            shard = self._shards[item.storage_index.fqn, cast(torch.Size, item.storage_index.offset)]
            by_rank[shard.rank].append((shard, item))
        for rank, items in by_rank.items():
            with open_file(Path(self.path), file_of(rank)) as file:
                for shard, item in sorted(items, key=lambda one: one[0].offset):
                    target = planner.resolve_tensor(item).detach()
                    self._read(file, shard, item, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: io.FileIO, shard: Shard, item: ReadItem, target: Tensor) -> None:
        """Read a shard straight into a matching tensor, or else into a buffer, and copy the requested part."""
        name = item.storage_index.fqn
        dtype = getattr(torch, self._tensors[name].dtype)
        whole = item.lengths == shard.sizes and target.shape == shard.sizes
        if whole and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu":
            _read_values(file, shard, name, target)
            return
        values = torch.empty(shard.sizes, dtype=dtype)
        _read_values(file, shard, name, values)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, first, length)
        target.copy_(values)


def _read_values(file: io.FileIO, shard: Shard, name: str, values: Tensor) -> None:
    """Read a record's values into a contiguous tensor of the same dtype.  Checks the whole record and the values."""
    flat = values.view(-1)
    inside = flat.view(torch.uint8).numpy().data
    after = shard.length - shard.start - len(inside)
    crc, at, sums = crc32(_fill(file, memoryview(bytearray(shard.start)), shard.offset)), 0, []
    for part in flat.split(_PIECE // flat.itemsize):  # stays in the CPU's cache for all three passes
        piece = inside[at : at + part.nbytes]
        crc, at = crc32(_fill(file, piece), crc), at + len(piece)
        sums.append(part.sum())
    if crc32(_fill(file, memoryview(bytearray(after))), crc) != shard.crc:
        raise Damaged(f"{shard.file} at byte {shard.offset} is not what was written: its CRC-32 differs")
    if not torch.stack(sums).isfinite().all():
        raise Damaged(f"{name} has values that are not finite, in {shard.file}")


def _fill(file: io.FileIO, into: memoryview, offset: int | None = None) -> memoryview:
    """Read until the buffer is full or the file ends.  The CRC detects a short read."""
    if offset is not None:
        file.seek(offset)
    got = 0
    while got < len(into) and (read := file.readinto(into[got:])):
        got += read
    return into


def load_tensors(save: Path, iteration: int, tensors: Mapping[str, Tensor], manifest: Manifest | None = None) -> None:
    """Read tensors by name, in place, from any layout.  Every rank must call it.

    Low parts may be in the checkpoint, in ``tensors``, in both or in neither (low_parts.py).
    manifest: the result of `check`, for callers that read tensor by tensor.
    Raises UserError, before it reads anything, if a tensor is missing or has another shape.  Raises Damaged, on every
    rank, if the checkpoint differs from what was written.  It may have changed some tensors by then.
    """
    folder = folder_of(save, iteration)
    manifest = manifest or check(save, iteration)
    dtypes = {name: getattr(torch, tensor.dtype) for name, tensor in manifest.tensors.items()}
    tensors, finish = readable(tensors, dtypes)
    for name, tensor in tensors.items():
        if name not in manifest.tensors:
            raise UserError(
                f"{folder}: holds no {name}; it is a checkpoint of another model: match the model options "
                "to its state.json"
            )
        if (shape := manifest.tensors[name].shape) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {name} has shape {list(shape)}, but the model's is {list(tensor.shape)}; "
                "match the model options to its state.json"
            )
    reader = CheckedReader(folder, manifest, list(tensors))
    try:
        with warnings.catch_warnings():  # torch warns of loading in a single process, as export does
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(dict(tensors), storage_reader=reader)
    except CheckpointException as error:  # a BaseException, the same on every rank
        rank, (first, _) = min(error.failures.items())
        if not isinstance(first, (Damaged, OSError)):
            raise RuntimeError(f"{folder}: rank {rank} could not read it") from error
        raise Damaged(f"{first} (rank {rank})" if rank else str(first)) from error
    finish()
