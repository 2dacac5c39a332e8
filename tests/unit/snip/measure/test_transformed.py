"""A probe of a format that transforms fprop: errors of transformed operands meet a transformed gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_snip.formats import Hadamard, get_format, register
from megatron_snip.formats import format as format_module
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape, Operands, RoundingKey, quantized_linear
from megatron_snip.quant.linears.operands import LinearCall
from megatron_snip.snip.measure.linear_probe import LinearProbe

KEY = RoundingKey(1, 2, 3)


@pytest.fixture
def rotated():
    everywhere = Hadamard("+-" * 16, frozenset(GEMMS))
    yield register(replace(get_format("mxfp4"), name="probed", hadamard=everywhere)).name
    del format_module._FORMATS["probed"]


def test_errors_per_token_are_those_of_the_output(rotated, lone_mesh):
    """By the gradient: what a probe adds up of both operands is G (Q(X) Q(W)^T - X W^T), exactly."""
    x, w, g = torch.randn(64, 96), torch.randn(32, 96), torch.randn(64, 32)
    probe = LinearProbe(LinearShape("up_proj", 32, 96, kind="up"), [rotated], lone_mesh, 0, x.device)
    shown = probe.measure(Operands(x, w, g, LinearCall(LinearPrecision.uniform("bf16"), KEY)))
    error = quantized_linear(x, w, LinearPrecision.uniform(rotated), key=KEY) - x @ w.T
    torch.testing.assert_close(shown.token_sums[rotated], (g * error).sum(dim=1), rtol=1e-3, atol=1e-3)
    assert (error.norm() / (x @ w.T).norm()) > 0.05
