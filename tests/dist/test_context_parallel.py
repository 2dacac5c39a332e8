"""Context parallelism: what one process makes of a sequence, several make of its pieces."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.helpers.compiled import compiled_losses
from tests.dist.helpers.context_parallel import attention_of_pieces, casts_of_pieces
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, MODELS, losses, mixed_plan, plan_from, save_after
from tests.dist.test_layouts import unlike

#: Pieces of a tile each; two sequences in a microbatch, and grouped queries.
LONG = {
    "num_layers": 2, "seq_length": 512, "num_query_groups": 2, "kv_channels": 128, "micro_batch_size": 2,
    "context_parallel_size": 2,
}  # fmt: skip
ALONE = {**LONG, "context_parallel_size": 1}
#: (processes, options)
CASES = {
    "cp2": (2, {}),
    "tp2 x cp2": (4, {**LAYOUTS["tp2"], "recompute_granularity": "full"}),
    "pp2 x cp2": (4, {**LAYOUTS["pp2 interleaved"], "recompute_granularity": "selective"}),
    "cp2 x dp2, optim_grads_params": (4, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "cp2 x dp2, no_shard": (4, {"data_parallel_sharding_strategy": "no_shard"}),
    "tp2 x cp2 x dp2": (8, {**LAYOUTS["tp2"], "num_distributed_optimizer_instances": 2}),
    "tp2 x pp2 x cp2": (8, LAYOUTS["tp2 x pp2 interleaved"]),
    "cp4": (4, {"seq_length": 1024, "context_parallel_size": 4}),
    "tp2 x cp2, qwen3": (4, {**MODELS["qwen3"], **LAYOUTS["tp2 without sequence parallel"]}),
}
FIRST = ("cp2 x dp2, optim_grads_params",)  # tensor parallelism meets cp in the statistics below
FEW = [pytest.param(case, marks=() if case in FIRST else pytest.mark.slow) for case in CASES]

four_losses = functools.partial(losses, iterations=4)


@functools.cache
def alone(seq_length: int, model: str = "llama"):
    return run_ranks(four_losses, 1, {**ALONE, **MODELS[model], "seq_length": seq_length}, seconds=240.0)[0]


@pytest.mark.parametrize("case", FEW)
def test_losses_and_gradients_are_those_of_one_process(case):
    world, options = CASES[case]
    options = {**LONG, **options}
    expected = alone(options["seq_length"], options.get("model_name", "llama"))
    for got in run_ranks(four_losses, world, options, seconds=240.0):
        assert np.abs(np.subtract(got["losses"], expected["losses"])).max() <= 1e-4
        assert got["first"].grad_norm == pytest.approx(expected["first"].grad_norm, rel=1e-5)
        for name, grad in got["gradients"].items():
            reference = expected["gradients"][name]
            assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max(), name


@pytest.mark.parametrize("world", [2, 4])
def test_attention_and_its_gradients_are_those_of_whole_sequences(world):
    for differences in run_ranks(attention_of_pieces, world):
        assert max(differences.values()) < 1e-5, differences


def test_codes_and_random_bits_are_those_of_whole_sequences():
    """Of every operand, bit for bit, in tiles of either direction; nvfp4_plain's scale is of the whole tensor."""
    for same in run_ranks(casts_of_pieces, 2):
        assert same and all(same.values()), same


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save_after, 1, ALONE, folder, 3, seconds=240.0)
    return folder


SNIP = {"snip_options": "fp8,fp4,nvfp4_plain", "snip_weight": 1.0, "snip_stage_constraint": "none"}


@functools.cache
def planned_alone(folder: Path):
    return run_ranks(plan_from, 1, {**ALONE, **SNIP}, folder, 3, seconds=240.0)[0]


@pytest.mark.parametrize(
    "case", ["tp2 x cp2", pytest.param("cp2 x dp2, no_shard", marks=pytest.mark.slow),
             pytest.param("tp2 x pp2 x cp2", marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_checkpoint_gives_the_same_plan_and_statistics(case, checkpoint):
    world, options = CASES[case]
    expected = planned_alone(checkpoint)
    assert len(set(expected["precision"].values())) > 1, "a plan of one precision proves little"
    for result in run_ranks(plan_from, world, {**LONG, **SNIP, **options}, checkpoint, 3, seconds=240.0):
        assert result["hash"] == expected["hash"]
        assert not unlike(result["stats"], expected["stats"], split=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cp2", "tp2 x cp2"])
def test_a_compiled_block_has_one_graph_and_the_bits_of_the_eager_one(case):
    world, options = CASES[case]
    options = {**LONG, **options, "recompute_granularity": "none"}
    eager = run_ranks(functools.partial(losses, iterations=1), world, options, seconds=240.0)
    for got, expected in zip(run_ranks(compiled_losses, world, options, "aot_eager", 1), eager, strict=True):
        assert got["losses"] == expected["losses"] and (got["graphs"], got["breaks"]) == (1, {})
        assert all(torch.equal(grad, expected["gradients"][name]) for name, grad in got["gradients"].items())


@pytest.mark.slow
def test_losses_under_a_plan_agree_up_to_the_order_of_sums(tmp_path):
    """As today's layouts do: by at most twice what a unit in the last place of the norms' weights makes."""
    plan = {"precision": "plan", "precision_plan": str(mixed_plan(tmp_path / "plan.json", **ALONE))}
    expected = run_ranks(losses, 1, {**ALONE, **plan}, seconds=240.0)[0]["losses"]
    nudged = [
        run_ranks(functools.partial(losses, nudge=seed), 1, {**ALONE, **plan}, seconds=240.0)[0]["losses"]
        for seed in range(4)
    ]
    chaos = float(np.mean([np.abs(np.subtract(one, expected)).mean() for one in nudged]))
    for case in FIRST:
        world, options = CASES[case]
        got = run_ranks(losses, world, {**LONG, **options, **plan}, seconds=240.0)[0]["losses"]
        assert 0.0 < np.abs(np.subtract(got, expected)).mean() <= 2.0 * chaos
