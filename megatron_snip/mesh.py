"""The mesh of processes, axes (pp, dp, tp): the only maker of process groups.

tp is innermost, so that the processes which talk most are neighbours, as in Megatron-LM; "axis" is an axis
of the mesh, "dim" a dim of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as seen from this process."""

    size: int
    rank: int
    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this process stands first on the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process stands last on the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """The processes of a run, laid out as [pp, dp, tp]."""

    device_mesh: DeviceMesh
    pp: Axis
    dp: Axis
    tp: Axis
    rank: int
    world_size: int

    @property
    def world(self) -> dist.ProcessGroup:
        """All processes."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A group of all processes over gloo, for a thread that must not meet training's collectives.

        Every process calls it.
        """
        return dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """Wait for all processes; every process calls it."""
        dist.barrier(self.world)


def build_mesh(device_type: str, *, pp: int, dp: int, tp: int, timeout_minutes: float = 10.0) -> Mesh:
    """The mesh over the started process group; every process calls it, pp * dp * tp is the world size.

    A collective on one of its axes that takes longer than the time-out ends the run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert pp * dp * tp == world_size, f"{pp} x {dp} x {tp} is not {world_size}"
    device_mesh = init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=AXES)
    for name in AXES:  # the mesh makes its groups with torch's default, whatever the world's is
        _set_pg_timeout(timedelta(minutes=timeout_minutes), device_mesh.get_group(name))
    axes = {
        name: Axis(size, device_mesh.get_local_rank(name), device_mesh.get_group(name))
        for name, size in zip(AXES, (pp, dp, tp))
    }
    for axis in axes.values():
        _connect(axis, device_type, pairs=axis is axes["pp"])
    return Mesh(device_mesh, axes["pp"], axes["dp"], axes["tp"], rank, world_size)


def _connect(axis: Axis, device_type: str, *, pairs: bool) -> None:
    """Let NCCL make the communicators of an axis now, in one order on all processes.

    Else they are made at first use: the axis's own by a pipeline's first batch of sends and receives in mid-step, and
    one of each pair by its first single send, where both wait for processes that may wait for others.
    """
    if axis.size == 1 or dist.get_backend(axis.group) == "fake":
        return
    one = torch.ones(1, device=device_type)
    dist.all_reduce(one, group=axis.group)
    for first in range(axis.size) if pairs else ():
        second = (first + 1) % axis.size  # the last and the first talk where stages are interleaved
        if axis.rank == first:
            dist.send(one, group_dst=second, group=axis.group)
        elif axis.rank == second:
            dist.recv(one, group_src=first, group=axis.group)
