"""Rotary positions: the bits of autograd through the plain formula; the kernel's are in Triton's interpreter's test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_snip.model.rotary import rotate


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_autograds(dtype):
    """Of part of the tokens, as context parallelism has them, with zeros of both signs and what is not finite."""
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(2, 9, 3, 8, generator=generator).to(dtype).transpose(1, 2)[:, :, 1:8] for _ in range(2))
    x[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    g[1], g[0, 0] = -0.0, 0.0
    angles = torch.randn(2, 1, 9, 8, generator=generator)
    table = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    for chosen in (angles[..., 1:8, :], angles[0, 0, 1:8]):
        cos, sin = chosen.cos().to(table), chosen.sin().to(table)
        made = []
        for function in (rotate, plain):
            leaf = x.clone().requires_grad_()
            y = function(leaf, cos, sin)
            made.append([y, torch.autograd.grad(y, leaf, g)[0]])
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())
