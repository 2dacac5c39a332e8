"""Allocations, communication, FLOPs and launches of a stretch of a run, op by op, on fake or real tensors.

A storage counts from the op that creates it until its last tensor dies, including FSDP2's resizes.  Its kind may be
known only later (a tensor is a gradient because the optimiser takes it), so allocations are logged and the peak is
computed afterwards.  torch's own MemTracker determines kinds with module hooks, which pipelines and recomputation
confuse, and does not know casts or what FSDP2 gathers.

    parameters   weights, and the rotary tables
    gradients    whole ones and their shards
    optimiser    Adam's moments
    gathered     whole parameters and buffers of FSDP2's collectives
    casts        codes, scales and dequantised operands
    activations  everything else that forward creates
    temporaries  everything else that backward creates: gradients of activations, recomputed activations

Convention: bytes of a collective are those that a rank passes in; for a recv, those that it receives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.mesh import AXES, Mesh
from megatron_snip.model import offload
from megatron_snip.quant.casts.cast import Form, form_of
from megatron_snip.quant.kernels import op

KINDS = ("parameters", "gradients", "optimiser", "gathered", "activations", "casts", "temporaries")
#: What is not on the device: copies that blocks keep (`model.offload`), and states of `train.host_states`.
HOST = "host"
#: c10d's collectives -> (name here, index of the input argument, index of the group argument).
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "_allgather_base_": ("all-gather", 1, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
}
#: aten ops that launch nothing, besides views, which have a marked schema.
_SILENT = (
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view",
    "_local_scalar_dense",
)  # fmt: skip
_DTYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8 (E5M2)",
}  # fmt: skip
_ELEMENTS = {(2, 1): "fp4", (2, 3): "fp6", (3, 2): "fp6", (4, 3): "fp8", (5, 2): "fp8 (E5M2)"}

#: Counts by ("launch", op), ("flops",), ("gemm", M, N, K, formats), ("read",), and for collectives
#: ("count", axis, collective) and ("bytes", axis, collective).
Counts = Counter[tuple[str | int, ...]]


@dataclass(frozen=True)
class Stretch:
    """One iteration or probe of one rank: bytes by kind at the peak, and its `Counts`.

    kept: bytes per microbatch that a block's forward keeps for its backward, before any of them leave for the host.
    host: bytes on the host at most.
    """

    name: str
    peak: dict[str, int]
    counts: Counts
    kept: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank.

    parameters: its elements.  stored: bytes of its shards of weights, gradients and optimiser state at an update, on
    the device.
    """

    rank: int
    stage: int
    parameters: int
    stretches: tuple[Stretch, ...]
    stored: int

    @property
    def worst(self) -> Stretch:
        """The stretch with the highest peak."""
        return max(self.stretches, key=lambda stretch: stretch.total)


class _Storage:
    """A storage's current bytes, its kind, the format of its values, and its copies that were fetched from the host."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind, self.fmt = size, kind, ""
        self.fetched: list[_Storage] = []
        self.alive: Any = None  # the weak reference that reports its end


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Memory:
    """Live storages, and a log of their changes.  granule: bytes that the allocator rounds up to."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.live: dict[int, _Storage] = {}
        self.log: list[tuple[_Storage, int]] = []

    def begin(self) -> None:
        """Restart the log from the live storages."""
        self.log = [(storage, storage.size) for storage in self.live.values()]

    def add(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Register the storages of these tensors unless they are known."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live and tensor.device.type != "meta":
                self._add(storage, kind)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        address, entry = storage._cdata, _Storage(self._rounded(storage), kind)

        def end(_: Any) -> None:
            self.log.append((entry, -entry.size))
            entry.size = 0
            del self.live[address]

        entry.alive = weakref.ref(storage, end)
        self.live[address] = entry
        self.log.append((entry, entry.size))

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.granule) * self.granule

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record a storage's new size.  FSDP2 resizes the whole parameters that it gathers."""
        entry = self.live.get(storage._cdata)
        if entry is not None:
            before, entry.size, entry.kind = entry.size, self._rounded(storage), "gathered"
            self.log.append((entry, entry.size - before))

    def is_on_host(self, tensor: Tensor) -> None:
        """Take this storage off the device; pinned memory comes in powers of two."""
        entry = self.live[tensor.untyped_storage()._cdata]
        entry.kind, before = HOST, entry.size
        entry.size = pinned(entry.size, self.granule)
        self.log.append((entry, entry.size - before))

    def of(self, tensor: Tensor) -> _Storage | None:
        """The record of a tensor's storage, [...]."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these storages, retroactively."""
        for tensor in tensors:
            if (entry := self.of(tensor)) is not None:
                entry.kind = kind

    def of_forward(self, but: Iterable[Tensor]) -> int:
        """Live bytes made by forwards, except those of some tensors."""
        left_out = {id(self.of(tensor)) for tensor in but}
        made = (entry for entry in self.live.values() if entry.kind in ("activations", "casts"))
        return sum(entry.size for entry in made if id(entry) not in left_out)

    def peak(self) -> dict[str, int]:
        """Bytes of the device by kind at its peak since `begin`."""
        changes = self.changes()
        moment = int(np.argmax(np.cumsum(changes))) if changes else 0
        kinds = dict.fromkeys((*KINDS, HOST), 0)
        for entry, change in self.log[: moment + 1]:
            kinds[entry.kind] += change
        del kinds[HOST]
        return kinds

    def changes(self) -> list[int]:
        """The log's changes of the device's bytes."""
        return [0 if entry.kind == HOST else change for entry, change in self.log]

    def host_peak(self) -> int:
        """Bytes on the host at most since `begin`."""
        return max(accumulate((change for entry, change in self.log if entry.kind == HOST), initial=0))


