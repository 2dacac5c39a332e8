"""The layer from the residual stream to logits.

Shapes: B sequences, S tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.model.build import Build
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import Region, local, make_parameter
from megatron_snip.quant import LinearCall, LinearPrecision
from megatron_snip.quant.group import Group, run_group
from megatron_snip.quant.matmul import float32_is_faster
from megatron_snip.quant.wide import WIDE


class OutputLayer(nn.Module):
    """The output weight [V, H], or a copy of a tied embedding.  tp splits its rows."""

    weight: nn.Parameter

    def __init__(self, build: Build, shape: tuple[int, int], *, tied: bool = False) -> None:
        super().__init__()
        parameter = make_parameter(build.empty(*shape), 0, build.region.axis, build.mesh.device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding" if tied else "output", 0))

    def forward(self, x: Tensor, *, entering: Region | None = None) -> Tensor:
        """x [B, S, H], or [T, H] -> logits [..., V/tp] in the compute dtype; entering: as ``logits_of`` has it."""
        return logits_of(x, local(self.weight), entering=entering)


def logits_of(x: Tensor, weight: Tensor, *, entering: Region | None = None) -> Tensor:
    """x [..., H] by weight [V/tp, H]: [..., V/tp].

    entering: in a wide pass, the region that x [t, H] is yet to enter; logits are of all its tokens, [T, V/tp].
    """
    if entering is not None:
        call = LinearCall(LinearPrecision.uniform("bf16"), key=None)
        group = Group([call], [WIDE], entering.axis, entering.gathers, wide=True)
        return run_group(x, [weight], group)[0]
    weight = weight.to(x.dtype)
    if float32_is_faster(x):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)
