"""Memory and communication that a probe adds to a plain iteration, from the model's shape and layout.

Per rank, for the stage with the most weights:

    held   wgrad's error in some rows of each weight, float32 [R, K] per format, during the whole pass, if updates are
           measured; and for one block and microbatch, the outputs of q, k and v with their errors in each format, and
           the gradient of o's input
    sent   over tp, per block and microbatch, the token sums [7 F, T] in float32; over dp, once, those errors of wgrad

Source: snip/measure/linear_probe.py and block_probe.py; tests compare these counts with their tensors and collectives.
Convention: bytes that a rank passes to collectives; T tokens per microbatch, F formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.linear_probe import row_step

_FLOAT32 = 4


@dataclass(frozen=True)
class Layout:
    """How a model is sharded, with tokens per microbatch and microbatches per rank."""

    tp: int
    dp: int
    tokens: int
    microbatches: int
    element_size: int = 2  # of activations


@dataclass(frozen=True)
class Footprint:
    """Bytes per rank: errors of weights; outputs and errors in flight; all-reduced over tp and dp."""

    weight_errors: int
    outputs: int
    sent_over_tp: int
    sent_over_dp: int

    @property
    def held(self) -> int:
        """Bytes beyond those of an iteration."""
        return self.weight_errors + self.outputs


def footprint(shapes: Sequence[LinearShape], formats: int, layout: Layout, *, updates: bool) -> Footprint:
    """The footprint of the largest stage.  ``formats`` counts those that quantise; updates as for a probe."""
    elements: Counter[int] = Counter()
    blocks: dict[int, set[int]] = {}
    for shape in shapes:
        rows = len(range(0, shape.out_features, row_step(shape.out_features)))
        elements[shape.stage] += rows * shape.in_features // layout.tp
        blocks.setdefault(shape.stage, set()).add(shape.block)
    errors = formats * _FLOAT32 * max(elements.values()) if updates else 0
    first = {shape.kind: shape for shape in shapes if shape.block == 0}
    behind = sum(first[kind].out_features for kind in ("q", "k", "v"))
    linears = sum(shape.block == 0 for shape in shapes)
    tokens = layout.microbatches * layout.tokens
    return Footprint(
        weight_errors=errors,
        outputs=((1 + formats) * behind + first["o"].in_features) * layout.element_size * layout.tokens // layout.tp,
        sent_over_tp=max(map(len, blocks.values())) * linears * formats * _FLOAT32 * tokens if layout.tp > 1 else 0,
        sent_over_dp=errors if layout.dp > 1 else 0,
    )
