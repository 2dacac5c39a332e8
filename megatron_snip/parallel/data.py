"""Data parallelism with FSDP2, and the norm and clipping of gradients over the whole mesh.

Sharding strategies have Megatron-LM's names: `no_shard`, `optim` (optimiser state), `optim_grads`,
`optim_grads_params`.  FSDP2 shards everything in each case, over one rank under `no_shard`; the strategy decides how
long weights and gradients stay unsharded.

The loss is divided by the tokens of the global batch, so gradients are summed over dp and cp, never averaged.  If every
tp rank holds the whole parameter, its gradient may cover only the rank's own tokens or heads.  The parameter's tags say
whether to sum it over tp.  The first and the last stage hold equal copies of a tied embedding, and its gradients are
summed.
Source: Megatron-LM's finalize_model_grads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron_snip.mesh import Mesh
from megatron_snip.parallel.tags import Tags, tags_of
from megatron_snip.parallel.tensor import VocabParallelEmbedding


def shard_over_dp(
    stage: nn.Module,
    units: Iterable[nn.Module],
    mesh: Mesh,
    dtype: torch.dtype,
    strategy: str,
    reduce_dtype: torch.dtype = torch.float32,
    stay: Iterable[nn.Module] = (),
) -> None:
    """Shard a stage's parameters over dp and cp with FSDP2; compute uses `dtype`.

    For each unit, one collective gathers the parameters and one reduces the gradients, in `reduce_dtype`.  A rank adds
    up the gradients of microbatches in it, too; shards of gradients have the parameters' dtype.  Other parameters are
    grouped with the stage.  Without dp and cp, nothing is wrapped.  An embedding is a unit of its own if weights are
    freed after use, because then only forward gathers it.  Otherwise, its own collective would save nothing.
    `gathers_in_backward` of a unit says whether its backward needs the weights.
    stay: units whose weights stay gathered from forward to backward if weights are freed after use.
    """
    if mesh.dp_cp.size == 1:
        return
    axes = ("shard",) if mesh.replicate.size == 1 else ("replicate", "shard")
    device_mesh: DeviceMesh = mesh.device_mesh[axes]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    staying = set(stay)
    for module in (*units, stage):
        embedding = isinstance(module, VocabParallelEmbedding)
        if embedding and keeps_weights(strategy):
            continue
        reshard = not keeps_weights(strategy) and module not in staying
        fully_shard(module, mesh=device_mesh, mp_policy=policy, reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        if not getattr(module, "gathers_in_backward", True):
            module.set_unshard_in_backward(False)
        # sum, as the docstring says; gloo cannot divide in a collective, so the first call must come first
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def keeps_weights(strategy: str) -> bool:
    """Whether gathered weights stay unsharded from the first microbatch of an iteration to the last."""
    return strategy != "optim_grads_params"


def before_backward(stage: nn.Module, strategy: str, *, last: bool) -> None:
    """Tell a stage whether a microbatch is the last of its iteration, which decides what backward reduces and frees."""
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or not keeps_weights(strategy))
    stage.set_requires_gradient_sync(last or strategy in ("optim_grads", "optim_grads_params"))
    stage.set_requires_all_reduce(last)  # once over replicate; must follow the line above, which also sets it


def local_of(tensor: Tensor) -> Tensor:
    """The local shard of a parameter or gradient [...]; shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_as(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor of the layout of ``tensor`` [...] around a local shard of the same shape, on any device."""
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    if local.device.type != mesh.device_type:  # `from_local` would copy the shard to the mesh's device
        spec = DTensorSpec(mesh, placements, TensorMeta(tensor.shape, tensor.stride(), local.dtype))
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def first_element(parameter: Tensor, mesh: Mesh) -> tuple[int, int]:
    """Position (row, column) of the local shard of a matrix [R, C], or of a vector [R], in the whole."""
    first, sizes = [0, 0], list(parameter.shape)
    if isinstance(parameter, DTensor):
        by_axis = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
        if (dim := getattr(by_axis.get("tp"), "dim", None)) is not None:
            sizes[dim] //= mesh.tp.size
            first[dim] = mesh.tp.rank * sizes[dim]
        if "shard" in by_axis:  # FSDP shards by equal chunks of rows, the last ones smaller or empty
            first[0] += min(mesh.shard.rank * -(-sizes[0] // mesh.shard.size), sizes[0])
    return first[0], first[1]


def is_copy(tags: Tags, mesh: Mesh) -> bool:
    """Whether this parameter is the copy of a tied embedding, whose original is on another stage."""
    return tags.kind == "embedding" and mesh.embedding is not None and not mesh.embedding.is_first


def local_gradients(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tags, Tensor]]:
    """(name, tags, local shard of the gradient) of every parameter with a gradient."""
    for module in modules:
        tags = tags_of(module)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield name, tags[name], local_of(parameter.grad)


@torch.no_grad()
def sum_gradients_over_tp(modules: Iterable[nn.Module], mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Sum, in one collective, gradients that are partial on each tp rank.  Every tp rank must call it."""
    grads = [grad for _, tags, grad in local_gradients(modules) if tags.is_summed(sequence_parallel)]
    if mesh.tp.size == 1 or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).float()
    dist.all_reduce(flat, group=mesh.tp.group)
    torch._foreach_copy_([grad.view(-1) for grad in grads], list(flat.split([grad.numel() for grad in grads])))


@torch.no_grad()
def sum_tied_gradients(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Sum a tied embedding's gradients over the first and last stages.  Both call it after backward."""
    if mesh.embedding is None:
        return
    for _, tags, grad in local_gradients(modules):
        if tags.kind == "embedding" and grad.numel():
            dist.all_reduce(grad, group=mesh.embedding.group)


@torch.no_grad()
def gradient_square_sum(modules: Iterable[nn.Module], mesh: Mesh) -> float:
    """This rank's share of the squared gradient norm; all ranks' shares add up to the whole.

    Squares are added in double precision, so that the norm does not depend on the stages.
    """
    grads = [
        grad
        for _, tags, grad in local_gradients(modules)
        if grad.numel()
        and mesh.replicate.is_first
        and (mesh.tp.is_first or not tags.replicated)
        and not is_copy(tags, mesh)
    ]
    if not grads:
        return 0.0
    if grads[0].device.type == "cpu":  # its float32 sum of a whole matrix is off by up to 6e-3, so go row by row
        norms = [torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32).flatten() for grad in grads]
        return float(torch.cat(norms).double().square().sum())
    return float(torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).double().square().sum())


@torch.no_grad()
def clip_coefficient(norm: float, largest: float) -> float:
    """The factor that clips gradients to a total norm of `largest`; 0 disables clipping."""
    if largest <= 0.0 or not math.isfinite(norm) or norm <= largest:
        return 1.0
    return largest / (norm + 1e-6)
