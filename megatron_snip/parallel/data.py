"""Data parallelism by FSDP2, and the gradient's norm and clipping over the whole mesh.

What is sharded over data parallel processes has Megatron-LM's names: `no_shard`, `optim` (the optimiser's state),
`optim_grads`, `optim_grads_params`.  FSDP2 shards them all, over one process under `no_shard`; a strategy says how
long it keeps weights and gradients whole.

The loss is divided by the global batch's tokens, so gradients are summed over dp and cp, never averaged.
Parameters that are whole on every tp process may have gradients of its tokens or heads alone, which are summed over
tp as their tags say.  A tied embedding lies in the first and in the last stage, from the same values on; its two
gradients are summed.  Source: Megatron-LM's finalize_model_grads.
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

from megatron_snip.mesh import Mesh
from megatron_snip.parallel.tags import Tags, tags_of
from megatron_snip.parallel.tensor import VocabParallelEmbedding


def shard_over_dp(stage: nn.Module, units: Iterable[nn.Module], mesh: Mesh, dtype: torch.dtype, strategy: str) -> None:
    """Shard a stage's FP32 parameters over dp and cp with FSDP2; compute sees them in `dtype`.

    Each unit's are gathered, and their gradients reduced, in one collective; what is in none of them with the stage.
    Gradients are reduced in float32.  With one process on dp and cp nothing is wrapped.  An embedding is a unit where
    weights are freed after use: it is gathered for forward alone.  Else a collective of its own would save nothing.
    """
    if mesh.dp_cp.size == 1:
        return
    axes = ("shard",) if mesh.replicate.size == 1 else ("replicate", "shard")
    device_mesh: DeviceMesh = mesh.device_mesh[axes]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*units, stage):
        embedding = isinstance(module, VocabParallelEmbedding)
        if embedding and keeps_weights(strategy):
            continue
        fully_shard(module, mesh=device_mesh, mp_policy=policy, reshard_after_forward=not keeps_weights(strategy))
        assert isinstance(module, FSDPModule)
        if embedding:
            module.set_unshard_in_backward(False)  # its gradient needs tokens alone
        # a sum, as the docstring says; gloo cannot divide in the collective, so the first call must precede
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def keeps_weights(strategy: str) -> bool:
    """Whether weights that were gathered stay so from the first microbatch of an iteration to its last."""
    return strategy != "optim_grads_params"


def before_backward(stage: nn.Module, strategy: str, *, last: bool) -> None:
    """Tell a stage whether a microbatch's backward is an iteration's last, and so what to reduce and to free."""
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or not keeps_weights(strategy))
    stage.set_requires_gradient_sync(last or strategy in ("optim_grads", "optim_grads_params"))
    stage.set_requires_all_reduce(last)  # over replicate, once; after the line above, which sets it too


def local_of(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient [...] that lies in this process; shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def first_element(parameter: Tensor, mesh: Mesh) -> tuple[int, int]:
    """Where the local part of a sharded matrix [R, C] begins in the whole: (row, column)."""
    first, sizes = [0, 0], list(parameter.shape)
    if isinstance(parameter, DTensor):
        by_axis = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
        if "tp" in by_axis:
            dim = by_axis["tp"].dim  # type: ignore[attr-defined]  # every matrix is split over tp
            sizes[dim] //= mesh.tp.size
            first[dim] = mesh.tp.rank * sizes[dim]
        if "shard" in by_axis:  # FSDP deals out equal chunks of rows, the last ones smaller or empty
            first[0] += min(mesh.shard.rank * -(-sizes[0] // mesh.shard.size), sizes[0])
    return first[0], first[1]


def is_copy(tags: Tags, mesh: Mesh) -> bool:
    """Whether this process holds a parameter for which another stage's counts: the tied embedding."""
    return tags.kind == "embedding" and mesh.embedding is not None and not mesh.embedding.is_first


def local_gradients(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tags, Tensor]]:
    """(name, tags, local part of the gradient) of every parameter that has one."""
    for module in modules:
        tags = tags_of(module)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield name, tags[name], local_of(parameter.grad)


@torch.no_grad()
def sum_gradients_over_tp(modules: Iterable[nn.Module], mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Sum, in one collective, the gradients of which each tp process has a part; called by all of tp."""
    grads = [grad for _, tags, grad in local_gradients(modules) if tags.is_summed(sequence_parallel)]
    if mesh.tp.size == 1 or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh.tp.group)
    torch._foreach_copy_([grad.view(-1) for grad in grads], list(flat.split([grad.numel() for grad in grads])))


@torch.no_grad()
def sum_tied_gradients(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Sum the gradients of a tied embedding over the first and the last stage; both call it after backward."""
    if mesh.embedding is None:
        return
    for _, tags, grad in local_gradients(modules):
        if tags.kind == "embedding" and grad.numel():
            dist.all_reduce(grad, group=mesh.embedding.group)


@torch.no_grad()
def gradient_square_sum(modules: Iterable[nn.Module], mesh: Mesh) -> float:
    """This process's share of the squared gradient norm; the sum over all processes is the whole.

    Squares are added in double precision, so that the cut into stages does not change the norm.
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
    if grads[0].device.type == "cpu":  # whose float32 sum of a whole matrix is off by up to 6e-3: row by row
        norms = [torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32).flatten() for grad in grads]
        return float(torch.cat(norms).double().square().sum())
    return float(torch.stack(torch._foreach_norm(grads)).double().square().sum())


@torch.no_grad()
def clip_coefficient(norm: float, largest: float) -> float:
    """What every gradient is multiplied by so that the whole has at most norm `largest`; 0 clips nothing."""
    if largest <= 0.0 or not math.isfinite(norm) or norm <= largest:
        return 1.0
    return largest / (norm + 1e-6)
