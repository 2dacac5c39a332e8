"""Parallel layers given equal X, W and G are the whole layer: rule 2(a) of docs/architecture.md.

Codes, scales and random bits of each shard equal the slice of the whole bit for bit; outputs and gradients agree
to 1e-6 of the largest value, in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from megatron_snip.quant import LinearPrecision, RoundingKey, linear, quantize
from megatron_snip.quant.rounding import random_bits
from tests.dist.harness import run_ranks

TP = 2
B, S, K, N, V = 2, 256, 512, 256, 96  # sequences, tokens, channels in and out, vocabulary
PRECISIONS = ("bf16", "fp8", "fp4", "fp4/fp8/fp4", "fp8/fp4/bf16", "bf16/fp4/fp8")
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
    """Codes, scales and random bits of every operand that a linear quantises, in the order of its GEMMs."""

    def __init__(self) -> None:
        self.operands: list[dict[str, Any]] = []
        self.real = linear.fake_quantize

    def __call__(self, x: Tensor, fmt: Any, *, role: str, dim: int, key: RoundingKey | None) -> Tensor:
        got = quantize(x, fmt, role=role, dim=dim, key=key)
        bits = random_bits(key, *x.shape) if key is not None and role in fmt.stochastic_roles else None
        self.operands.append(
            {"role": role, "dim": dim, "format": fmt.name, "codes": got.codes, "scales": got.scales, "bits": bits}
        )
        return self.real(x, fmt, role=role, dim=dim, key=key)


def run_linear(kind: str, precision: str, sequence_parallel: bool) -> dict[str, Any]:
    """One linear forward and backward on this rank: y, dX, dW (all as this rank holds them) and its operands."""
    mesh = start_mesh()
    region = Region(mesh.tp, sequence_parallel)
    x, w, g = draw(B, S, K, seed=1), draw(N, K, seed=2) / 16, draw(B, S, N, seed=3)
    layer = KINDS[kind]("layers.3.mlp.up_proj", w, region, mesh.device_mesh, KEY.seed)
    layer.precision = LinearPrecision.parse(precision)
    outside = (lambda t: part(t, 1, mesh)) if sequence_parallel else (lambda t: t.clone())
    x = outside(x) if kind == "column" else part(x, 2, mesh)
    g = part(g, 2, mesh) if kind == "column" else outside(g)
    x.requires_grad_()
    recorder = Recorder()
    linear.fake_quantize = recorder
    try:
        y = layer(region.enter(x) if kind == "column" else x, KEY)
        y.backward(g)
    finally:
        linear.fake_quantize = recorder.real
    return {"y": y.detach(), "dx": x.grad, "dw": local(layer.weight.grad), "operands": recorder.operands}


@functools.cache
def results(kind: str, precision: str, sequence_parallel: bool, world: int) -> list[dict[str, Any]]:
    return all_linears(world)[kind, precision, sequence_parallel]


def run_all() -> dict[tuple, dict[str, Any]]:
    """Every case in one start of the ranks."""
    cases = [(kind, p, sp) for kind in KINDS for p in PRECISIONS for sp in (False, True)]
    return {case: run_linear(*case) for case in cases}


@functools.cache
def all_linears(world: int) -> dict[tuple, list[dict[str, Any]]]:
    ranks = run_ranks(run_all, world)
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert expected.abs().max() > 0 and (got - expected).abs().max() <= 1e-6 * expected.abs().max()


CASES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])


@CASES
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_one_processs(kind, precision, sequence_parallel):
    (whole,) = results(kind, precision, sequence_parallel, 1)
    ranks = results(kind, precision, sequence_parallel, TP)
    split = {"column": {"y": 2, "dw": 0}, "row": {"dx": 2, "dw": 1}}[kind]
    shared = {"column": "dx", "row": "y"}[kind]  # outside the region: cut along the sequence, or the same on all
    for name, dim in split.items():
        assert_close(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    if sequence_parallel:
        assert_close(torch.cat([rank[shared] for rank in ranks], 1), whole[shared])
    else:
        for rank in ranks:
            assert_close(rank[shared], whole[shared])


#: kind -> role -> dim of the operand [rows, columns] that tp cuts; None where every rank holds the whole.
CUT = {
    "column": {"input": None, "weight": 0, "grad_output": 1},
    "row": {"input": 1, "weight": 1, "grad_output": None},
}


@CASES
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_operands_are_slices_bit_for_bit(kind, precision, sequence_parallel):
    (whole,) = results(kind, precision, sequence_parallel, 1)
    formats = precision.split("/") * (3 if "/" not in precision else 1)
    assert len(whole["operands"]) == 2 * sum(fmt != "bf16" for fmt in formats)
    stochastic = 0
    for rank in results(kind, precision, sequence_parallel, TP):
        assert len(rank["operands"]) == len(whole["operands"])
    for i, expected in enumerate(whole["operands"]):
        shards = [rank["operands"][i] for rank in results(kind, precision, sequence_parallel, TP)]
        dim = CUT[kind][expected["role"]]
        for name in ("codes", "scales", "bits"):
            if expected[name] is None:
                assert name == "bits" and all(shard[name] is None for shard in shards)
                continue
            stochastic += name == "bits"
            for shard in shards if dim is None else [{name: torch.cat([shard[name] for shard in shards], dim)}]:
                assert torch.equal(shard[name], expected[name]), (i, expected["role"], name)
    backward = formats[1:]
    assert stochastic == backward.count("fp4"), "output gradients in FP4 round stochastically"


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


@pytest.mark.parametrize("world", [1, TP, 3])
@CASES
def test_vocabulary_is_torchs(world, sequence_parallel):
    if sequence_parallel and S % world:
        sequence_parallel = False
    ranks = run_ranks(run_vocabulary, world, sequence_parallel)
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(4))
    table, logits = draw(V, K, seed=5).requires_grad_(), (4 * draw(B * S, V, seed=8)).requires_grad_()
    x = F.embedding(tokens, table)
    x.backward(draw(B, S, K, seed=6))
    losses = F.cross_entropy(logits, tokens.flatten(), reduction="none")
    losses.backward(draw(B * S, seed=9))
    got = torch.cat([rank["x"] for rank in ranks], 1) if sequence_parallel else ranks[0]["x"]
    assert torch.equal(got, x.detach())
    assert_close(torch.cat([rank["table"] for rank in ranks]), table.grad)
    assert_close(torch.cat([rank["logits"] for rank in ranks], 1), logits.grad)
    for rank in ranks:
        assert_close(rank["loss"], losses.detach())


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


def test_norm_gradients_are_summed_over_tp():
    ranks = run_ranks(run_norm_gradients, TP)
    for seed, name in enumerate(["input_layernorm.weight", "norm.weight"]):
        expected = sum(draw(6, seed=10 * seed + rank) for rank in range(TP))
        for rank in ranks:
            assert torch.equal(rank[name], expected)
    for rank in range(TP):
        assert torch.equal(ranks[rank]["up_proj.weight"], draw(2, 2, seed=20 + rank)), "a split weight is left alone"
