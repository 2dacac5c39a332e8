"""A folder of checkpoints with two tensors each, whose values tell the save."""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_snip.checkpoint.manifest import newest, read_state
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.config import CheckpointConfig

#: Ids of two runs.
RUN, ANOTHER = "0123456789abcdef", "fedcba9876543210"


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((30, 4), value), "optim.a.exp_avg": torch.full((30, 4), -value)}


def loaded(folder: Path) -> tuple[int | None, float, float]:
    """(iteration, value in its tensors, value in its state) of the newest whole checkpoint."""
    iteration, _ = newest(folder)
    assert iteration is not None
    into = tensors(0.0)
    load_tensors(folder, iteration, into)
    value = float(into["model.a"][0, 0])
    assert (into["model.a"] == value).all() and (into["optim.a.exp_avg"] == -value).all()
    return iteration, value, read_state(folder, iteration)["value"]


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's manifest and make its SHA-256 right again, as whoever crafts one can."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    body["sha256"] = hashlib.sha256(msgspec.json.encode({**body, "sha256": ""})).hexdigest()
    path.write_bytes(msgspec.json.encode(body))


def prove(path: Path) -> None:
    """Make a checkpoint's manifest fit a small file of it that has changed."""
    content = path.read_bytes()
    forge(path.parent, lambda body: body["small"].update({path.name: [len(content), zlib.crc32(content)]}))


def poison(folder: Path) -> None:
    """Make .metadata a pickle that sets an attribute on a class of pathlib before it gives what torch wrote.

    Each name in it is one that torch writes too; BUILD with a pair of states sets attributes, on a class as well.
    """
    path = folder / ".metadata"
    written = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    path.write_bytes(b"\x80\x02cpathlib\nPosixPath\n(N}X\x08\x00\x00\x00strangerK\x01stb0" + written[2:])
    prove(path)


@pytest.fixture
def saver(lone_mesh):
    """Makes savers of a folder; all are closed at the end."""
    made: list[Saver] = []

    def make(folder: Path, start: int = 1000, run_id: str = RUN, **options: object) -> Saver:
        made.append(Saver(folder, CheckpointConfig(**options), lone_mesh, run_id, start))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def save(saver):
    """Saves one checkpoint of a value, as a run of its own would."""

    def one(folder: Path, iteration: int, value: float, *, finite: bool = True, last: bool = True, **options: object):
        state = {"iteration": iteration, "value": value}
        here = saver(folder, **options)
        try:
            here.save(iteration, tensors(value), state, finite=finite, last=last)
        finally:
            here.close()

    return one
