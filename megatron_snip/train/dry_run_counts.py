"""What a stretch of a run allocates, sends, multiplies and launches, seen op by op, on fake tensors or on real ones.

A storage counts from the op that makes it to the end of its last tensor, with the changes of size that FSDP2 makes in
between.  Its kind may show only later (a gradient is one because the optimiser takes it), so allocations are logged and
the peak is found afterwards.  torch's own MemTracker tells kinds by module hooks, which pipelines and recomputation
confuse, and knows neither casts nor what FSDP2 gathers.

    parameters   weights, and the tables of rotary positions
    gradients    whole ones and their shards
    optimiser    Adam's moments
    gathered     whole parameters and buffers of FSDP2's collectives
    casts        codes, scales and dequantised operands
    activations  the rest of what a forward makes
    temporaries  the rest of what a backward makes: gradients of activations, and what is recomputed

Convention: bytes of a collective are those that a process hands over, of a recv those that it gets.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.mesh import AXES, Mesh
from megatron_snip.quant.kernels import op

KINDS = ("parameters", "gradients", "optimiser", "gathered", "activations", "casts", "temporaries")
#: c10d's collectives -> (name here, argument that is handed over, argument that is the group).
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "_allgather_base_": ("all-gather", 1, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
}
#: aten's ops that launch nothing, beside views, which their schema tells.
_SILENT = (
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view",
    "_local_scalar_dense",
)  # fmt: skip
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_ELEMENTS = {(2, 1): "fp4", (2, 3): "fp6", (3, 2): "fp6", (4, 3): "fp8", (5, 2): "fp8 (E5M2)"}

#: What was counted, by ("launch", op), ("flops",), ("gemm", M, N, K, formats), ("read",), and of collectives
#: ("count", axis, collective) and ("bytes", axis, collective).
Counts = Counter[tuple[str | int, ...]]


@dataclass(frozen=True)
class Stretch:
    """One iteration or probe of one process: bytes by kind at the peak, and what `Counts` says.

    kept: bytes that a block's forward leaves for its backward, of a microbatch.
    """

    name: str
    peak: dict[str, int]
    counts: Counts
    kept: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Measured:
    """What one process was seen to do; parameters counts the elements that it holds."""

    rank: int
    stage: int
    parameters: int
    stretches: tuple[Stretch, ...]

    @property
    def worst(self) -> Stretch:
        """The stretch with the highest peak."""
        return max(self.stretches, key=lambda stretch: stretch.total)


class _Storage:
    """A storage's bytes now, its kind, and the format that its values were cast to."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind, self.fmt = size, kind, ""
        self.alive: Any = None  # the weak reference that tells its end


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, those in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Memory:
    """Storages that are alive, and the log of how they came and went.  granule: what an allocator rounds up to."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.live: dict[int, _Storage] = {}
        self.log: list[tuple[_Storage, int]] = []

    def begin(self) -> None:
        """Start the log anew with what is there."""
        self.log = [(storage, storage.size) for storage in self.live.values()]

    def add(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Storages of these tensors that are not known yet come to be."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live and tensor.device.type != "meta":
                self._add(storage, kind)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        address, entry = storage._cdata, _Storage(self._rounded(storage), kind)

        def end(_: Any) -> None:
            self.log.append((entry, -entry.size))
            del self.live[address]

        entry.alive = weakref.ref(storage, end)
        self.live[address] = entry
        self.log.append((entry, entry.size))

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.granule) * self.granule

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now; FSDP2 does so with the whole parameters that it gathers."""
        entry = self.live.get(storage._cdata)
        if entry is not None:
            before, entry.size, entry.kind = entry.size, self._rounded(storage), "gathered"
            self.log.append((entry, entry.size - before))

    def of(self, tensor: Tensor) -> _Storage | None:
        """What is known of a tensor's storage, [...]."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Storages are of this kind, from their beginning."""
        for tensor in tensors:
            if (entry := self.of(tensor)) is not None:
                entry.kind = kind

    def of_forward(self, but: Iterable[Tensor]) -> int:
        """Bytes that are alive now of what forwards make, but for some tensors."""
        left_out = {id(self.of(tensor)) for tensor in but}
        made = (entry for entry in self.live.values() if entry.kind in ("activations", "casts"))
        return sum(entry.size for entry in made if id(entry) not in left_out)

    def peak(self) -> dict[str, int]:
        """Bytes by kind at the moment since `begin` that has most."""
        total = most = moment = 0
        for place, (_, change) in enumerate(self.log):
            total += change
            if total > most:
                most, moment = total, place
        kinds = dict.fromkeys(KINDS, 0)
        for entry, change in self.log[: moment + 1]:
            kinds[entry.kind] += change
        return kinds