def pinned(size: int, granule: int) -> int:
    """Bytes that page-locked memory of this size takes; all of it on CPUs, where nothing is page-locked."""
    return size if granule == 1 or not size else 1 << (size - 1).bit_length()


class Tracker(TorchDispatchMode):
    """Sees every op inside a `with` block.  Host reads of fake tensors give 0.0, 1 or True, as if all went well."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.memory = Memory(granule)
        self.counts: Counts = Counter()
        self.laps: list[Counts] = []
        self.has_host = False  # whether some tensors are of the kind HOST
        self._axes: dict[str, str] = {}
        self._resize = torch.UntypedStorage.resize_
        self._to_host, self._to_device = offload.to_host, offload.to_device
        self._shape_of = ShardingPropagator._propagate_tensor_meta_non_cached
        self._propagates = False

    def name_axes(self, mesh: Mesh) -> None:
        """Map process groups to axes of the mesh."""
        self._axes = {mesh.world.group_name: "world"}
        self._axes |= {getattr(mesh, axis).group.group_name: axis for axis in AXES}
        self._axes |= {axis.group.group_name: "dp" for axis in (mesh.replicate, mesh.shard)}
        self._axes |= {mesh.embedding.group.group_name: "pp"} if mesh.embedding is not None else {}

    def begin(self) -> None:
        """Reset the counts; allocations stay."""
        self.counts, self.laps = Counter(), []
        self.memory.begin()

    def lap(self) -> None:
        """Save a copy of the current counts."""
        self.laps.append(self.counts.copy())

    def __enter__(self) -> Tracker:
        plain, memory = self._resize, self.memory

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            made = plain(storage, size)
            memory.resized(storage)
            return made

        shape_of = self._shape_of

        def uncounted(*args: Any) -> Any:
            self._propagates = True
            try:
                return shape_of(*args)
            finally:
                self._propagates = False

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        offload.to_host, offload.to_device = self._sent, self._fetched  # type: ignore[misc]
        # DTensor finds the shape of an op's result once, by the op on fake tensors of the whole shape
        ShardingPropagator._propagate_tensor_meta_non_cached = uncounted  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        offload.to_host, offload.to_device = self._to_host, self._to_device
        ShardingPropagator._propagate_tensor_meta_non_cached = self._shape_of  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._propagates:
            return func(*args, **kwargs)
        fake = FakeTensor in types
        if fake and func is torch.ops.prim.device.default:
            return args[0].fake_device  # the most frequent call
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the ops of its local tensor follow
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts["read",] += 1
            if fake:
                return 0.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if not fake and _is_of_a_mesh(func, args):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        if func.is_view or space in ("prim", "profiler"):
            return
        outs = list(_tensors([out]))
        if space == "c10d":
            self._count_collective(name, args)
            return
        self.memory.add(outs, "activations" if torch._C._current_graph_task_id() == -1 else "temporaries")
        if self.has_host and any((at := self.memory.of(one)) and at.kind == HOST for one in _tensors(args)):
            return
        if space == "megatron_snip":
            self._label_casts(name, args, outs)
        elif space == "fsdp" and name.startswith("chunk_cat"):  # gradients before their reduction
            self.memory.mark(_tensors(args), "gradients")
        elif space == "fsdp":  # buffers of its collectives
            self.memory.mark([*outs, *_tensors([kwargs.get("out")])], "gathered")
        elif name == "clone" and (source := self.memory.of(args[0])) is not None and source.fmt:
            self._is_as(outs[0], source)  # codes in another layout
        elif name == "mm" or name.startswith("_scaled_mm"):
            self._count_gemm(args[0], args[1])
        elif name.startswith("_scaled_dot_product"):
            self._count_attention(name, args)
        if (space != "aten" or name not in _SILENT) and (outs or name != "cast"):
            self.counts["launch", name] += 1

    def _count_collective(self, name: str, args: Any) -> None:
        kind, handed, group = _COLLECTIVES.get(name, (name, 0, 1))
        axis = self._axes.get(dist.ProcessGroup.unbox(args[group]).group_name, "other")
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors([args[handed]]))
        received = list(_tensors([args[0]]))
        for there, here in zip(received, _tensors([args[handed]]), strict=False) if handed else ():
            if (source := self.memory.of(here)) is not None and source.fmt:
                self._is_as(there, source)  # gathered codes
        self.counts["count", axis, kind] += 1
        self.counts["bytes", axis, kind] += size

    def _is_as(self, tensor: Tensor, source: _Storage) -> None:
        if (entry := self.memory.of(tensor)) is not None:
            entry.kind, entry.fmt = source.kind, source.fmt

    def _sent(self, whole: Tensor, stream: Any, unused: offload.Unused) -> Tensor:
        made = self._to_host(whole, stream, unused)
        self.memory.is_on_host(made)
        return self._counted("to host", made)

    def _fetched(self, host: Tensor, device: torch.device, stream: Any) -> Tensor:
        made = self._to_device(host, device, stream)
        self.memory.mark([made], "activations")
        there, here = self.memory.of(host), self.memory.of(made)
        assert there is not None and here is not None
        there.fetched.append(here)
        return self._counted("from host", made)

    def _counted(self, name: str, made: Tensor) -> Tensor:
        self.counts["count", HOST, name] += 1
        self.counts["bytes", HOST, name] += made.nbytes
        return made

    def _label_casts(self, name: str, args: Any, outs: list[Tensor]) -> None:
        """Mark the outputs of casts, with their format."""
        if name not in ("cast", "dequantize", "to_send", "lay_out"):
            return
        self.memory.mark(outs, "casts")
        if name == "cast":
            forms, counted = op.forms_of(args[2], args[3]), bool(args[5])
            sizes = [1 if form.output == "values" else 2 + counted + form.scaled for form in forms]  # codes have scales
            formats = [_element(form) for form, size in zip(forms, sizes, strict=True) for _ in range(size)]
        else:  # gathered codes are not known to be codes until they are read
            source = self.memory.of(args[0])
            formats = [(source.fmt if source is not None else "") or _element(form_of(args[3]))] * len(outs)
        for tensor, fmt in zip(outs, formats, strict=True):
            if (entry := self.memory.of(tensor)) is not None:
                entry.fmt = fmt

    def _count_gemm(self, a: Tensor, b: Tensor) -> None:
        """a [M,K] by b [K,N], each with half as many columns or rows if a byte holds two elements."""
        (m, k), n = a.shape, b.shape[1]
        k *= 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
        formats = []
        for tensor in (a, b):
            entry = self.memory.of(tensor)
            formats.append((entry.fmt if entry is not None else "") or _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        self.counts["gemm", m, n, k, " x ".join(dict.fromkeys(formats))] += 1
        self.counts["flops",] += 2 * m * n * k

    def _count_attention(self, name: str, args: Any) -> None:
        """Causal: two products in forward and five in backward, the first of them recomputed."""
        query = args[1] if name.endswith("backward") else args[0]
        batch, heads, length, channels = query.shape
        products = 5 if name.endswith("backward") else 2
        self.counts["flops",] += products * batch * heads * length * length * channels


def _element(form: Form) -> str:
    element = form.element
    return _ELEMENTS.get((element.exponent_bits, element.mantissa_bits), element.name)


def _is_of_a_mesh(func: Any, args: Any) -> bool:
    """Whether an op reads only real tensors, which under fake tensors are a mesh's tables of ranks."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None or "lift_fresh" in func._schema.name:
        return False
    return next(_tensors(args), None) is not None
