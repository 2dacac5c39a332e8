"""The device mesh, with axes (pp, replicate, shard, tp).  Only this module makes process groups.

tp is innermost, as in Megatron-LM, so that ranks that communicate most are neighbours.  "axis" is an axis of the mesh,
"dim" a dim of a tensor.  dp splits batches, and cp splits the tokens of a sequence.  Ranks along dp x cp, which equals
replicate x shard, have the same weights.  Weights and optimiser state are sharded over `shard`, whose inner part is cp,
and replicated over `replicate`.
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
# public since torch 2.15, where the old name warns
set_timeout: Any = getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, from this rank's view."""

    size: int
    rank: int
    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first on the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last on the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run as [pp, replicate, shard, tp]; the two in the middle are dp x cp.

    dp has different samples, cp different tokens of the same samples.  dp_cp is both, and tp_cp shares a sample.
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
    #: First and last pp ranks if both hold the embedding of a tied model; None on other ranks.
    embedding: Axis | None = None

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for a thread whose collectives must not mix with training's.

        Every rank must call it.
        """
        return dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """Wait for all ranks.  Every rank must call it."""
        dist.barrier(self.world)

    def gathered(self, value: Made) -> list[Made]:
        """Each rank's value, by rank.  Every rank must call it."""
        everyone = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyone, value, group=self.world)
        return everyone

    def first_problem(self, problem: str) -> tuple[int, str]:
        """The first rank that has a problem, and the problem; (0, "") if none has.  Every rank must call it."""
        return next(((rank, each) for rank, each in enumerate(self.gathered(problem)) if each), (0, ""))

    def in_turn(self, first: bool, work: Callable[[], Made]) -> Made:
        """Run ``work()`` on the ``first`` ranks, one per node, and then on the others.  Every rank must call it.

        The others poll the store without a time limit, since a collective would time out.  The watch handles ranks that
        die meanwhile.
        """
        everyone = self.gathered(first)
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
        self.barrier()  # all waiting ranks have seen the keys
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
    """The mesh over the started process group.  Every rank must call it; pp * dp * cp * tp is the world size.

    replicate: how many of the dp x cp ranks hold the same weights; a divisor or multiple of dp.  tied: the output layer
    is the embedding.
    A collective on one of its axes that exceeds the time-out ends the run.
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
        # the mesh creates its groups with torch's default time-out, not the world's
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
    """Axes that are parts or products of the mesh's own; `whole` [pp, dp, cp, tp] holds all ranks.

    Every rank must call it.  Equal axes share a group, except cp, so that attention never waits for weights.
    """
    made: dict[str, Axis] = {}
    for name, dims in (("dp_cp", (1, 2)), ("dp", (1,)), ("cp", (2,)), ("tp_cp", (2, 3))):
        known = [*axes.values(), *made.values()]
        made[name] = _axis(whole, dims, [axis for axis in known if name != "cp" or axis.size == 1])
    return made


def _axis(whole: torch.Tensor, dims: tuple[int, ...], known: list[Axis]) -> Axis:
    """The axis over some dims of `whole` [pp, dp, cp, tp], with a new group unless a known axis has the same ranks."""
    others = [dim for dim in range(whole.dim()) if dim not in dims]
    rows = whole.permute(*others, *dims).flatten(len(others)).flatten(0, len(others) - 1).tolist()
    row = next(row for row in rows if dist.get_rank() in row)
    for axis in known:
        if dist.get_process_group_ranks(axis.group) == row:
            return axis
    group, _ = dist.new_subgroups_by_enumeration(rows)
    return Axis(len(row), row.index(dist.get_rank()), group)


def _ends(pp: Axis, device_mesh: DeviceMesh) -> Axis | None:
    """The first and last ranks of a pipeline; None on other ranks.  Every rank must call it."""
    if pp.size == 2:
        return pp
    group, _ = dist.new_subgroups_by_enumeration(device_mesh.mesh.flatten(1)[[0, -1]].T.tolist())  # [dp * tp, 2]
    return Axis(2, int(pp.is_last), group) if pp.is_first or pp.is_last else None


def _connect(axis: Axis, device_type: str, *, pairs: bool) -> None:
    """Make NCCL create the communicators of an axis now, in the same order on all ranks.

    Otherwise the first use creates them in mid-step: a pipeline's first batched sends and receives that of the axis,
    and the first single send that of a pair.  There, both ranks wait for others that may be waiting too.
    """
    if axis.size == 1 or dist.get_backend(axis.group) == "fake":
        return
    one = torch.ones(1, device=device_type)
    dist.all_reduce(one, group=axis.group)
    for first in range(axis.size) if pairs else ():
        second = (first + 1) % axis.size  # interleaved stages connect the last rank to the first
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
