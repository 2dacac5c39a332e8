"""Products in BF16 are those of float32 sums, rounded once, whichever instructions the CPU has."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.model.output import logits_of
from megatron_snip.quant.linears import matmul


@pytest.fixture(params=[False, True], ids=["as they are", "through float32"])
def through_float32(request, monkeypatch):
    monkeypatch.setattr(matmul, "_lacks_bf16", lambda: request.param)
    return request.param


def nearly_all_equal(made: torch.Tensor, exact: torch.Tensor) -> bool:
    """Equal to the exact values rounded once, but for a hundredth that a float32 sum rounds to a neighbour."""
    expected = exact.bfloat16()
    near = (made.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * exact.abs().max()
    return bool(near.all()) and float((made == expected).double().mean()) > 0.99


def test_sums_are_rounded_once(through_float32):
    torch.manual_seed(1)
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(96, 512).bfloat16()
    assert matmul.float32_is_faster(a) == through_float32 and not matmul.float32_is_faster(a.float())
    made = matmul.matmul(a, b.T)
    assert made.dtype == torch.bfloat16 and nearly_all_equal(made, a.double() @ b.double().T)


def test_logits_and_their_gradients(through_float32):
    torch.manual_seed(1)
    x, w, g = torch.randn(2, 64, 128).bfloat16(), torch.randn(256, 128), torch.randn(2, 64, 256).bfloat16()
    leaves = x.requires_grad_(), w.requires_grad_()
    made = logits_of(*leaves)
    grad_x, grad_w = torch.autograd.grad(made, leaves, g)
    assert (made.dtype, grad_x.dtype, grad_w.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    x, w, g = x.detach().double(), w.detach().bfloat16().double(), g.double()
    assert nearly_all_equal(made, x @ w.T) and nearly_all_equal(grad_x, g @ w)
    assert nearly_all_equal(grad_w.bfloat16(), g.flatten(0, 1).T @ x.flatten(0, 1))
    assert torch.equal(grad_w.bfloat16().float(), grad_w), "rounded to BF16 before it is a float32 gradient"


def test_the_cpu_is_asked(monkeypatch):
    for lacks, found in (
        (True, {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}),
        (False, {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}),
        (False, {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}),
        (False, {"architecture": "aarch64"}),
        (False, {"architecture": "x86_64", "avx512_f": True}),  # does not tell
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert matmul._lacks_bf16.__wrapped__() == lacks
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not matmul._lacks_bf16.__wrapped__(), "PyTorch 2.11 may not tell"
