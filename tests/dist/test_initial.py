"""Initial weights are the same bits on every layout, and nobody draws them where a checkpoint holds them."""

from __future__ import annotations

import pytest
import torch

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.initial import whole_weights
from tests.dist.helpers.runs import LAYOUTS, world_of

#: Shards that end inside the blocks in which weights are drawn, and a half vocabulary that dp cannot share out evenly.
ODD = {
    "hidden_size": 192, "ffn_hidden_size": 328, "kv_channels": 50, "vocab_size": 390, "make_vocab_size_divisible_by": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return run_ranks(whole_weights, 1, ODD)[0]


@pytest.mark.parametrize("layout", ["tp2", "dp2", "tp2 x pp2 interleaved", "tp2 x dp2"])
def test_every_layout_has_the_same_weights(layout, alone):
    seen = {}
    for weights in run_ranks(whole_weights, world_of(layout), {**LAYOUTS[layout], **ODD}):
        assert all(torch.equal(weight, alone[name]) for name, weight in weights.items())
        seen |= weights
    assert seen.keys() == alone.keys()
