"""SwiGLU's product: autograd's bits, and less kept for backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.parallel.tensor import Region, RowParallelLinear
from megatron_snip.quant import LinearPrecision, RoundingKey
from megatron_snip.quant.swiglu import swiglu


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_bits_are_autograds(dtype, needs):
    generator = torch.Generator().manual_seed(1)
    gate, up, g = (torch.randn(2, 33, 70, generator=generator).mul(9).to(dtype) for _ in range(3))
    gate[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    gate.requires_grad_(needs[0]), up.requires_grad_(needs[1])
    wanted = [x for x in (gate, up) if x.requires_grad]
    made, expected = (
        [y, *torch.autograd.grad(y, wanted, g)] for y in (function(gate, up) for function in (swiglu, plain))
    )
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def kept(make: Callable[[], Tensor], weight: Tensor) -> int:
    """Bytes kept for backward, each storage once, a weight's left out."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() != weight.data_ptr():
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = make()
    assert y.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(("precision", "product"), [("fp8", 1 + 4 / 128), ("bf16", 2)])
def test_kept_for_backward(lone_mesh, precision, product):
    """gate and up, and what down_proj's wgrad reads: codes and scales, or in bf16 the product itself."""
    tokens, width = 128, 256
    region = Region(lone_mesh.tp, False)
    down = RowParallelLinear("layers.0.mlp.down_proj", torch.randn(128, width), region, lone_mesh.device_mesh)
    down.precision = LinearPrecision.uniform(precision)
    gate, up = (torch.randn(1, tokens, width).bfloat16().requires_grad_() for _ in range(2))
    key = RoundingKey(1, 2, 0)
    ours, before = (kept(lambda of=of: down(of(gate, up), key), down.weight) for of in (swiglu, plain))
    assert ours == tokens * width * (2 + 2 + product)
    assert before == tokens * width * (2 + 2 + 2 + product)
