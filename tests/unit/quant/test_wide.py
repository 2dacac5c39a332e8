"""The float64 backend of a float32 run's probe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, fake_quantize
from megatron_snip.quant.backend import Backends
from megatron_snip.quant.cast import Operand
from megatron_snip.quant.emulated import Emulated
from megatron_snip.quant.group import Group, run_group
from megatron_snip.quant.wide import WIDE

T, K, N = 256, 384, 128
KEY = RoundingKey(seed=1, iteration=2, stream=3)
BF16 = LinearPrecision.uniform("bf16")
LONE = Axis(1, 0, None)  # type: ignore[arg-type]


@pytest.fixture
def tensors():
    """x [T,K], w [N,K], G [T,N]"""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((T, K), (N, K), (T, N))]


def run(tensors: list[Tensor], call: LinearCall, axis: Axis | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of x and w."""
    x, w, g = (tensor.clone() for tensor in tensors)
    (y,) = run_group(x.requires_grad_(), [w.requires_grad_()], Group([call], [WIDE], axis, wide=True))
    return y.detach(), *torch.autograd.grad(y, (x, w), g.to(y.dtype))


@pytest.mark.parametrize(("axis", "dtype"), [(None, torch.float64), (LONE, torch.float32)])
def test_it_is_float64_products_of_operands_cast_in_float32(tensors, axis, dtype):
    """Of an output that tp sums, float64."""
    x, w, g = tensors
    y, dx, dw = run(tensors, LinearCall(LinearPrecision.parse("fp4/fp4/fp8"), KEY), axis)

    def q(tensor: Tensor, fmt: str, role: str, dim: int) -> Tensor:
        return fake_quantize(tensor, fmt, role=role, dim=dim, key=KEY.for_operand(role)).double()

    assert y.dtype == dtype and dx.dtype == dw.dtype == torch.float32
    expected = q(x, "fp4", "input", 1) @ q(w, "fp4", "weight", 1).T
    assert torch.equal(y, expected.to(dtype))
    expected = q(g, "fp4", "grad_output", 1) @ q(w, "fp4", "weight", 0)
    assert torch.equal(dx, expected.float())
    expected = q(g, "fp8", "grad_output", 0).T @ q(x, "fp8", "input", 0)
    assert torch.equal(dw, expected.float())


def sums(backends: Backends, gemm: str, a: Tensor, b: Tensor, dim: int, out: torch.dtype) -> tuple[Tensor, Tensor]:
    """A product whose reduction is cut in two elsewhere than a GEMM cuts by itself, and the whole one, in float32."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        operands = (Operand(None, x) for x in (a, b))
        return getattr(backends, gemm).multiply(gemm, *operands, torch.float32, out)

    pairs = zip(a.split(100, 1), b.split(100, dim), strict=True)
    first, *rest = (product(*pair) for pair in pairs)
    for part in rest:
        first = first + part
    return first.float(), product(a, b).float()


def test_cut_sums_are_the_whole_ones(tensors):
    """Along K for the output and along N for the input's gradient, which float32 does not give."""
    x, w, g = tensors
    assert torch.equal(*sums(WIDE, "fprop", x, w, 1, torch.float64))
    assert torch.equal(*sums(WIDE, "dgrad", g, w, 0, torch.float64))
    emulated = Backends(*[Emulated()] * 3)
    assert not torch.equal(*sums(emulated, "fprop", x, w, 1, torch.float32)), "or the comparison proves little"


def test_the_observer_sees_float32_and_what_the_linear_made(tensors):
    seen = []

    class Observer:
        def backward(self, operands) -> None:
            seen.append(operands)

    for axis in (None, LONE):
        _, dx, dw = run(tensors, LinearCall(BF16, KEY, observer=Observer()), axis)
        operands = seen.pop()
        for found, expected in zip((operands.x, operands.w, operands.grad_output), tensors, strict=True):
            assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert torch.equal(operands.grad_input, dx) and torch.equal(operands.grad_weight(), dw)