class Tracker(TorchDispatchMode):
    """Sees every op inside a `with`; what a host reads from fake tensors is 0.0, 1 or True, as if all went well."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.memory = Memory(granule)
        self.counts: Counts = Counter()
        self.laps: list[Counts] = []
        self._axes: dict[str, str] = {}
        self._resize = torch.UntypedStorage.resize_

    def name_axes(self, mesh: Mesh) -> None:
        """Tell which groups are which axes of the mesh."""
        self._axes = {mesh.world.group_name: "world"}
        self._axes |= {getattr(mesh, axis).group.group_name: axis for axis in AXES}
        self._axes |= {axis.group.group_name: "dp" for axis in (mesh.replicate, mesh.shard)}
        self._axes |= {mesh.embedding.group.group_name: "pp"} if mesh.embedding is not None else {}

    def begin(self) -> None:
        """Forget what was counted; what is allocated stays."""
        self.counts, self.laps = Counter(), []
        self.memory.begin()

    def lap(self) -> None:
        """Keep the counts as they stand."""
        self.laps.append(self.counts.copy())

    def __enter__(self) -> Tracker:
        plain, memory = self._resize, self.memory

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            made = plain(storage, size)
            memory.resized(storage)
            return made

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = FakeTensor in types
        if fake and func is torch.ops.prim.device.default:
            return args[0].fake_device  # most of all calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor's ops come back
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
        if space == "megatron_snip":
            self._label_casts(name, args, outs)
        elif space == "fsdp" and name.startswith("chunk_cat"):  # of the gradients that are to be reduced
            self.memory.mark(_tensors(args), "gradients")
        elif space == "fsdp":  # buffers of its collectives
            self.memory.mark([*outs, *_tensors([kwargs.get("out")])], "gathered")
        elif name == "clone" and (source := self.memory.of(args[0])) is not None and source.fmt:
            self._is_as(outs[0], source)  # codes in another order
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
                self._is_as(there, source)  # codes that are gathered
        self.counts["count", axis, kind] += 1
        self.counts["bytes", axis, kind] += size

    def _is_as(self, tensor: Tensor, source: _Storage) -> None:
        if (entry := self.memory.of(tensor)) is not None:
            entry.kind, entry.fmt = source.kind, source.fmt

    def _label_casts(self, name: str, args: Any, outs: list[Tensor]) -> None:
        """Say of what casts give that they do, and in which format."""
        if name not in ("cast", "dequantize"):
            return
        self.memory.mark(outs, "casts")
        if name == "dequantize":
            source = self.memory.of(args[0])
            formats = ["" if source is None else source.fmt]
        else:
            (forms, outputs), counted = op._forms(args[2]), bool(args[4])
            sizes = [  # codes come with scales
                1 if output == "values" else 2 + counted + form.fmt.needs_tensor_amax
                for form, output in zip(forms, outputs, strict=True)
            ]
            names = [_ELEMENTS.get((f.element.exponent_bits, f.element.mantissa_bits), f.element.name) for f in forms]
            formats = [fmt for fmt, size in zip(names, sizes, strict=True) for _ in range(size)]
        for tensor, fmt in zip(outs, formats, strict=True):
            if (entry := self.memory.of(tensor)) is not None:
                entry.fmt = fmt

    def _count_gemm(self, a: Tensor, b: Tensor) -> None:
        """a [M,K] by b [K,N], both with half as many columns or rows where two elements are in a byte."""
        (m, k), n = a.shape, b.shape[1]
        k *= 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
        formats = []
        for tensor in (a, b):
            entry = self.memory.of(tensor)
            formats.append((entry.fmt if entry is not None else "") or _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        self.counts["gemm", m, n, k, " x ".join(dict.fromkeys(formats))] += 1
        self.counts["flops",] += 2 * m * n * k

    def _count_attention(self, name: str, args: Any) -> None:
        """Causal: two products forward; backward five, of which the first is made anew."""
        query = args[1] if name.endswith("backward") else args[0]
        batch, heads, length, channels = query.shape
        products = 5 if name.endswith("backward") else 2
        self.counts["flops",] += products * batch * heads * length * length * channels


def _is_of_a_mesh(func: Any, args: Any) -> bool:
    """Whether an op reads real tensors alone, which under fake tensors are the tables of ranks of a mesh."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None or "lift_fresh" in func._schema.name:
        return False
    return next(_tensors(args), None) is not None
