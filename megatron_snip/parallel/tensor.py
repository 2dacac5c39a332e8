"""Tensor parallelism: Megatron's column- and row-parallel linears and the vocabulary-parallel embedding.

    column-parallel  Y = X W^T, W [N,K] split along N: each rank has all of X and a part of Y
    row-parallel     Y = X W^T, W [N,K] split along K: each rank has a part of X; the Ys are summed
    sequence parallel: outside these layers activations [B, S, H] are split along the tokens

Each rank has a tp-th of a microbatch's B S tokens, contiguous in memory, as [B, S/tp, H].  With one sequence, these are
the same tokens as Megatron's.  With several, this layout saves the collectives a copy; layers outside the region treat
each token separately.
`Region.enter` and `Region.leave` are Megatron's f and g.  As in Megatron, activations are reduced in the compute dtype.
Source: Megatron-LM, arXiv 1909.08053 and 2205.05198.
Shapes: B sequences, S tokens of a sequence, T = B * S tokens, K input and N output channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_snip.formats import get_format
from megatron_snip.mesh import Axis
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.quant import LINEAR_IMPLS, Casts, LinearCall, LinearPrecision, RoundingKey, StepContext, name_stream
from megatron_snip.quant.casts.cast import Form, Operand, swiglu_product
from megatron_snip.quant.casts.codes import Sent
from megatron_snip.quant.linears import linear_op
from megatron_snip.quant.linears.collectives import start_gather, start_sum
from megatron_snip.quant.linears.group import Group, run_group


class _Crossing(torch.autograd.Function):
    """Entering a region gathers, and sums the gradient; leaving it sums, and gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, into: bool) -> Tensor:
        ctx.region, ctx.into = region, into
        return region._gather(x) if into else region._sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.region._sum(grads[0]) if ctx.into else ctx.region._gather(grads[0]), None, None


@dataclass
class Region:
    """The part of a block whose activations are split over tp.

    tp_cp: the ranks that together have a microbatch's activations; None: tp alone.
    forward_only: whether the current forward runs again before its backward.  watch: that of each `Group` of linears.
    """

    axis: Axis
    sequence_parallel: bool
    tp_cp: Axis | None = None
    forward_only: bool = False
    watch: Callable[[Sequence[Tensor], Group, Sequence[Operand]], None] | None = None

    @contextmanager
    def run_again_later(self) -> Iterator[None]:
        """A context in which forward casts nothing for wgrad, because its activations are dropped."""
        self.forward_only = True
        try:
            yield
        finally:
            self.forward_only = False

    def enter(self, x: Tensor) -> Tensor:
        """[B, S/tp or S, H] -> the whole [B, S, H] on every rank; the gradient is summed over them."""
        return x if self.axis.size == 1 else _Crossing.apply(x, self, True)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums [B, S, H] -> their sum, [B, S/tp or S, H]."""
        return x if self.axis.size == 1 else _Crossing.apply(x, self, False)

    def _gather(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x.view_as(x)
        rows = x.contiguous().flatten(0, 1)
        return start_gather(rows, self.axis, async_op=False)().unflatten(0, (len(x), -1))

    def _sum(self, x: Tensor) -> Tensor:
        rows = x.contiguous() if self.sequence_parallel else x.clone(memory_format=torch.contiguous_format)
        rows = rows.flatten(0, 1)
        return start_sum(rows, self.axis, scatter=self.sequence_parallel, async_op=False)().unflatten(0, (len(x), -1))


def make_parameter(full: Tensor, dim: int | None, axis: Axis, device_mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of global shape `full` [...], split along `dim` over tp (None: the same on each rank).

    With tp > 1 it is a DTensor, so that FSDP2 and checkpoints see its global shape.  Only the shard moves to the mesh's
    device.  A parameter on meta stays there until FSDP2 has sharded it further.
    """
    device = "meta" if full.is_meta else device_mesh.device_type
    if axis.size == 1:
        return nn.Parameter(full.to(device))
    # a clone, because a view would keep the whole
    local = (full if dim is None else full.chunk(axis.size, dim)[axis.rank].clone()).contiguous().to(device)
    placement = Replicate() if dim is None else Shard(dim)
    device_mesh = device_mesh["tp"]
    return nn.Parameter(DTensor.from_local(local, device_mesh, [placement], run_check=False))


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, but the gradient gets the parameter's strides and placements.

    Computing them in each backward would take the host longer than a linear's GEMMs take.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return DTensor(grad.contiguous(), copy(ctx.spec), requires_grad=False)


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank computes with, a plain tensor of the shard's shape [...]."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()  # the compiler knows this one
    return _Local.apply(parameter)


