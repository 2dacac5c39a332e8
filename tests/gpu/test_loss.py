"""Cross entropy on a GPU: its kernels against torch's operators in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_snip.mesh import Axis
from megatron_snip.parallel import loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128256), (130, 32001), (7, 100)], ids=str)
def test_losses_and_gradients_are_torchs(shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    logits = (3 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    labels = torch.randint(shape[1], shape[:1], generator=generator, device="cuda")
    scale = torch.rand(shape[0], generator=generator, device="cuda")
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (gradient,) = torch.autograd.grad(expected, exact, scale.double())
    assert loss.fused(logits)
    lone = Axis(1, 0, None)  # type: ignore[arg-type]
    alone = loss.vocab_parallel_cross_entropy(logits, labels, lone)
    losses = loss.vocab_parallel_cross_entropy(logits, labels, lone, scale)
    assert torch.equal(alone, losses)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=2e-6)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=1e-9)
