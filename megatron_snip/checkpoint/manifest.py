"""What a folder of checkpoints holds, and which of them are whole.

    <save>/latest_checkpointed_iteration.txt     the iteration to continue from
    <save>/iter_0000100/manifest.json            written last: every other file's size and CRC-32
    <save>/iter_0000100/state.json               what a resume needs beside tensors
    <save>/iter_0000100/*.distcp, .metadata      weights and moments, sharded, by torch.distributed.checkpoint

A checkpoint is whole if its manifest says so: a folder without one was cut short, and a file that does not match it
is another one's or damaged.  Of the tensors `check` compares sizes; `storage.load_tensors` compares their CRCs as it
reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
STATE, MANIFEST = "state.json", "manifest.json"
VERSION = 3  # of manifest.json and state.json; checkpoints of version 1 have no manifest
#: What a resume reads from state.json.
STATE_FIELDS = ("run_id", "iteration", "optimizer_steps", "nan_iterations", "config", "snip")
_ITERATION = re.compile(r"iter_(\d+)", re.ASCII)


class Damaged(UserError):
    """A checkpoint is not what was written; the message is the reason, without the folder's name."""


@contextmanager
def naming(folder: Path, iteration: int) -> Iterator[None]:
    """UserError that names a checkpoint which turns out damaged, for those who take no other instead."""
    try:
        yield
    except Damaged as error:
        raise UserError(f"{folder_of(folder, iteration)}: {error}; load another iteration") from error


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder holds besides its manifest.

    small: file -> (bytes, CRC-32); tensors: file -> its records (offset, bytes, CRC-32, byte of it where the values
    begin), which fill it; not_finite: why a run must not go on from it, empty for a good one; layout: processes by
    axis.
    """

    iteration: int
    run_id: str
    layout: Mapping[str, int]
    small: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, tuple[tuple[int, int, int, int], ...]]
    not_finite: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.small.values()) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Bytes of every file of tensors."""
        return {name: sum(length for _, length, *_ in records) for name, records in self.tensors.items()}

    def to_text(self) -> str:
        """The file's text: one JSON object with the SHA-256 of the rest, so that a cut or edited one shows."""
        body = {"version": VERSION, **vars(self)}
        return json.dumps({**body, "sha256": _digest(body)})


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def folder_of(save: Path, iteration: int) -> Path:
    """Folder of one checkpoint."""
    return save / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int | None:
    """The iteration that a folder's name tells; None if it is not one that a save gives, such as iter_100."""
    found = _ITERATION.fullmatch(folder.name)
    return int(found[1]) if found and folder.name == folder_of(folder, int(found[1])).name else None


def iterations(save: Path) -> list[int]:
    """Iterations of all checkpoint folders, whole or not, newest first."""
    found = (iteration_of(path) for path in (save.iterdir() if save.is_dir() else ()) if path.is_dir())
    return sorted((number for number in found if number is not None), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder; Damaged if there is none or it is not what was written."""
    try:
        body = json.loads((folder / MANIFEST).read_text())
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise Damaged(
            f"it has no {MANIFEST}, so its save did not end, or a version before {VERSION} wrote it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error!r})") from error
    if body.get("version") != VERSION:
        raise Damaged(f"{MANIFEST} has version {body.get('version')!r}, and this code reads version {VERSION}")
    if digest != _digest(body):
        raise Damaged(f"{MANIFEST} is not what was written: its SHA-256 differs")
    del body["version"]
    try:
        tensors = {name: tuple(map(tuple, records)) for name, records in body.pop("tensors").items()}
        small = {name: tuple(facts) for name, facts in body.pop("small").items()}
        return Manifest(tensors=tensors, small=small, not_finite=tuple(body.pop("not_finite")), **body)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} has fields that no version writes ({error!r})") from error


def check(save: Path, iteration: int) -> Manifest:
    """The manifest of a checkpoint that a run may go on from, by its small files and all files' sizes.

    Damaged with the reason if it is not whole, is another iteration's, or holds what is not finite.
    """
    folder = folder_of(save, iteration)
    manifest = read_manifest(folder)
    if manifest.iteration != iteration:
        raise Damaged(f"{MANIFEST} is from iteration {manifest.iteration}")
    for name, (size, crc) in manifest.small.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
        if len(content) != size or zlib.crc32(content) != crc:
            raise Damaged(f"{name} is not what was written: its size or CRC-32 differs")
    for name, size in manifest.sizes().items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise Damaged(f"{name} " + ("is missing" if found is None else f"has {found} bytes of {size}"))
    if manifest.not_finite:
        raise Damaged(f"it was saved with values that are not finite: {', '.join(manifest.not_finite)}")
    return manifest


def tracked_iteration(save: Path) -> int | None:
    """The iteration that the tracker names; None if there are neither tracker nor checkpoints.

    UserError if it is damaged, or missing where checkpoints are.
    """
    tracker = save / TRACKER
    if not tracker.is_file():
        if held := iterations(save):
            raise UserError(
                f"{save} holds checkpoints up to iteration {held[0]} and no {TRACKER}; write the iteration to continue "
                f"from into that file, or --load {folder_of(save, held[0])}"
            )
        return None
    text = tracker.read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{tracker}: {text!r} is not an iteration; write the number of an iter_ folder into it")
    return int(text)


def newest(save: Path, below: int | None = None) -> tuple[int | None, list[str]]:
    """The newest whole checkpoint up to the tracker's iteration, or below a number; and why newer ones are not it.

    None if the folder holds no checkpoint at all.  UserError if it holds some and none is whole.
    """
    tracked = tracked_iteration(save)
    if tracked is None:
        return None, []
    passed_over: list[str] = []
    if not folder_of(save, tracked).is_dir():
        passed_over.append(f"{folder_of(save, tracked)}: there is no such folder, though {TRACKER} names it")
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
    """What state.json of a checkpoint holds.  UserError if it cannot be read, lacks a field, or is another's."""
    path = folder_of(save, iteration) / STATE
    way_out = "load another iteration (--ckpt-step)"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        missing = [field for field in STATE_FIELDS if field not in state]
    except (OSError, ValueError, TypeError, RecursionError) as error:  # ValueError: no JSON, or no text at all
        raise UserError(f"{path}: cannot be read ({error}); {way_out}") from error
    if missing:
        raise UserError(f"{path}: field {missing[0]} is missing; {way_out}")
    if state.get("version") != VERSION:
        raise UserError(f"{path}: version is {state.get('version')!r}, and this code reads {VERSION}; {way_out}")
    if state["iteration"] != iteration:
        raise UserError(f"{path}: it is from iteration {state['iteration']!r}; {way_out}")
    return state
