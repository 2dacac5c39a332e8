"""What every linear implementation is relied on for."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.quant import LINEAR_IMPLS, LinearPrecision, check_linear
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.operands import LinearCall


@pytest.mark.parametrize("impl", list(LINEAR_IMPLS))
def test_bf16_is_a_plain_product_whose_operands_probes_see(impl):
    """Of a master weight in float32, as training runs them, and of sequences; a probe that sees nothing fails."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 128, 64, generator=random).bfloat16().requires_grad_()
    w = torch.randn(96, 64, generator=random).requires_grad_()
    cotangent = torch.randn(2, 128, 96, generator=random).bfloat16()
    precision, shown = LinearPrecision.uniform("bf16"), []
    check_linear(impl, precision, x.device)
    y = LINEAR_IMPLS[impl](x, w, LinearCall(precision, None, observer=shown.append))
    y.backward(cotangent)
    got = y.detach(), x.grad, w.grad
    x.grad = w.grad = None
    expected = x @ w.bfloat16().T
    expected.backward(cotangent)
    for one, other in zip(got, (expected.detach(), x.grad, w.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
    (operands,) = shown
    assert torch.equal(operands.x, x.detach().flatten(0, 1)) and torch.equal(operands.w, w.detach().bfloat16())
    assert torch.equal(operands.grad_output, cotangent.flatten(0, 1))


def test_batches_of_many_lengths_keep_no_more_memory():
    """The batches of somebody's own loop may all differ in their number of tokens."""
    one, call = ByGemm(Emulated()), LinearCall(LinearPrecision.uniform("fp8"), None)
    for tokens in range(1, 6000):
        assert one.backends(call, torch.device("cpu"), tokens, 64, 64)
    assert one._chosen.cache_info().currsize < 5000
