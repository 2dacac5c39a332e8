"""What the tensor parallel tests run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Mesh, build_mesh
from megatron_snip.parallel.data import sum_norm_gradients_over_tp
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    VocabParallelEmbedding,
    local,
    make_parameter,
)
from megatron_snip.quant import LinearPrecision, RoundingKey, operands
from megatron_snip.quant.rounding import random_bits

B, S, K, N, V = 2, 256, 512, 256, 96  # sequences, tokens, channels in and out, vocabulary
PRECISIONS = ("bf16", "fp8", "fp4", "fp4/fp8/fp4", "fp8/fp4/bf16", "bf16/fp4/fp8", "mxfp8", "nvfp4")
KEY = RoundingKey(seed=7, iteration=5, stream=0, row0=3 * S)
KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start_mesh() -> Mesh:
    return build_mesh("cpu", pp=1, dp=1, tp=dist.get_world_size())


def part(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """This process's part of what all hold."""
    return x.chunk(mesh.tp.size, dim)[mesh.tp.rank].clone()


class Recorder:
    """Codes, scales and random bits of every operand that a linear quantises, in the order of the casts."""

    def __init__(self) -> None:
        self.operands: list[dict[str, Any]] = []
        self.real = operands.cast

    def __call__(self, x: Tensor, forms: Any, outputs: Any, amax: Any, reduce_amax: Any, **more: Any) -> list[Any]:
        once = list(dict.fromkeys(forms))  # codes and values of one form may come from one read
        codes = self.real(x, once, ["codes"] * len(once), amax, reduce_amax, **more)
        for form, made in zip(once, codes, strict=True):
            self.operands.append(
                {
                    "role": form.role,
                    "codes": made.values,
                    "scales": made.scales,
                    "bits": None if form.key is None else random_bits(form.key, *x.shape),
                }
            )
        return self.real(x, forms, outputs, amax, reduce_amax, **more)


def run_linear(kind: str, precision: str, sequence_parallel: bool) -> dict[str, Any]:
    """One linear forward and backward on this rank: y, dX, dW (all as this rank holds them) and its operands."""
    mesh = start_mesh()
    region = Region(mesh.tp, sequence_parallel)
    x, w, g = draw(B, S, K, seed=1), draw(N, K, seed=2) / 16, draw(B, S, N, seed=3)
    layer = KINDS[kind]("layers.3.mlp.up_proj", w, region, mesh.device_mesh)
    layer.precision = LinearPrecision.parse(precision)
    outside = (lambda t: part(t, 1, mesh)) if sequence_parallel else (lambda t: t.clone())
    x = outside(x) if kind == "column" else part(x, 2, mesh)
    g = part(g, 2, mesh) if kind == "column" else outside(g)
    x.requires_grad_()
    recorder = Recorder()
    operands.cast = recorder
    try:
        y = layer(region.enter(x) if kind == "column" else x, KEY)
        y.backward(g)
    finally:
        operands.cast = recorder.real
    return {"y": y.detach(), "dx": x.grad, "dw": local(layer.weight.grad), "operands": recorder.operands}


def run_all() -> dict[tuple, dict[str, Any]]:
    """Every case in one start of the ranks."""
    cases = [(kind, p, sp) for kind in KINDS for p in PRECISIONS for sp in (False, True)]
    return {case: run_linear(*case) for case in cases}


def run_vocabulary(sequence_parallel: bool) -> dict[str, Tensor]:
    """Embedding and cross entropy on this rank, with the gradients of table and logits."""
    mesh = start_mesh()
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(4))
    table = VocabParallelEmbedding(
        draw(V, K, seed=5), Region(mesh.tp, sequence_parallel), mesh.device_mesh, torch.float32
    )
    x = table(tokens)
    g = draw(B, S, K, seed=6)
    x.backward(part(g, 1, mesh) if sequence_parallel else g)
    logits = part(4 * draw(B * S, V, seed=8), 1, mesh).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, tokens.flatten(), mesh.tp)
    losses.backward(draw(B * S, seed=9))
    return {
        "x": x.detach(), "table": local(table.weight.grad), "loss": losses.detach(), "logits": logits.grad,
    }  # fmt: skip


def run_norm_gradients() -> dict[str, Tensor]:
    """Gradients of two norms and one linear, as each rank's own share of the tokens gave them, then summed."""
    mesh = start_mesh()
    module = torch.nn.Module()
    module.input_layernorm, module.norm, module.up_proj = (torch.nn.Module() for _ in range(3))
    for seed, (child, dim) in enumerate([("input_layernorm", None), ("norm", None), ("up_proj", 0)]):
        weight = make_parameter(torch.ones(4, 2) if dim == 0 else torch.ones(6), dim, mesh.tp, mesh.device_mesh)
        getattr(module, child).weight = weight
        gradient = draw(*local(weight).shape, seed=10 * seed + mesh.tp.rank)
        weight.grad = weight.detach().clone()
        local(weight.grad).copy_(gradient)
    sum_norm_gradients_over_tp([module], mesh)
    return {name: local(p.grad).clone() for name, p in module.named_parameters()}
