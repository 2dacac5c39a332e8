"""Output layer and vocabulary-parallel cross entropy on one process.  tests/dist/test_output_loss.py has several."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.model.output import logits_of
from megatron_snip.parallel import loss
from megatron_snip.parallel.loss import output_loss, vocab_parallel_cross_entropy
from megatron_snip.quant.kernels import triton_cast
from megatron_snip.quant.linears import matmul

T, V, H = 40, 96, 64


def draw(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(T, V, generator=generator)).to(dtype)
    return logits, torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_torchs(dtype, scale, lone_mesh):
    logits, labels, g = draw(dtype, scale)
    grad = logits.clone()
    losses = vocab_parallel_cross_entropy(grad, labels, lone_mesh.tp, g)
    assert losses.dtype == torch.float32 and losses.shape == (T,)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected, exact, g.double())
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.skipif(not triton_cast.installed(), reason="triton is not installed; pip install triton")
def test_the_kernels_agree_with_torch_in_the_interpreter():
    command = [sys.executable, "-m", "tests.unit.parallel.interpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "0 differences" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


def test_logits_without_a_scale_stay_as_they_are(lone_mesh):
    logits, labels, g = draw(torch.float32, 1.0)
    before = logits.clone()
    losses = vocab_parallel_cross_entropy(logits, labels, lone_mesh.tp)
    assert torch.equal(logits, before)
    assert torch.equal(losses, vocab_parallel_cross_entropy(before, labels, lone_mesh.tp, g))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_the_gradient_is_the_same_however_many_rows_are_done_at_a_time(rows, lone_mesh, monkeypatch):
    logits, labels, g = draw(torch.bfloat16, 3.0)
    grads = []
    for size in (T * V, rows * V + 5):
        monkeypatch.setitem(loss._SOFTMAX, "cpu", size)
        grads.append(logits.clone())
        vocab_parallel_cross_entropy(grads[-1], labels, lone_mesh.tp, g)
    assert torch.equal(*grads) and grads[0].count_nonzero() > T


@pytest.fixture(params=[8, 16, 40], ids=["5 chunks", "3 chunks, the last smaller", "1 chunk"])
def chunk(request, monkeypatch):
    """Tokens of a chunk."""
    monkeypatch.setattr(loss, "_ROWS", 8)
    monkeypatch.setattr(loss, "_LOGITS", request.param * V)
    assert loss._chunk(T, V) == request.param
    return request.param


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(T, H, generator=generator).to(dtype), 0.3 * torch.randn(V, H, generator=generator)
    labels, counts = torch.randint(V, (T,), generator=generator), torch.rand(T, generator=generator)
    return x.requires_grad_(), w.requires_grad_(), labels, counts.masked_fill(labels < 9, 0.0)


def share_of(counts: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Some tokens do not count."""
    return (losses * counts).sum() / 7


@pytest.mark.parametrize("through_float32", [False, True], ids=["as they are", "through float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_have_the_loss_and_gradients_of_torch(dtype, through_float32, chunk, lone_mesh, monkeypatch):
    monkeypatch.setattr(matmul, "_lacks_bf16", lambda: through_float32)
    x, w, labels, counts = operands(dtype)
    made, losses = output_loss(x, w, labels, functools.partial(share_of, counts), lone_mesh.tp)
    assert made.shape == () and losses.shape == (T,) and not losses.requires_grad
    grad_x, grad_w = torch.autograd.grad(made, (x, w), torch.tensor(-1.7))
    assert (grad_x.dtype, grad_w.dtype) == (dtype, torch.float32)
    exact = x.detach().double().requires_grad_(), w.detach().to(dtype).double().requires_grad_()
    expected_losses = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="none")
    expected = share_of(counts.double(), expected_losses)
    grads = torch.autograd.grad(expected, exact, torch.tensor(-1.7).double())
    tolerance = 1e-6 if dtype == torch.float32 else 3e-3
    assert abs(made.item() / expected.item() - 1) <= tolerance
    torch.testing.assert_close(losses.double(), expected_losses.detach(), rtol=10 * tolerance, atol=10 * tolerance)
    for grad, reference in zip((grad_x, grad_w), grads, strict=True):
        assert (grad - reference).abs().max() <= 10 * tolerance * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_has_the_bits_of_autograd(dtype, lone_mesh):
    x, w, labels, counts = operands(dtype)
    made, losses = output_loss(x, w, labels, functools.partial(share_of, counts), lone_mesh.tp)
    grads = torch.autograd.grad(made, (x, w))
    logits, ones = logits_of(x, w), torch.ones(T, requires_grad=True)
    (scale,) = torch.autograd.grad(share_of(counts, ones), ones)
    grad = logits.detach().clone()
    assert torch.equal(losses, vocab_parallel_cross_entropy(grad, labels, lone_mesh.tp, scale))
    for one, other in zip(grads, torch.autograd.grad(logits, (x, w), grad), strict=True):
        assert torch.equal(one, other) and one.count_nonzero() > T


class _Largest(TorchDispatchMode):
    """Records the most rows of a tensor with V columns that an op makes, other than the weight transposed."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == V and len(out) != H:
            self.rows = max(self.rows, len(out))
        return out


def test_only_a_chunk_of_logits_exists(chunk, lone_mesh):
    x, w, labels, counts = operands(torch.bfloat16)
    with _Largest() as seen:
        output_loss(x, w, labels, functools.partial(share_of, counts), lone_mesh.tp)[0].backward()
    assert seen.rows == chunk


def test_evaluation_makes_the_same_losses_and_no_gradients(chunk, lone_mesh, monkeypatch):
    x, w, labels, counts = operands(torch.bfloat16)
    share = functools.partial(share_of, counts)
    expected = output_loss(x, w, labels, share, lone_mesh.tp)
    monkeypatch.setattr(loss, "add_product", None)
    with torch.no_grad():
        found = output_loss(x, w, labels, share, lone_mesh.tp)
    assert all(map(torch.equal, found, expected)) and not found[0].requires_grad


def test_a_second_backward_is_an_error(lone_mesh):
    """The first scales the gradients in place."""
    x, w, labels, counts = operands(torch.float32)
    made, _ = output_loss(x, w, labels, functools.partial(share_of, counts), lone_mesh.tp)
    made.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()