class _ParallelLinear(nn.Module):
    """A quantisable linear without bias; `precision` and `impl` may change between steps.

    `weight_casts` keeps the weight's casts until the end of the pipeline's pass (`drop_weight_casts`).  It is None if
    FSDP frees the weight after each use: every use then casts it again.
    """

    weight: nn.Parameter  # [N, K], this rank's part
    split_dim: int  # of the weight, over tp: the input's columns are split if it is 1, the output's if it is 0

    def __init__(self, name: str, weight: Tensor, region: Region, device_mesh: DeviceMesh) -> None:
        super().__init__()
        self.name, self.region, axis, dim = name, region, region.axis, self.split_dim
        self._whole = region.tp_cp or axis
        self.out_features, self.in_features = weight.shape
        add_parameter(self, "weight", make_parameter(weight, dim, axis, device_mesh), Tags("linear", dim))
        self.precision = LinearPrecision.uniform("bf16")
        self.impl = "emulated"
        self.weight_casts: Casts | None = Casts()
        self.codes: Mapping[Form, Sent] = {}  # of the weight, if they were gathered in its place (code_gather.py)
        shards = {"weight", "input" if dim else "grad_output"} if axis.size > 1 else set()
        if self._whole.size > axis.size:  # cp cuts sequences
            shards |= {"input", "grad_output"}
        self._reduce_amax = dict.fromkeys(sorted(shards), self.whole_amax)
        self._stream = name_stream(name)
        shape, offsets = list(weight.shape), [0, 0]
        shape[dim] //= axis.size
        offsets[dim] = axis.rank * shape[dim]
        self._outputs, self._inputs = shape  # of this rank
        self._output_col0, self._input_col0 = offsets
        #: The group's axis, and the number of ranks that each have a part of the input's rows.
        self._axis = axis if dim == 0 and axis.size > 1 else None
        self.parts = axis.size if dim == 0 and region.sequence_parallel else 1
        self.handle = linear_op.handle_of(self)

    @property
    def precision(self) -> LinearPrecision:
        """One format for each GEMM."""
        return self._precision

    @precision.setter
    def precision(self, precision: LinearPrecision) -> None:
        self._precision = precision
        recast = ("wgrad", "input") in precision.sources
        # all that a compiled block needs to know
        self.keeps_input = not (recast or get_format(precision.wgrad).quantised)

    def whole_amax(self, amax: Tensor) -> Tensor:
        """Largest magnitudes of shards [...], which may be overwritten -> those of the whole tensors, float32.

        Always reduces over both tp and cp.  If only one of them cuts a tensor, the amax is the same along the other.
        """
        amax = amax.contiguous()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._whole.group)
        return amax

    def linear_call(self, context: StepContext) -> LinearCall:
        """Everything about a call, but for its backends."""
        key = context.key
        assert key is not None, "a stage gives each microbatch its key"
        own = RoundingKey(key.seed, key.iteration, self._stream, key.row0, key.col0, key.rows)
        return LinearCall(
            context.precision or self._precision, own, self._input_col0, self._output_col0,
            context.observers.get(self.name) if context.observers else None,
            self.weight_casts, self._reduce_amax, self.region.forward_only, self.codes,
        )  # fmt: skip

    def group(self, linears: Sequence[_ParallelLinear], context: StepContext, device: torch.device, rows: int) -> Group:
        """The `Group` of linears that read one input, this one first.  rows: the input's rows on this rank."""
        calls = []
        for linear in linears:
            call, implementation = linear.linear_call(context), LINEAR_IMPLS[linear.impl]
            backends = implementation.backends(call, device, rows * self.parts, linear._inputs, linear._outputs)
            calls.append(call.on(backends))
        return Group(calls, self._axis, self.parts > 1, self.whole_amax, self.region.watch)

    def forward(self, x: Tensor, context: StepContext | Tensor, up: Tensor | None = None) -> Tensor:
        """x [B, S/tp or S, K] -> [B, S, N/tp] if columns are split; x [B, S, K/tp] -> [B, S/tp or S, N] if rows are.

        up: of x's shape; the linear reads silu(x) * up.
        """
        (y,) = linears_of_one_input([self], x, context, up)
        return self.region.leave(y) if self.split_dim == 1 else y

    def kept_of_weight(self) -> list[Tensor]:
        """Tensors made of the weight that live for a whole step."""
        return [] if self.weight_casts is None else LINEAR_IMPLS[self.impl].kept_of_weight(self.weight_casts)

    def extra_repr(self) -> str:
        """Shape, split and present precision, for `print(model)`."""
        return f"{self.name}, {self.in_features} -> {self.out_features}, precision={self.precision}"


