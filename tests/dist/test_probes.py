"""Probes with all passes change nothing of a run whose plan stays, on any layout."""

from __future__ import annotations

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.runs import LAYOUTS, trace, world_of

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2}
ITERATIONS, PROBED = 3, {1, 3}


@pytest.mark.parametrize(("layout", "bf16"), [("tp2", False), ("pp2 x dp2", False), ("tp2 x pp2 interleaved", True)])
def test_probes_change_no_bit_of_a_run(layout, bf16):
    options, world = {**SMALL, **LAYOUTS[layout], "bf16": bf16}, world_of(layout)
    plain, probed = (run_ranks(trace, world, options, ITERATIONS, when) for when in (set(), PROBED))
    for one, other in zip(plain, probed, strict=True):
        assert len({loss for loss, _, skipped in one["told"] if not skipped}) == ITERATIONS
        assert other["told"] == one["told"]
        assert other["tensors"].keys() == one["tensors"].keys() != set()
        for name, tensor in one["tensors"].items():
            assert torch.equal(other["tensors"][name], tensor), name
