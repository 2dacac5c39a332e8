"""Vocabulary-parallel cross entropy on one process; with several, see tests/dist/test_tensor_parallel.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_snip.parallel import loss
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy

T, V = 40, 96


def draw(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(T, V, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_torchs(dtype, scale, lone_mesh):
    logits, labels, g = draw(dtype, scale)
    losses = vocab_parallel_cross_entropy(logits, labels, lone_mesh.tp)
    assert losses.dtype == torch.float32 and losses.shape == (T,)
    (grad,) = torch.autograd.grad(losses, logits, g)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected, exact, g.double())
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance / 10)


def test_the_callers_logits_stay_as_they_are(lone_mesh):
    logits, labels, _ = draw(torch.float32, 1.0)
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, labels, lone_mesh.tp).sum().backward()
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_the_gradient_is_the_same_however_many_rows_are_done_at_a_time(rows, lone_mesh, monkeypatch):
    logits, labels, g = draw(torch.bfloat16, 3.0)
    grads = []
    for size in (T * V, rows * V + 5):
        monkeypatch.setitem(loss._CHUNK, "cpu", size)
        grads += torch.autograd.grad(vocab_parallel_cross_entropy(logits, labels, lone_mesh.tp), logits, g)
    assert torch.equal(*grads) and grads[0].count_nonzero() > T
