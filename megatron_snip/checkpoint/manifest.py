"""Layout of a folder of checkpoints, and which checkpoints are complete.

    <save>/latest_checkpointed_iteration.txt     the iteration to continue from
    <save>/iter_0000100/manifest.json            written last: sizes of other files, position and CRC-32 of each shard
    <save>/iter_0000100/state.json               state other than tensors
    <save>/iter_0000100/*.distcp                 weights and moments, sharded, by torch.distributed.checkpoint
    <save>/iter_0000100/.metadata                a pickle for torch's own reader; this package never opens it

A checkpoint is complete if it matches its manifest.  If the manifest is missing, the save was interrupted.  A file that
does not match is damaged or belongs to another checkpoint.  `check` compares the sizes of tensor files;
`storage.load_tensors` compares their CRCs while it reads.  A manifest may be untrusted: it names no files, and its
description of tensors must be consistent and no larger than the files before anything is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import stat
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from megatron_snip.errors import UserError
from megatron_snip.files.io import MOST_BYTES, read_file, shown
from megatron_snip.files.json import Count, JsonFileError, RunId, decoded, read_json

TRACKER = "latest_checkpointed_iteration.txt"
STATE, MANIFEST, METADATA = "state.json", "manifest.json", ".metadata"
VERSION = 4  # of manifest.json and state.json
#: Bytes per value of each dtype in checkpoints.
DTYPES = {"float32": 4, "bfloat16": 2}
#: Limit in bytes for what torch.save adds before and after a shard's values; usually a few hundred.
MOST_BESIDE_VALUES = 1 << 16
#: How a folder of Megatron-LM's checkpoints differs from ours, which has none of these.
_MEGATRONS = ("metadata.json", "mp_rank_*", "release")
_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)

_Crc = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Dims = Annotated[tuple[Count, ...], Meta(max_length=8)]
_TensorName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.]{1,200}\Z")]
_SmallName = Annotated[str, Meta(pattern=r"\A(state\.json|\.metadata)\Z")]
_Axis = Annotated[str, Meta(pattern=r"\A(tp|pp|dp)\Z")]
_Why = Annotated[str, Meta(max_length=300)]


class Damaged(UserError):
    """A checkpoint differs from what was written.  The message is the reason, without the folder's name."""


@contextmanager
def naming(folder: Path, iteration: int) -> Iterator[None]:
    """Turn Damaged into a UserError that names the checkpoint, for callers without an alternative."""
    try:
        yield
    except Damaged as error:
        raise UserError(f"{folder_of(folder, iteration)}: {error}; load another iteration") from error


