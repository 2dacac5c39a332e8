"""A quantisable linear as data: its size, and where it stands in the model.

Whoever needs to know what is beside a linear reads it here; nobody reads it off the name.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of linear in the order in which a block runs them.
KINDS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LinearShape:
    """A linear of the whole model: weight [out_features, in_features], whatever tp shards it.

    block: the block's number in the whole model; kind: one of KINDS; reads: what its input is, the same word for
    linears that read the same tensor; stage: the pipeline process that holds it; other_flops: FLOPs per token of
    forward that this stage does besides linears and that are counted with this one: attention with the last linear of
    its block, the output layer with the last of the model, or of the stage that has it.
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
