"""SwiGLU's product and the linear that reads it: autograd's bits, less kept for backward, and who makes the product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.mesh import Mesh
from megatron_snip.model.recompute import run_again
from megatron_snip.parallel.tensor import Region, RowParallelLinear
from megatron_snip.quant import LinearPrecision, RoundingKey, StepContext
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears.linear_op import pack

CONTEXT = StepContext(key=RoundingKey(1, 2, 0))


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_are_autograds(dtype, needs):
    generator = torch.Generator().manual_seed(1)
    gate, up, g = (torch.randn(2, 33, 70, generator=generator).mul(9).to(dtype) for _ in range(3))
    gate[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    made = [x for x in op.swiglu_gradients(g, gate, up, *needs) if x is not None]
    gate.requires_grad_(needs[0]), up.requires_grad_(needs[1])
    expected = torch.autograd.grad(plain(gate, up), [x for x in (gate, up) if x.requires_grad], g)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def kept(make: Callable[[], Tensor], weight: Tensor) -> int:
    """Bytes kept for backward, each storage once, a weight's left out."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() != weight.data_ptr() and x.dtype != torch.int64:  # a compiled block's context
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = make()
    assert y.requires_grad
    return sum(storages.values())


def linear(mesh: Mesh, precision: str, width: int) -> RowParallelLinear:
    torch.manual_seed(1)
    made = RowParallelLinear(
        "layers.0.mlp.down_proj", torch.randn(128, width), Region(mesh.tp, False), mesh.device_mesh
    )
    made.precision = LinearPrecision.parse(precision)
    return made


def tensors(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    gate, up = (torch.randn(1, tokens, width, generator=generator).mul(3).bfloat16() for _ in range(2))
    return gate.requires_grad_(), up.requires_grad_()


@pytest.mark.parametrize(("precision", "product"), [("fp8", 1 + 4 / 128), ("bf16", 2)])
def test_kept_for_backward(lone_mesh, precision, product):
    """gate and up, and what down_proj's wgrad reads: codes and scales, or in bf16 the product itself."""
    tokens, width = 128, 256
    down, (gate, up) = linear(lone_mesh, precision, width), tensors(tokens, width)
    ours, compiled, before = (
        kept(make, down.weight)
        for make in (
            lambda: down(gate, CONTEXT, up),
            lambda: down(gate, pack(CONTEXT), up),
            lambda: down(plain(gate, up), CONTEXT),
        )
    )
    assert ours == compiled == tokens * width * (2 + 2 + product)
    assert before == tokens * width * (2 + 2 + 2 + product)


@pytest.mark.parametrize("precision", ["fp8", "fp4", "bf16", "fp8/bf16/bf16", "bf16/fp4/fp8", "nvfp4_plain", "nvfp4"])
def test_a_linear_of_the_product_has_the_bits_of_both_apart(lone_mesh, precision):
    down, (gate, up) = linear(lone_mesh, precision, 256), tensors(128, 256)
    g = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    for leaves in ((gate, up, down.weight), (up,), (down.weight,)):
        made = []
        for y in (down(gate, CONTEXT, up), down(gate, pack(CONTEXT), up), down(plain(gate, up), CONTEXT)):
            made.append([y, *torch.autograd.grad(y, leaves, g)])
        assert all(torch.equal(one, results[0]) for results in zip(*made, strict=True) for one in results)


def test_the_product_is_stored_where_somebody_looks(lone_mesh):
    """A probe's observer sees the linear's own input, and the bits are the same."""
    down, (gate, up) = linear(lone_mesh, "fp8", 256), tensors(128, 256)
    seen: list[Tensor] = []
    without = down(gate, CONTEXT, up)
    observer = lambda operands: seen.append(operands.x)  # noqa: E731
    y = down(gate, dataclasses.replace(CONTEXT, observers={down.name: observer}), up)
    y.backward(torch.ones_like(y))
    assert torch.equal(seen[0], plain(gate, up).flatten(0, 1)) and torch.equal(y, without)


def test_recomputation_casts_for_wgrad_once(lone_mesh, monkeypatch):
    down, (gate, up) = linear(lone_mesh, "fp8", 256), tensors(128, 256)
    forms: list[int] = []
    run = op.run
    monkeypatch.setattr(op, "run", lambda x, wanted, amax, dtype, count, up: (
        up is not None and forms.append(len(wanted)), run(x, wanted, amax, dtype, count, up))[1])  # fmt: skip
    y = run_again(down, gate, CONTEXT, up, region=down.region)
    assert forms == [1]
    y.backward(torch.ones_like(y))
    assert forms == [1, 2]
