"""The layer from the residual stream to logits, and to the loss without holding them.

Shapes: B sequences, S tokens, T = B * S, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.model.build import Build
from megatron_snip.parallel.loss import Share, output_loss
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import local, make_parameter
from megatron_snip.quant.linears.matmul import float32_is_faster


class OutputLayer(nn.Module):
    """The output weight [V, H], or a copy of a tied embedding.  tp splits its rows."""

    weight: nn.Parameter
    gathers_in_backward = False  # the loss makes its gradients in forward

    def __init__(self, build: Build, shape: tuple[int, int], *, tied: bool = False) -> None:
        super().__init__()
        self.axis = build.region.axis
        parameter = make_parameter(build.empty(*shape), 0, build.region.axis, build.mesh.device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding" if tied else "output", 0))

    def forward(self, x: Tensor, labels: Tensor | None = None, share: Share | None = None) -> Any:
        """x [B, S, H] -> logits [B, S, V/tp] in the compute dtype.

        With labels [T] and share, x [T, H] -> share [] and losses [T] of `output_loss`.  FSDP gathers the weight
        only for a call of the module, so both go through here.
        """
        if labels is None or share is None:
            return logits_of(x, local(self.weight))
        return output_loss(x, local(self.weight), labels, share, self.axis)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., H] by weight [V/tp, H]: [..., V/tp]."""
    weight = weight.to(x.dtype)
    if float32_is_faster(x):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)
