"""Initial weights.  Each rank draws only its own shard.

An element is a function of (seed, parameter name, position in the whole parameter), so weights are the same on every
layout.  numpy's Philox draws normal deviates in blocks of 128 x 128, with the block's position as counter.  Blocks that
cross the edge of a shard are drawn whole and cut.  Source of Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_snip.config import TILE, ModelConfig
from megatron_snip.model.llama import LlamaStage
from megatron_snip.parallel.data import first_element, local_of
from megatron_snip.parallel.tags import Tags, tags_of
from megatron_snip.quant.adamw.expansion import split
from megatron_snip.runtime import seed_of

#: Constant initial values, by kind of parameter.
_CONSTANTS = {"norm": 1.0, "bias": 0.0}


@torch.no_grad()
def draw_weights(stages: Iterable[LlamaStage], low: Mapping[str, Tensor] | None = None) -> None:
    """Set every parameter of the stages to its initial value, in this rank's shards.

    low: local shards [...] of the low parts of BF16 weights that have them, which take what rounding to BF16 loses.
    """
    for stage in stages:
        tags = tags_of(stage)
        for name, parameter in stage.named_parameters():
            part = local_of(parameter)
            if (constant := _CONSTANTS.get(tags[name].kind)) is not None:
                part.fill_(constant)
                continue
            values = torch.empty(part.shape)
            fill_normal(values, seed_of(stage.build.seed, name), *first_element(parameter, stage.build.mesh))
            values.mul_(standard_deviation(tags[name], stage.build.model))
            if low and name in low:
                high, rest = split(values)
                part.copy_(high)
                low[name].copy_(rest)
            else:
                part.copy_(values)


def standard_deviation(tags: Tags, m: ModelConfig) -> float:
    """Standard deviation of a weight matrix at the start.

    Megatron's scaled initialisation keeps the variance of the residual stream with depth.
    """
    leaves = tags.kind == "linear" and tags.split_dim == 1  # row-parallel linears write to the residual stream
    return m.init_method_std / math.sqrt(2 * m.num_layers) if leaves else m.init_method_std


def fill_normal(values: Tensor, seed: int, row0: int, col0: int) -> None:
    """Fill float32 values [R, C] on the CPU with N(0, 1).  Their first element is (row0, col0) of the whole matrix."""
    blocks = range(row0 // TILE, -(-(row0 + len(values)) // TILE))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy releases the GIL while it draws
        list(pool.map(partial(_fill_blocks, values.numpy(), seed, row0, col0), blocks))


def _fill_blocks(out: np.ndarray[Any, np.dtype[np.float32]], seed: int, row0: int, col0: int, i: int) -> None:
    """``fill_normal`` for the i-th row of blocks."""
    whole = np.empty((TILE, TILE), np.float32)
    for j in range(col0 // TILE, -(-(col0 + out.shape[1]) // TILE)):
        # the counter's lowest word counts draws within the block
        philox = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=np.array([0, j, i, 0], np.uint64))
        np.random.Generator(philox).standard_normal(dtype=np.float32, out=whole)
        top, left = i * TILE - row0, j * TILE - col0  # position of the block in values
        to_rows, to_cols = slice(max(top, 0), top + TILE), slice(max(left, 0), left + TILE)
        kept = out[to_rows, to_cols]
        kept[...] = whole[max(-top, 0) :, max(-left, 0) :][: kept.shape[0], : kept.shape[1]]
