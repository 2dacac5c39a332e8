"""A quantisable linear as data: its size and its place in the model.

Code that needs a linear's neighbours reads them here and never parses names.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of linear in the order in which a block runs them.
KINDS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LinearShape:
    """A linear of the whole model: weight [out_features, in_features], before tp shards it.

    block: the index of its block in the whole model.  kind: one of KINDS.  reads: a name for its input, the same for
    linears that read the same tensor.  stage: the pipeline stage that holds it.  other_flops: forward FLOPs per token
    that its stage does outside linears and that are counted with this one: attention with the last linear of a block,
    the output layer with the last linear of the stage that has it.
    """

    name: str
    out_features: int
    in_features: int
    block: int = 0
    kind: str = ""
    reads: str = ""
    stage: int = 0
    other_flops: int = 0

    @property
    def gemm_flops(self) -> int:
        """FLOPs per token of each of its three GEMMs."""
        return 2 * self.out_features * self.in_features
