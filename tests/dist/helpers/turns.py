"""What the test of turns runs on every rank."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_snip.mesh import build_mesh, set_timeout


def take_turns(folder: Path, first: int, seconds: float, limit: float) -> list[list[int]]:
    """Twice in turn, the first for longer than a collective may take: the ranks that were done before each."""
    mesh = build_mesh("cpu", pp=1, dp=dist.get_world_size(), tp=1)
    set_timeout(timedelta(seconds=limit), mesh.world)

    def work(turn: int) -> list[int]:
        before = sorted(int(path.name) for path in (folder / str(turn)).iterdir())
        if mesh.rank == first:
            time.sleep(seconds)
        (folder / str(turn) / str(mesh.rank)).touch()
        return before

    return [mesh.in_turn(mesh.rank == first, lambda turn=turn: work(turn)) for turn in range(2)]
