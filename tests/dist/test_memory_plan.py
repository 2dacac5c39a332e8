"""Memory plans change no bit of a run."""

from __future__ import annotations

import random

import pytest

from megatron_snip.model.recompute import CHOICES
from megatron_snip.train.dry_run.measure import processes
from megatron_snip.train.memory_plan.auto import Planner
from tests.dist.helpers.dry_runs import options_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.memory_plans import losses_of_each, real_peaks, write_plan
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


def test_predicted_peaks_are_those_of_a_run(tmp_path):
    """Of ten plans on a pipeline of two, in real tensors."""
    options = {"bf16": True, "precision": "fp8", "seq_length": 256, "pipeline_model_parallel_size": 2}
    config, draw = options_of(options), random.Random(3)
    with processes(2) as pool:
        planner = Planner(config, 2, pool)
    plans = [tuple(draw.choice(CHOICES) for _ in range(4)) for _ in range(10)]
    variants = [write_plan(tmp_path / f"{i}.json", plan, options, 2) for i, plan in enumerate(plans)]
    real = run_ranks(real_peaks, 2, variants, seconds=400.0)
    for runs, peaks, found in zip(planner.runs, planner.peaks, real, strict=True):
        predicted = [peaks.of([CHOICES.index(plan[b]) for b in runs.blocks])[0] for plan in plans]
        assert predicted == pytest.approx(found, rel=0.02)