class Shard(Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A shard of a tensor: one record in a rank's file.

    offset, length: the record's bytes in the file.  start: the byte in the record where the values begin, row by row.
    first, sizes: the shard's position and shape in the tensor.
    """

    rank: Annotated[int, Meta(ge=0, lt=1_000_000)]
    offset: Count
    length: Count
    crc: _Crc
    start: Annotated[int, Meta(ge=0, le=MOST_BESIDE_VALUES)]
    first: _Dims
    sizes: _Dims

    @property
    def file(self) -> str:
        """Name of the rank's file."""
        return file_of(self.rank)


class SavedTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """Dtype and shape of a tensor, and its shards."""

    dtype: Annotated[str, Meta(max_length=40)]
    shape: _Dims
    shards: tuple[Shard, ...]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a checkpoint's folder, apart from the manifest.

    layout: ranks per axis.  small: file -> (bytes, CRC-32).  not_finite: why no run may continue from it; empty for a
    good checkpoint.
    """

    iteration: Count
    run_id: RunId
    layout: dict[_Axis, Count]
    small: dict[_SmallName, tuple[Count, _Crc]]
    tensors: dict[_TensorName, SavedTensor]
    not_finite: Annotated[tuple[_Why, ...], Meta(max_length=8)] = ()
    version: int = VERSION
    sha256: Annotated[str, Meta(max_length=64)] = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.small.values()) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor file, the sum of its records."""
        by_rank: Counter[int] = Counter()
        for tensor in self.tensors.values():
            for shard in tensor.shards:
                by_rank[shard.rank] += shard.length
        return {file_of(rank): size for rank, size in sorted(by_rank.items())}

    def to_text(self) -> str:
        """The file's text: one JSON object with the SHA-256 of the rest, so that damage and edits are detected."""
        body = msgspec.json.encode(msgspec.structs.replace(self, sha256=""))
        whole = msgspec.structs.replace(self, sha256=hashlib.sha256(body).hexdigest())
        return msgspec.json.encode(whole).decode()


class _Version(Struct):
    """A manifest of any version."""

    version: Any


def file_of(rank: int) -> str:
    """The name of a rank's file in torch's writer."""
    return f"__{rank}_0.distcp"


def open_file(folder: Path, name: str) -> io.FileIO:
    """Open a checkpoint's file, unbuffered.  Raises Damaged for a pipe, which would block, and for a link."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        file = io.FileIO(os.open(folder / name, flags))
    except OSError as error:
        raise Damaged(f"{name} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged(f"{name} cannot be read (it is not a regular file)")
    return file


def _megatrons(folder: Path) -> str:
    """What to do with a folder that Megatron-LM wrote; empty for others."""
    if not any(True for name in _MEGATRONS for _ in folder.glob(name)):
        return ""
    return (
        "Megatron-LM wrote it, in a form that is not read here; export it to Hugging Face, for example with Megatron "
        "Bridge, and import that by `megatron-snip convert import`"
    )


def _content(folder: Path, name: str, most: int) -> bytes:
    """Content of a file of at most ``most`` bytes."""
    with open_file(folder, name) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise Damaged(f"{name} has {size} bytes, but at most {most} can be read")
        return io.BufferedReader(file).read(most)


def folder_of(save: Path, iteration: int) -> Path:
    """Folder of one checkpoint."""
    return save / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int | None:
    """The iteration in a folder's name; None if no save would use that name, such as iter_100."""
    found = _ITERATION.fullmatch(folder.name)
    return int(found[1]) if found and folder.name == folder_of(folder, int(found[1])).name else None


def iterations(save: Path) -> list[int]:
    """Iterations of all checkpoint folders, complete or not, newest first."""
    found = (iteration_of(path) for path in (save.iterdir() if save.is_dir() else ()) if path.is_dir())
    return sorted((number for number in found if number is not None), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.  Raises Damaged if it is missing or differs from what was written."""
    if not os.path.lexists(folder / MANIFEST):
        raise Damaged(_megatrons(folder) or f"it has no {MANIFEST}: its save did not finish")
    text = _content(folder, MANIFEST, MOST_BYTES)
    try:
        if (version := decoded(text, _Version).version) != VERSION:
            raise Damaged(f"{MANIFEST} has version {shown(version)}, but this code reads version {VERSION}")
        manifest = decoded(text, Manifest)
    except JsonFileError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if manifest.to_text().encode() != text:
        raise Damaged(f"{MANIFEST} is not what was written: its SHA-256 or its form differs")
    for name, tensor in manifest.tensors.items():
        if problem := _unfit(tensor):
            raise Damaged(f"{MANIFEST}: {name} {problem}")
    return manifest


def _unfit(tensor: SavedTensor) -> str:
    """The problem with a tensor; empty if its shards hold every value exactly once."""
    itemsize = DTYPES.get(tensor.dtype)
    if itemsize is None:
        return f"is of type {shown(tensor.dtype)}, but checkpoints hold {' and '.join(DTYPES)}"
    for shard in tensor.shards:
        if len(shard.first) != len(tensor.shape) or len(shard.sizes) != len(tensor.shape):
            return f"has {len(tensor.shape)} dims, and a shard in {shard.file} has others"
        beside = shard.length - math.prod(shard.sizes) * itemsize - shard.start
        if not 0 <= beside <= MOST_BESIDE_VALUES:
            return f"has a shard in {shard.file} at byte {shard.offset} that does not fit its record"
    if not _covers([shard for shard in tensor.shards if 0 not in shard.sizes], tensor.shape, 0):
        return f"of shape {list(tensor.shape)} does not have every value once in its shards"
    return ""


def _covers(shards: Sequence[Shard], shape: Sequence[int], dim: int) -> bool:
    """Whether shards fill a shape without overlap, from a dim on.

    Works slab by slab along the dim, so it accepts any grid.  Meshes cut tensors into grids.
    """
    if 0 in shape:
        return not shards
    if dim == len(shape):
        return len(shards) == 1
    slabs: defaultdict[tuple[int, int], list[Shard]] = defaultdict(list)
    for shard in shards:
        slabs[shard.first[dim], shard.sizes[dim]].append(shard)
    end = 0
    for (first, size), inside in sorted(slabs.items()):
        if first != end or not _covers(inside, shape, dim + 1):
            return False
        end += size
    return end == shape[dim]


def check(save: Path, iteration: int) -> Manifest:
    """The manifest of a checkpoint that a run may continue from.  Verifies its state and all file sizes.

    Raises Damaged with the reason if it is incomplete, of another iteration, or has values that are not finite.
    """
    manifest = check_whole(save, iteration)
    if manifest.not_finite:
        raise Damaged(f"it was saved with values that are not finite: {', '.join(manifest.not_finite)}")
    return manifest


def check_whole(save: Path, iteration: int) -> Manifest:
    """`check`, but accepts values that are not finite."""
    folder = folder_of(save, iteration)
    manifest = read_manifest(folder)
    if manifest.iteration != iteration:
        raise Damaged(f"{MANIFEST} is from iteration {manifest.iteration}")
    if STATE not in manifest.small:
        raise Damaged(f"{MANIFEST} does not list {STATE}")
    size, crc = manifest.small[STATE]
    content = _content(folder, STATE, MOST_BYTES)
    if len(content) != size or zlib.crc32(content) != crc:
        raise Damaged(f"{STATE} is not what was written: its size or CRC-32 differs")
    unread = {METADATA: manifest.small[METADATA][0]} if METADATA in manifest.small else {}
    for name, size in {**unread, **manifest.sizes()}.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise Damaged(f"{name} " + ("is missing" if found is None else f"has {found} bytes of {size}"))
    return manifest


def tracked_iteration(save: Path) -> int | None:
    """The iteration in the tracker; None if there is neither a tracker nor a checkpoint.

    Without a tracker, it is the only checkpoint's: that is what a run leaves if it is killed in its first save, between
    the rename of the folder and the write of the tracker.  Raises UserError if the tracker is damaged.  Also raises it
    if the tracker is missing and there are several checkpoints, or only one that no run continues from.
    """
    tracker = save / TRACKER
    if not tracker.is_file():
        if held := iterations(save):
            if len(held) == 1 and _is_continued(folder_of(save, held[0])):
                return held[0]
            raise UserError(
                f"{save} holds checkpoints up to iteration {held[0]} but no {TRACKER}; write the iteration to continue "
                f"from into that file, or --load {folder_of(save, held[0])}"
            )
        return None
    way_out = "write the number of an iter_ folder into it"
    text = read_file(tracker, "iteration to continue from", way_out).decode(errors="replace").strip()
    if text == "release" and (theirs := _megatrons(save)):
        raise UserError(f"{save}: {theirs}")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UserError(f"{tracker}: {shown(text)} is not an iteration; {way_out}")
    return int(text)


def _is_continued(folder: Path) -> bool:
    """Whether a run continues from a checkpoint: it is complete, and its values are finite."""
    try:
        return not read_manifest(folder).not_finite
    except Damaged:
        return False


def newest(save: Path, below: int | None = None) -> tuple[int | None, list[str]]:
    """The newest complete checkpoint up to the tracker's iteration, or below a number, and why newer ones were skipped.

    None if the folder has no checkpoint.  Raises UserError if it has some but none is complete.
    """
    tracked = tracked_iteration(save)
    if tracked is None:
        return None, []
    passed_over: list[str] = []
    if not folder_of(save, tracked).is_dir():
        passed_over.append(f"{folder_of(save, tracked)}: there is no such folder, although {TRACKER} names it")
    for iteration in iterations(save):
        if iteration > tracked or (below is not None and iteration >= below):
            continue
        try:
            check(save, iteration)
        except Damaged as error:
            passed_over.append(f"{folder_of(save, iteration)}: {error}")
        else:
            return iteration, passed_over
    raise UserError(
        f"{save} holds no {'other ' if below else ''}checkpoint that can be continued; "
        f"{'; '.join(passed_over) or 'there is no older one'}; give another --load, or another --save for a new run"
    )


def read_state(save: Path, iteration: int) -> dict[str, Any]:
    """A checkpoint's state.json, fields unchecked.  Raises UserError if it is unreadable or of another iteration."""
    path = folder_of(save, iteration) / STATE
    way_out = "load another iteration (--ckpt-step)"
    state = read_json(path, "state", way_out)
    if state.get("version") != VERSION:
        raise UserError(f"{path}: version is {shown(state.get('version'))}, but this code reads {VERSION}; {way_out}")
    if state.get("iteration") != iteration:
        raise UserError(f"{path}: it is from iteration {shown(state.get('iteration'))}; {way_out}")
    return state
