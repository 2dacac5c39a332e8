"""Dry runs predict what the same run does on real tensors."""

from __future__ import annotations

import pytest

from megatron_snip.train.dry_run import measure_all
from tests.dist.dry_runs import options_of, real_stretches
from tests.dist.harness import run_ranks
from tests.dist.runs import LAYOUTS, world_of

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "bf16": True, "precision": "snip"}


@pytest.mark.parametrize("layout", ["tp2 x pp2 x dp2", "tp2 without sequence parallel"])
def test_collectives_are_those_of_a_run(layout):
    world = world_of(layout)
    options = {**SMALL, **LAYOUTS[layout], "snip_weight": 1.0, "global_batch_size": 8}
    real = run_ranks(real_stretches, world, options)
    for one in measure_all(options_of(options), world, [0, world - 1]):
        first, plan, probe = one.stretches
        for stretch, expected in zip((first, probe), real[one.rank], strict=True):
            got = {what: n for what, n in stretch.counts.items() if what[0] in ("count", "bytes")}
            assert got == expected["collectives"]
            assert {what[1] for what in got} >= set("tp pp dp world".split()) or world == 2
