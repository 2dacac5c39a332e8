"""The float64 linear of a float32 run's probe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, fake_quantize, quantized_linear, wide_linear

T, K, N = 256, 384, 128
KEY = RoundingKey(seed=1, iteration=2, stream=3)
BF16 = LinearPrecision.uniform("bf16")


@pytest.fixture
def tensors():
    """x [T,K], w [N,K], G [T,N]"""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((T, K), (N, K), (T, N))]


def run(function, x: Tensor, w: Tensor, g: Tensor, *args, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of x and w."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = function(x, w, *args, **options)
    return y.detach(), *torch.autograd.grad(y, (x, w), g.to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_float64_products_of_operands_cast_in_float32(tensors, dtype):
    x, w, g = tensors
    y, dx, dw = run(wide_linear, x.to(dtype), w, g, LinearCall(LinearPrecision.parse("fp4/fp4/fp8"), KEY), dtype)

    def q(tensor: Tensor, fmt: str, role: str, dim: int) -> Tensor:
        return fake_quantize(tensor, fmt, role=role, dim=dim, key=KEY.for_operand(role)).double()

    assert y.dtype == dx.dtype == dtype and dw.dtype == torch.float32
    expected = q(x, "fp4", "input", 1) @ q(w, "fp4", "weight", 1).T
    assert torch.equal(y, expected.to(dtype))
    expected = q(g, "fp4", "grad_output", 1) @ q(w, "fp4", "weight", 0)
    assert torch.equal(dx, expected.to(dtype))
    expected = q(g, "fp8", "grad_output", 0).T @ q(x, "fp8", "input", 0)
    assert torch.equal(dw, expected.float())


def test_cut_sums_are_the_whole_ones(tensors):
    """Along K for the output and along N for the input's gradient, which float32 does not give."""
    x, w, g = tensors
    call = LinearCall(BF16, KEY)

    def outputs(function, *args, **options) -> tuple[Tensor, Tensor]:
        cuts = (slice(100), slice(100, K))  # elsewhere than a GEMM cuts by itself
        parts = [run(function, x[:, cut], w[:, cut], g, *args, **options)[0] for cut in cuts]
        return (parts[0] + parts[1]).float(), run(function, x, w, g, *args, **options)[0].float()

    def input_gradients() -> tuple[Tensor, Tensor]:
        cuts = (slice(N // 2), slice(N // 2, N))
        parts = [run(wide_linear, x.double(), w[cut], g[:, cut], call, torch.float32)[1] for cut in cuts]
        return (parts[0] + parts[1]).float(), run(wide_linear, x.double(), w, g, call, torch.float32)[1].float()

    assert torch.equal(*outputs(wide_linear, call, torch.float64))
    assert torch.equal(*input_gradients())
    assert not torch.equal(*outputs(quantized_linear, BF16, key=KEY)), "or the comparison proves little"


def test_the_observer_sees_float32_and_what_the_linear_made(tensors):
    x, w, g = tensors
    seen = []

    class Observer:
        def backward(self, operands) -> None:
            seen.append(operands)

    _, dx, dw = run(wide_linear, x.double(), w, g, LinearCall(BF16, KEY, observer=Observer()), torch.float32)
    (operands,) = seen
    for found, expected in ((operands.x, x), (operands.w, w), (operands.grad_output, g)):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert torch.equal(operands.grad_input, dx.float()) and torch.equal(operands.grad_weight(), dw)
