"""Settings for building the parts of a decoder, and their common norm.

Shapes: H hidden, D channels per head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.mesh import Mesh
from megatron_snip.model.document_ends import Documents
from megatron_snip.model.offload import Offload
from megatron_snip.model.recompute import NOTHING, Recompute
from megatron_snip.model.spec import ModelSpec, spec_of
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import ColumnParallelLinear, Region, RowParallelLinear, local, make_parameter


@dataclass(frozen=True)
class Build:
    """Settings that every part of the model is built with."""

    model: ModelConfig
    mesh: Mesh
    region: Region
    seed: int
    dtype: torch.dtype  # of computation, not of parameters
    device: torch.device
    recompute: Recompute = NOTHING
    documents: Documents | None = None  # None if document boundaries are ignored
    weight_dtype: torch.dtype = torch.float32  # of parameters
    offload: Offload | None = None  # None if no block keeps activations on the host

    def of_block(self, index: int) -> Build:
        """The settings of one block."""
        return replace(self, recompute=self.recompute.of_block(index))

    @property
    def spec(self) -> ModelSpec:
        """The kind of model."""
        return spec_of(self.model)

    def empty(self, *shape: int) -> Tensor:
        """A weight [...] without memory; `LlamaStage.allocate` allocates its shard."""
        return torch.empty(shape, device="meta", dtype=self.weight_dtype)

    def linear(self, name: str) -> ColumnParallelLinear | RowParallelLinear:
        """The parallel linear of this name."""
        linear = self.spec.linear_of(name)
        return linear.module(name, self.empty(*linear.size(self.model)), self.region, self.mesh.device_mesh)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; computed in float32.  Source: arXiv 1910.07467."""

    weight: nn.Parameter

    def __init__(self, build: Build, *, of_heads: bool = False) -> None:
        """of_heads: norm over the channels of each local head instead of the residual stream."""
        super().__init__()
        self.epsilon = build.model.norm_epsilon
        channels = build.model.head_dim if of_heads else build.model.hidden_size
        parameter = make_parameter(build.empty(channels), None, build.region.axis, build.mesh.device_mesh)
        tags = Tags("norm", None, "always" if of_heads else "sequence_parallel", weight_decay=False)
        add_parameter(self, "weight", parameter, tags)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H], or [..., D] of heads -> the same shape."""
        weight = local(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.epsilon)
