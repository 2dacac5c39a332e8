"""Rules that plan without measuring: what SNIP's plans are compared with.

Source: the baselines of SNIP, arXiv 2602.01410 (random, by layer index, by layer type).
Convention: a rule gives each linear a rank in (0, 1]; higher ranks keep their precision longer.  Q is the
rank times the linear's FLOPs times the precision lost, so that cost per FLOP saved follows the rank alone
and large linears are not spared for their size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import efficiency

Floats = NDArray[np.float64]

#: From the first to leave its precision to the last.  A rule of thumb, not a measurement: down_proj's input
#: (SwiGLU's product) has the widest outliers, and o_proj and v_proj reach the residual stream unscaled.
KINDS = ("gate", "up", "q", "k", "v", "o", "down")


def protect(ranks: Floats, shapes: Sequence[LinearShape], options: Sequence[LinearPrecision]) -> Floats:
    """Q [L, O] from ranks [L]: rank * share of all FLOPs * bits lost against BF16, 0..1 for FP4."""
    return ranks[:, None] * efficiency(shapes, options, "time")


def random_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] uniform in (0, 1]; depends on the seed and the name, not on the other linears."""
    draws = [np.random.default_rng([seed, zlib.crc32(shape.name.encode())]).random() for shape in shapes]
    return 1.0 - np.array(draws)


def layer_id_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] distance of the linear's block from the middle of the model: the first and the last rank highest.

    The later of two blocks at one distance ranks higher.  Ignores the seed.
    """
    blocks = np.array([shape.block for shape in shapes])
    last = int(blocks.max())
    ranks: Floats = (abs(2 * blocks - last) + np.where(2 * blocks > last, 0.5, 0.0) + 1) / (last + 2)
    return ranks


def layer_type_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] place of the linear's kind in KINDS; within a kind later blocks rank higher.  Ignores the seed."""
    count = 1 + max(shape.block for shape in shapes)
    places = [KINDS.index(shape.kind) + (shape.block + 1) / count for shape in shapes]
    return np.array(places) / len(KINDS)
