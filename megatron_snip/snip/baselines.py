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

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.cost import LinearShape, block_of, efficiency

Floats = NDArray[np.float64]

#: From the first to leave its precision to the last.  A rule of thumb, not a measurement: down_proj's input
#: (SwiGLU's product) has the widest outliers, and o_proj and v_proj reach the residual stream unscaled.
KINDS = ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj")


def protect(ranks: Floats, shapes: Sequence[LinearShape], options: Sequence[LinearPrecision]) -> Floats:
    """Q [L, O] from ranks [L]: rank * share of all FLOPs * bits lost against BF16, 0..1 for FP4."""
    return ranks[:, None] * efficiency(shapes, options, "time")


def random_ranks(names: Sequence[str], seed: int) -> Floats:
    """[L] uniform in (0, 1]; depends on the seed and the name, not on the other linears."""
    draws = [np.random.default_rng([seed, zlib.crc32(name.encode())]).random() for name in names]
    return 1.0 - np.array(draws)


def layer_id_ranks(names: Sequence[str], seed: int) -> Floats:
    """[L] distance of the linear's block from the middle of the model: the first and the last rank highest.

    The later of two blocks at one distance ranks higher.  Linears outside blocks rank 1.  Ignores the seed.
    """
    blocks = [block_of(name) for name in names]
    last = max((block for block in blocks if block is not None), default=0)
    count = last + 1
    ranks = [1.0 if b is None else (abs(2 * b - last) + (0.5 if 2 * b > last else 0.0) + 1) for b in blocks]
    scale = [1.0 if b is None else count + 1 for b in blocks]
    return np.array(ranks) / np.array(scale)


def layer_type_ranks(names: Sequence[str], seed: int) -> Floats:
    """[L] place of the linear's kind in KINDS; within a kind later blocks rank higher.  Ignores the seed.

    Unknown kinds rank 1.
    """
    count = 1 + max((block_of(name) or 0 for name in names), default=0)
    ranks = []
    for name in names:
        kind = name.rpartition(".")[2]
        place = KINDS.index(kind) if kind in KINDS else len(KINDS) - 1
        ranks.append((place + ((block_of(name) or 0) + 1) / count) / len(KINDS))
    return np.array(ranks)
