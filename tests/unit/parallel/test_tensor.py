"""Parallel layers on one process, where they are plain ones; with several, see tests/dist/test_tensor_parallel.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
    make_parameter,
)
from megatron_snip.quant import LinearPrecision, RoundingKey, StepContext, name_stream, quantized_linear
from megatron_snip.quant.kernels import op

CONTEXT = StepContext(key=RoundingKey(seed=7, iteration=5, stream=0, row0=256))
NAME = "layers.3.mlp.up_proj"


@pytest.fixture
def region(lone_mesh):
    return Region(lone_mesh.tp, sequence_parallel=False)


def test_a_region_of_one_is_nothing(region):
    x = torch.ones(1, 2, 3)
    assert region.enter(x) is x and region.leave(x) is x


def test_a_parameter_of_one_is_plain(lone_mesh):
    weight = torch.ones(4, 2)
    parameter = make_parameter(weight, 0, lone_mesh.tp, lone_mesh.device_mesh)
    assert type(parameter) is torch.nn.Parameter and local(parameter) is parameter


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("precision", ["bf16", "fp4/fp8/fp4"])
def test_a_linear_is_the_quantised_one_of_its_name(kind, precision, region, lone_mesh):
    generator = torch.Generator().manual_seed(0)
    w, x, g = (torch.randn(*shape, generator=generator) for shape in ((64, 32), (2, 128, 32), (2, 128, 64)))
    layer = kind(NAME, w, region, lone_mesh.device_mesh)
    layer.precision = LinearPrecision.parse(precision)
    x.requires_grad_()
    y = layer(x, CONTEXT)
    flat = x.detach().flatten(0, 1).requires_grad_()
    twin = w.clone().requires_grad_()
    key = RoundingKey(7, 5, name_stream(NAME), row0=256)
    expected = quantized_linear(flat, twin, layer.precision, key=key)
    assert torch.equal(y.flatten(0, 1), expected)
    got = torch.autograd.grad(y, (x, layer.weight), g)
    wanted = torch.autograd.grad(expected, (flat, twin), g.flatten(0, 1))
    assert torch.equal(got[0].flatten(0, 1), wanted[0]) and torch.equal(got[1], wanted[1])


def test_linears_of_one_input_are_one_step_of_autograd(region, lone_mesh):
    """As under tensor parallelism, whose tests compare its bits with those of one linear after another."""
    x = torch.ones(1, 4, 32, requires_grad=True)
    layers = [ColumnParallelLinear(name, torch.ones(64, 32), region, lone_mesh.device_mesh) for name in ("a", "b")]
    steps = [y.grad_fn for y in linears_of_one_input(layers, x, CONTEXT)]
    assert steps[0] is steps[1] and "Linears" in type(steps[0]).__name__


def test_their_input_is_cast_once_two_forms_of_a_format_after_each_other(region, lone_mesh, monkeypatch):
    """For a kernel writes two forms in one launch."""
    seen, run = [], op.run
    monkeypatch.setattr(op, "run", lambda x, forms, *rest: seen.append(forms) or run(x, forms, *rest))
    layers = [ColumnParallelLinear(str(i), torch.ones(128, 128), region, lone_mesh.device_mesh) for i in range(3)]
    for layer, precision in zip(layers, ("fp4", "fp8", "fp4"), strict=True):
        layer.precision = LinearPrecision.uniform(precision)
    linears_of_one_input(layers, torch.ones(1, 128, 128), CONTEXT)
    (inputs,) = [forms for forms in seen if forms[0].role == "input"]
    assert [(form.fmt.name, form.dim) for form in inputs] == [("fp4", 1), ("fp4", 0), ("fp8", 1), ("fp8", 0)]


def test_a_linear_tells_its_shape_and_precision(region, lone_mesh):
    layer = ColumnParallelLinear(NAME, torch.ones(64, 32), region, lone_mesh.device_mesh)
    assert repr(layer) == f"ColumnParallelLinear({NAME}, 32 -> 64, precision=bf16)"
    layer.precision = LinearPrecision.parse("fp4/fp8/fp4")
    assert "precision=fp4/fp8/fp4" in repr(layer)


def test_compute_in_bf16_leaves_the_weight_in_float32(region, lone_mesh):
    layer = ColumnParallelLinear(NAME, torch.randn(64, 32), region, lone_mesh.device_mesh)
    y = layer(torch.randn(1, 4, 32, dtype=torch.bfloat16), CONTEXT)
    assert y.dtype == torch.bfloat16 and layer.weight.dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_the_embedding_is_torchs(region, lone_mesh):
    table = torch.randn(16, 8)
    tokens = torch.tensor([[3, 0, 15], [3, 3, 7]])
    layer = VocabParallelEmbedding(table.clone(), region, lone_mesh.device_mesh, torch.bfloat16)
    got = layer(tokens)
    assert torch.equal(got, F.embedding(tokens, table).bfloat16())
    got.backward(torch.ones_like(got))
    assert layer.weight.grad[3].eq(3).all() and layer.weight.grad[1].eq(0).all()
