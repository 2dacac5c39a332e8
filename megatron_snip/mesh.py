"""The mesh of processes, axes (pp, replicate, shard, tp): the only maker of process groups.

tp is innermost, so that the processes which talk most are neighbours, as in Megatron-LM; "axis" is an axis
of the mesh, "dim" a dim of a tensor.  Batches are dealt out over dp, which is replicate x shard; weights and the
optimiser's state are sharded over `shard` and the same along `replicate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _set_pg_timeout

AXES = ("pp", "dp", "tp")
Made = TypeVar("Made")
_MESH = ("pp", "replicate", "shard", "tp")


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
    """The processes of a run, laid out as [pp, replicate, shard, tp]; dp is the two in the middle."""

    device_mesh: DeviceMesh
    pp: Axis
    dp: Axis
    tp: Axis
    replicate: Axis
    shard: Axis
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

    def in_turn(self, first: bool, work: Callable[[], Made]) -> Made:
        """``work()`` on the ``first`` processes, one a node, and then on the others; every process calls it.

        The others wait as long as it takes: they look into the store, since a collective would time out.  Processes
        that end meanwhile are the watch's affair.
        """
        everyone = [False] * self.world_size
        dist.all_gather_object(everyone, first, group=self.world)
        store = PrefixStore("in turn", _get_default_store())
        if first:
            try:
                made = work()
            finally:
                store.set(str(self.rank), "done")
        for rank, is_first in enumerate(everyone):
            while is_first and not store.check([str(rank)]):
                time.sleep(0.05)
        if not first:
            made = work()
        self.barrier()  # whoever waited has seen the keys
        if first:
            store.delete_key(str(self.rank))
        return made


def build_mesh(
    device_type: str, *, pp: int, dp: int, tp: int, replicate: int = 1, timeout_minutes: float = 10.0
) -> Mesh:
    """The mesh over the started process group; every process calls it, pp * dp * tp is the world size.

    replicate: how many of the dp processes hold the same weights, a divisor of dp.
    A collective on one of its axes that takes longer than the time-out ends the run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert pp * dp * tp == world_size, f"{pp} x {dp} x {tp} is not {world_size}"
    assert dp % replicate == 0, f"{replicate} does not divide {dp}"
    sizes = (pp, replicate, dp // replicate, tp)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_MESH)
    axes = {
        name: Axis(size, device_mesh.get_local_rank(name), device_mesh.get_group(name))
        for name, size in zip(_MESH, sizes)
    }
    axes["dp"] = _both(axes["replicate"], axes["shard"], device_mesh)
    for axis in axes.values():  # the mesh makes its groups with torch's default, whatever the world's is
        _set_pg_timeout(timedelta(minutes=timeout_minutes), axis.group)
    for name in ("pp", "dp", "tp", "replicate", "shard"):
        again = name in ("replicate", "shard") and axes[name].group is axes["dp"].group
        if not again:
            _connect(axes[name], device_type, pairs=name == "pp")
    return Mesh(device_mesh, **axes, rank=rank, world_size=world_size)


def _both(replicate: Axis, shard: Axis, device_mesh: DeviceMesh) -> Axis:
    """The axis dp: the processes that stand alike on all axes but these two; every process calls it."""
    if replicate.size == 1:
        return shard
    if shard.size == 1:
        return replicate
    rows = device_mesh.mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).tolist()  # [pp * tp, dp]
    group, _ = dist.new_subgroups_by_enumeration(rows)
    return Axis(replicate.size * shard.size, replicate.rank * shard.size + shard.rank, group)


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
