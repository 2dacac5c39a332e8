"""The layer from the residual stream to logits.

Shapes: B sequences, S tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.model.build import Build
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import local, make_parameter
from megatron_snip.quant import LinearCall, LinearPrecision, wide_linear
from megatron_snip.quant.matmul import float32_is_faster


class OutputLayer(nn.Module):
    """The output weight [V, H], or a copy of a tied embedding.  tp splits its rows."""

    weight: nn.Parameter

    def __init__(self, build: Build, shape: tuple[int, int], *, tied: bool = False) -> None:
        super().__init__()
        parameter = make_parameter(build.empty(*shape), 0, build.region.axis, build.mesh.device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding" if tied else "output", 0))

    def forward(self, x: Tensor, *, wide: bool) -> Tensor:
        """x [B, S, H] or [T, H] -> logits [..., V/tp] in the compute dtype.  A wide pass takes [T, H]."""
        return logits_of(x, local(self.weight), wide=wide)


def logits_of(x: Tensor, weight: Tensor, *, wide: bool) -> Tensor:
    """x [..., H] times weight [V/tp, H] -> [..., V/tp].  wide: x is [T, H], and each sum rounds to float32 once."""
    if not wide:
        weight = weight.to(x.dtype)
        if float32_is_faster(x):
            return F.linear(x.float(), weight.float()).to(x.dtype)
        return F.linear(x, weight)
    call = LinearCall(LinearPrecision.uniform("bf16"), key=None)
    return wide_linear(x, weight, call, torch.float32)
