"""Memory plans change no bit of a run."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.memory_plans import losses_of_each, write_plan
from tests.dist.helpers.runs import LAYOUTS

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "bf16": True, "precision": "fp4"}
CASES = {
    "tp2 x pp2": (4, {**LAYOUTS["tp2 x pp2 interleaved"], "num_layers_per_virtual_pipeline_stage": None}),
    "dp2": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "cp2": (2, {"context_parallel_size": 2, "seq_length": 512}),
    "pp2 interleaved": (2, LAYOUTS["pp2 interleaved"]),
}
PLANS = [
    ("full", "selective", "keep", "full"),
    ("keep", "full", "selective", "selective"),
]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without_a_plan(case, tmp_path):
    world, options = CASES[case]
    options = {**SMALL, **options}
    planned = [write_plan(tmp_path / f"{i}.json", plan, options, world) for i, plan in enumerate(PLANS)]
    done = [[] for _ in PLANS]
    for plain, *others in run_ranks(losses_of_each, world, [options, *planned]):
        assert set(plain[2]) == {"keep"}
        for i, other in enumerate(others):
            assert other[:2] == plain[:2]
            done[i] += other[2]
    for i, plan in enumerate(PLANS):
        assert set(done[i]) == set(plan)