class ColumnParallelLinear(_ParallelLinear):
    """Output channels split over tp; enters the region.  Linears of one x run together: `linears_of_one_input`."""

    split_dim = 0


class RowParallelLinear(_ParallelLinear):
    """Input channels split over tp; leaves the region."""

    split_dim = 1


def linears_of_one_input(
    linears: Sequence[_ParallelLinear], x: Tensor, context: StepContext | Tensor, up: Tensor | None = None
) -> Sequence[Tensor]:
    """x [B, S/tp or S, K] -> [B, S, N/tp] of each linear; they enter the region, or x is within it.

    up: of x's shape; the linears read silu(x) * up.  A compiled block's context is a tensor (`pack`).
    If an implementation runs all three GEMMs of a linear itself, the linears run one after another.
    """
    first, ws, inputs = linears[0], [local(linear.weight) for linear in linears], [x] if up is None else [x, up]
    if isinstance(context, Tensor):
        ys = linear_op.linears([one.flatten(0, 1) for one in inputs], ws, linears, context)
        return [y.unflatten(0, (len(x), -1)) for y in ys]
    group = first.group(linears, context, x.device, x.shape[0] * x.shape[1])
    if all(call.backends for call in group.calls):
        return run_group(inputs, ws, group)
    x = x if up is None else swiglu_product(x, up)
    x = first.region.enter(x) if first.split_dim == 0 else x
    calls = zip(linears, ws, group.calls, strict=True)
    return [LINEAR_IMPLS[one.impl](x, w, call) for one, w, call in calls]


def drop_weight_casts(modules: Iterable[nn.Module]) -> None:
    """Forget casts of all parallel linears' weights in `modules`."""
    for module in modules:
        for linear in module.modules():
            if isinstance(linear, _ParallelLinear) and linear.weight_casts is not None:
                linear.weight_casts.clear()


class _Lookup(torch.autograd.Function):
    """F.embedding whose gradient is added up in float32 and then rounded, as CUDA's kernel does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (tokens,), (grad,) = ctx.saved_tensors, grads
        total = torch.zeros(ctx.shape, device=grad.device)
        return total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).float()).to(grad.dtype), None


def adds_in_bf16(weight: Tensor) -> bool:
    """Whether F.embedding adds up the gradient of weight [V, H] in BF16, where a frequent token's stops growing."""
    return weight.is_cpu


class VocabParallelEmbedding(nn.Module):
    """The embedding table [V, H], its rows split over tp."""

    weight: nn.Parameter
    gathers_in_backward = False  # its gradient needs only tokens

    def __init__(self, weight: Tensor, region: Region, device_mesh: DeviceMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.region, self.dtype = region, dtype
        parameter = make_parameter(weight, 0, region.axis, device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding", 0))
        self._rows = weight.shape[0] // region.axis.size
        self._stored_in_bf16 = weight.dtype is torch.bfloat16

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] int64 -> [B, S/tp or S, H] in the compute dtype."""
        weight = local(self.weight)
        if self.region.axis.size == 1:
            return self._look_up(tokens, weight).to(self.dtype)
        row = tokens - self.region.axis.rank * self._rows
        elsewhere = (row < 0) | (row >= self._rows)
        x = self._look_up(row.masked_fill(elsewhere, 0), weight).to(self.dtype)
        return self.region.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def _look_up(self, tokens: Tensor, weight: Tensor) -> Tensor:
        if self._stored_in_bf16 and adds_in_bf16(weight):
            return _Lookup.apply(weight, tokens)
        return F.embedding(tokens, weight)
