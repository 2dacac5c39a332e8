"""Checkpoints by torch.distributed.checkpoint, in Megatron's folder layout.

    <save>/latest_checkpointed_iteration.txt     the iteration to continue from
    <save>/iter_0000100/                         weights and moments, sharded, and state.json

A checkpoint is written aside and renamed when it is whole, so a kill at any moment leaves the last one.
Tensors are stored by their global shape and load on any layout.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron_snip.mesh import Mesh
from megatron_snip.snip.jsonfile import write_atomic

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"
#: What a resume reads from it.
STATE_FIELDS = (
    "run_id", "iteration", "optimizer_steps", "nan_iterations", "nan_in_a_row", "config", "snip",
)  # fmt: skip
LOGGER = logging.getLogger("megatron_snip")


def folder_of(save: Path, iteration: int) -> Path:
    """Folder of one checkpoint."""
    return save / f"iter_{iteration:07d}"


def latest_iteration(save: Path) -> int | None:
    """Iteration of the newest whole checkpoint; None if the folder holds none.  ValueError if it is damaged."""
    tracker = save / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{tracker}: {text!r} is no iteration; write the number of an iter_ folder into it")
    if not (folder_of(save, int(text)) / STATE).is_file():
        raise ValueError(
            f"{folder_of(save, int(text))}: no whole checkpoint, though {tracker} names it; "
            "write an earlier iteration into that file"
        )
    return int(text)


def save_checkpoint(
    save: Path, iteration: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], mesh: Mesh
) -> None:
    """Write one checkpoint; every process calls it with its own tensors, rank 0's `state` counts."""
    final = folder_of(save, iteration)
    aside = final.with_name(final.name + ".writing")
    if mesh.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    mesh.barrier()
    dcp_save(dict(tensors), storage_writer=FileSystemWriter(aside, sync_files=True))
    if mesh.rank == 0:
        write_atomic(aside / STATE, json.dumps(state))
        old = final.with_name(final.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():  # an earlier run was killed after it wrote this one and continued from before
            os.rename(final, old)
        os.rename(aside, final)
        write_atomic(save / TRACKER, f"{iteration}\n")
        shutil.rmtree(old, ignore_errors=True)
    mesh.barrier()


def read_state(load: Path, iteration: int) -> dict[str, Any]:
    """What `state.json` of a checkpoint holds.  ValueError if it cannot be read or lacks a field."""
    path = folder_of(load, iteration) / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        missing = [field for field in STATE_FIELDS if field not in state]
    except (OSError, ValueError, TypeError) as error:  # ValueError: no JSON, or no text at all
        raise ValueError(f"{path}: cannot be read ({error}); load an earlier iteration") from error
    if missing:
        raise ValueError(f"{path}: field {missing[0]} is missing; load an earlier iteration")
    return state


def load_tensors(load: Path, iteration: int, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place, each by its name, from any layout; every process calls it.

    ValueError, before anything is read, if one is missing or has another shape.
    """
    folder = folder_of(load, iteration)
    reader = FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # the pickled metadata of a damaged file fails in many ways
        raise ValueError(f"{folder}: metadata cannot be read ({error}); load an earlier iteration") from error
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
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        reason = " ".join(str(error).split())[-300:]
        raise ValueError(f"{folder}: tensors cannot be read ({reason}); load an earlier iteration") from error
