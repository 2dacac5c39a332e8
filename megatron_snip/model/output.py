"""The layer from the residual stream to logits.

Shapes: B sequences, S tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.model.build import Build
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import local, make_parameter
from megatron_snip.quant.linears.matmul import float32_is_faster


class OutputLayer(nn.Module):
    """The output weight [V, H], or a copy of a tied embedding.  tp splits its rows."""

    weight: nn.Parameter

    def __init__(self, build: Build, shape: tuple[int, int], *, tied: bool = False) -> None:
        super().__init__()
        parameter = make_parameter(build.empty(*shape), 0, build.region.axis, build.mesh.device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding" if tied else "output", 0))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> logits [B, S, V/tp] in the compute dtype."""
        return logits_of(x, local(self.weight))


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., H] by weight [V/tp, H]: [..., V/tp]."""
    weight = weight.to(x.dtype)
    if float32_is_faster(x):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)
