"""The mesh of processes, axes (pp, replicate, shard, tp): the only maker of process groups.

tp is innermost, so that the processes which talk most are neighbours, as in Megatron-LM; "axis" is an axis
of the mesh, "dim" a dim of a tensor.  Batches are dealt out over dp and the tokens of a sequence over cp; dp x cp,
which is replicate x shard, sees the same weights.  They and the optimiser's state are sharded over `shard`, whose inner
part is cp, and the same along `replicate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

AXES = ("dp_cp", "tp_cp", "pp", "dp", "tp", "cp")
Made = TypeVar("Made")
_MESH = ("pp", "replicate", "shard", "tp")
# torch 2.15 made it public, and its old name warns there
set_timeout: Any = getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)


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
    """The processes of a run, laid out as [pp, replicate, shard, tp]; dp x cp is the two in the middle.

    dp has different samples, cp different tokens of the same ones, dp_cp is both and tp_cp what one sample is cut over.
    """

    device_mesh: DeviceMesh
    pp: Axis
    dp: Axis
    cp: Axis
    dp_cp: Axis
    tp: Axis
    tp_cp: Axis
    replicate: Axis
    shard: Axis
    rank: int
    world_size: int
    #: The first and the last process of pp where both hold the embedding of a tied model; None elsewhere.
    embedding: Axis | None = None

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
    device_type: str,
    *,
    pp: int,
    dp: int,
    tp: int,
    cp: int = 1,
    replicate: int = 1,
    tied: bool = False,
    timeout_minutes: float = 10.0,
) -> Mesh:
    """The mesh over the started process group; every process calls it, pp * dp * cp * tp is the world size.

    replicate: how many of the dp x cp processes hold the same weights; it or dp divides the other.  tied: the output
    layer is the embedding.
    A collective on one of its axes that takes longer than the time-out ends the run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert pp * dp * cp * tp == world_size, f"{pp} x {dp} x {cp} x {tp} is not {world_size}"
    assert dp * cp % replicate == 0, f"{replicate} does not divide {dp * cp}"
    sizes = (pp, replicate, dp * cp // replicate, tp)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_MESH)
    axes = {
        name: Axis(size, device_mesh.get_local_rank(name), device_mesh.get_group(name))
        for name, size in zip(_MESH, sizes)
    }
    axes |= _more_axes(axes, device_mesh.mesh.view(pp, dp, cp, tp))
    embedding = _ends(axes["pp"], device_mesh) if tied and pp > 1 else None
    for axis in (*axes.values(), *([embedding] if embedding else [])):
        # the mesh makes its groups with torch's default, whatever the world's is
        set_timeout(timedelta(minutes=timeout_minutes), axis.group)
    connected: list[dist.ProcessGroup] = []
    for name in ("pp", "dp_cp", "tp", "replicate", "shard", "dp", "cp", "tp_cp"):
        if not any(axes[name].group is group for group in connected):
            connected.append(axes[name].group)
            _connect(axes[name], device_type, pairs=name == "pp")
    if embedding is not None and embedding.group is not axes["pp"].group:
        _connect(embedding, device_type, pairs=False)
    return Mesh(device_mesh, **axes, rank=rank, world_size=world_size, embedding=embedding)


def _more_axes(axes: dict[str, Axis], whole: torch.Tensor) -> dict[str, Axis]:
    """The axes that are parts or products of the mesh's own; `whole` [pp, dp, cp, tp] holds all ranks.

    Every process calls it.  Axes of the same processes share a group, but for cp: attention need not wait for weights.
    """
    made: dict[str, Axis] = {}
    for name, dims in (("dp_cp", (1, 2)), ("dp", (1,)), ("cp", (2,)), ("tp_cp", (2, 3))):
        known = [*axes.values(), *made.values()]
        made[name] = _axis(whole, dims, [axis for axis in known if name != "cp" or axis.size == 1])
    return made


def _axis(whole: torch.Tensor, dims: tuple[int, ...], known: list[Axis]) -> Axis:
    """The axis of some dims of `whole` [pp, dp, cp, tp], on a group of its own where no known axis is the same."""
    others = [dim for dim in range(whole.dim()) if dim not in dims]
    rows = whole.permute(*others, *dims).flatten(len(others)).flatten(0, len(others) - 1).tolist()
    row = next(row for row in rows if dist.get_rank() in row)
    for axis in known:
        if dist.get_process_group_ranks(axis.group) == row:
            return axis
    group, _ = dist.new_subgroups_by_enumeration(rows)
    return Axis(len(row), row.index(dist.get_rank()), group)


def _ends(pp: Axis, device_mesh: DeviceMesh) -> Axis | None:
    """The first and the last process of a pipeline, to which this one belongs or not; every process calls it."""
    if pp.size == 2:
        return pp
    group, _ = dist.new_subgroups_by_enumeration(device_mesh.mesh.flatten(1)[[0, -1]].T.tolist())  # [dp * tp, 2]
    return Axis(2, int(pp.is_last), group) if pp.is_first or pp.is_last else None


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


def data_parallel_mesh() -> Mesh:
    """All processes as data parallel ones; one alone needs no process group."""
    nobody = cast(Any, None)
    lone, size, rank = Axis(1, 0, nobody), 1, 0
    dp = lone
    if dist.is_initialized() and dist.get_world_size() > 1:
        size, rank = dist.get_world_size(), dist.get_rank()
        dp = Axis(size, rank, cast(Any, dist.group.WORLD))
    alone = dict.fromkeys(("pp", "cp", "tp", "tp_cp", "shard"), lone)
    return Mesh(nobody, dp=dp, dp_cp=dp, replicate=dp, **alone, rank=rank, world_size=size)
