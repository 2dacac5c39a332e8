"""Each sharding strategy trains the same model, sends what its name promises, and reduces gradients beside backward."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_snip.train.dry_run.measure import measure_all
from tests.dist.helpers.dry_runs import collectives, options_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, losses, plan_from, save_after, statistics
from tests.dist.helpers.sharding import an_iteration, gathered, sent_over_dp, tensors_after
from tests.dist.test_layouts import distances_by_name, farther

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256}
#: (processes, options): with the other axes, so that each strategy meets each of them.
CASES = {
    "dp2, no_shard": (2, {"data_parallel_sharding_strategy": "no_shard"}),
    "dp2, optim": (2, {"data_parallel_sharding_strategy": "optim"}),
    "dp2, optim_grads_params, recompute": (
        2, {"data_parallel_sharding_strategy": "optim_grads_params", "recompute_granularity": "full"},
    ),
    "dp2 x 2, optim_grads": (
        4, {"data_parallel_sharding_strategy": "optim_grads", "num_distributed_optimizer_instances": 2},
    ),
    "tp2 x dp2, no_shard, recompute": (
        4, {**LAYOUTS["tp2"], "data_parallel_sharding_strategy": "no_shard", "recompute_granularity": "full"},
    ),
    "tp2 x dp2, optim_grads_params, tied": (
        4,
        {
            **LAYOUTS["tp2"], "data_parallel_sharding_strategy": "optim_grads_params",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "pp2 x dp2, no_shard": (4, {**LAYOUTS["pp2"], "data_parallel_sharding_strategy": "no_shard"}),
    "pp2 interleaved x dp2, optim_grads": (
        4, {**LAYOUTS["pp2 interleaved"], "data_parallel_sharding_strategy": "optim_grads"},
    ),
    "pp2 x dp2, optim_grads_params": (
        4, {**LAYOUTS["pp2"], "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "tp2 x dp2 x 2, optim, selective recompute": (
        8,
        {
            **LAYOUTS["tp2"], "num_distributed_optimizer_instances": 2, "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp"),
        },
    ),
}  # fmt: skip


#: The others of CASES meet nothing that these and test_matrix.py's first do not, but another partner.
FIRST = (
    "dp2 x 2, optim_grads", "tp2 x dp2, optim_grads_params, tied", "pp2 x dp2, no_shard",
)  # fmt: skip


@functools.cache
def alone(tied: bool):
    """Losses and gradients of one process."""
    return run_ranks(four_losses, 1, {**SMALL, "untie_embeddings_and_output_weights": not tied})[0]


four_losses = functools.partial(losses, iterations=4)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FIRST else pytest.mark.slow) for c in CASES])
def test_losses_and_gradients_are_those_of_one_process(case):
    world, options = CASES[case]
    expected = alone(tied="tied" in case)
    for got in run_ranks(four_losses, world, {**SMALL, **options}, seconds=240.0):
        assert np.abs(np.subtract(got["losses"], expected["losses"])).max() <= 1e-4
        assert got["first"].grad_norm == pytest.approx(expected["first"].grad_norm, rel=1e-5)
        for name, grad in got["gradients"].items():
            reference = expected["gradients"][name]
            assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max(), name


@functools.cache
def sent(strategy: str, instances: int = 1, *, grad_reduce_in_bf16: bool = False):
    """An iteration of two microbatches a process, in bf16."""
    options = {
        **SMALL, "bf16": True, "data_parallel_sharding_strategy": strategy,
        "num_distributed_optimizer_instances": instances, "grad_reduce_in_bf16": grad_reduce_in_bf16,
    }  # fmt: skip
    return run_ranks(an_iteration, 2 * instances, {**options, "global_batch_size": 4 * instances}, seconds=240.0)[0]


UNITS = 4  # two blocks, the head, and the embedding with the last norm
EMBEDDING = HEAD = 512 * 128  # bytes of their bf16 halves
STEP = 3 * 8  # bytes of loss, norm and wish to stop, which go over the world, here dp


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_is_gathered_and_its_gradient_reduced_as_often_as_promised(strategy):
    found = sent(strategy)
    n = found["weights"]  # the whole model's; gathers hand over bf16 halves, reductions the whole in float32
    expected = {
        "no_shard": {"all-reduce": (UNITS + 1, 4 * n + STEP)},
        "optim": {"all-gather": (UNITS, n), "reduce-scatter": (UNITS, 4 * n), "all-reduce": (1, STEP)},
        "optim_grads": {"all-gather": (UNITS, n), "reduce-scatter": (2 * UNITS, 8 * n), "all-reduce": (1, STEP)},
        # forward and backward of two microbatches; the embedding, a unit there, and the head only in forward
        "optim_grads_params": {
            "all-gather": (4 * UNITS, 4 * n - 2 * EMBEDDING - 2 * HEAD), "reduce-scatter": (2 * UNITS + 2, 8 * n),
            "all-reduce": (1, STEP)
        },
    }  # fmt: skip
    assert sent_over_dp(found["collectives"]) == expected[strategy]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_reductions_in_bf16_send_half(strategy):
    found = sent_over_dp(sent(strategy)["collectives"])
    half = sent_over_dp(sent(strategy, grad_reduce_in_bf16=True)["collectives"])
    kind = "all-reduce" if strategy == "no_shard" else "reduce-scatter"
    step = STEP if strategy == "no_shard" else 0
    assert half.pop(kind) == (found[kind][0], (found.pop(kind)[1] - step) // 2 + step)
    assert half == found


def test_gradients_reduced_in_bf16_are_rounded_sums():
    """Over microbatches and ranks; the shards are float32."""
    options = {**SMALL, "bf16": True, "precision": "bf16"}
    ((one, _), (other, _)) = (
        run_ranks(functools.partial(losses, iterations=1), 2, {**options, **more}, seconds=240.0)
        for more in ({}, {"grad_reduce_in_bf16": True})
    )
    assert other["first"].loss == one["first"].loss
    for name, grad in other["gradients"].items():
        exact = one["gradients"][name]
        assert grad.dtype == exact.dtype == torch.float32 and grad.equal(grad.bfloat16().float()), name
        assert not exact.equal(exact.bfloat16().float()), name
        assert (grad - exact).norm() <= 2.0**-7 * exact.norm(), name


def test_instances_add_one_reduction_of_their_shards():
    found = sent("optim_grads", 2)
    n = found["weights"]
    assert sent_over_dp(found["collectives"]) == {
        "all-gather": (UNITS, n), "reduce-scatter": (2 * UNITS, 8 * n), "all-reduce": (UNITS, 2 * n)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"data_parallel_sharding_strategy": "optim", "bf16": True}),
        pytest.param(2, {"data_parallel_sharding_strategy": "no_shard"}, marks=pytest.mark.slow),
        pytest.param(4, {**LAYOUTS["tp2"], "bf16": True, "recompute_granularity": "full"}, marks=pytest.mark.slow),
        pytest.param(4, {**LAYOUTS["pp2"], "data_parallel_sharding_strategy": "optim_grads"}, marks=pytest.mark.slow),
    ],
)
def test_gathered_weights_that_are_cast_are_freed_between_microbatches(world, options):
    options = {**SMALL, "global_batch_size": 6, **options}
    plain = run_ranks(functools.partial(gathered, frees=False), world, options, seconds=240.0)
    freed = run_ranks(functools.partial(gathered, frees=True), world, options, seconds=240.0)
    for one, other in zip(plain, freed, strict=True):
        assert other["told"] == one["told"]
        for name, tensor in one["tensors"].items():
            assert other["tensors"][name].equal(tensor), name
        for i, (name, shares) in enumerate(other["shares"].items()):
            assert set(one["shares"][name][2::3]) == {1.0}, name
            assert set(shares[2::3]) == {1.0 if i % 3 == 2 else 0.0}, (name, shares)  # every third is in BF16


@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_are_reduced_beside_backward(pp):
    """Those of a block before the block below it has multiplied."""
    options = {**SMALL, "num_layers": 4, "pipeline_model_parallel_size": pp, "precision": "bf16"}
    for found in run_ranks(an_iteration, 2 * pp, options, seconds=240.0):
        ops = found["ops"]
        reductions = [i for i, name in enumerate(ops) if name == "c10d::_reduce_scatter_base_"]
        products = [i for i, name in enumerate(ops) if name == "aten::mm"]
        for earlier, later in zip(reductions, reductions[1:-1]):
            assert any(earlier < i < later for i in products)
        assert len(reductions) >= 2 and reductions[0] < products[-1]


@pytest.mark.parametrize(("strategy", "half"), [("no_shard", False), ("optim_grads_params", False), ("optim", True)])
def test_a_dry_run_counts_them(strategy, half):
    options = {
        **SMALL, "bf16": True, "data_parallel_sharding_strategy": strategy, "grad_reduce_in_bf16": half,
    }  # fmt: skip
    (one,) = measure_all(options_of(options), 2, [0])
    assert collectives(one.stretches[0].counts) == sent(strategy, grad_reduce_in_bf16=half)["collectives"]


def test_every_instance_holds_the_same(tmp_path: Path):
    """A weight's and its moments' parts are equal along replicate, bit for bit."""
    options = {**SMALL, "num_distributed_optimizer_instances": 2}
    ranks = run_ranks(tensors_after, 4, options, 3, seconds=240.0)
    for first, second in ((0, 2), (1, 3)):
        for name, part in ranks[first].items():
            assert part.equal(ranks[second][name]), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save_after, 4, {**SMALL, "num_distributed_optimizer_instances": 2}, folder, 6, seconds=240.0)
    return folder


@pytest.mark.parametrize(
    ("strategy", "world", "instances"),
    [
        pytest.param("no_shard", 2, 1, marks=pytest.mark.slow),
        pytest.param("optim_grads_params", 2, 1, marks=pytest.mark.slow),
        ("optim", 4, 2),
    ],
)
def test_a_checkpoint_gives_the_same_plan_and_statistics(strategy, world, instances, checkpoint):
    """Under every strategy; weight divergences among them, which follow the shards."""
    options = {**SMALL, "snip_weight": 1.0}
    expected = run_ranks(plan_from, 1, options, checkpoint, 6)[0]
    changed = {"data_parallel_sharding_strategy": strategy, "num_distributed_optimizer_instances": instances}
    for result in run_ranks(plan_from, world, {**options, **changed}, checkpoint, 6, seconds=240.0):
        assert result["hash"] == expected["hash"]
        assert not farther(distances_by_name(result["stats"], expected["stats"]), 1e-5)


@pytest.mark.slow
def test_statistics_of_few_rows_follow_the_shards(checkpoint):
    """Where wgrad's error is measured in some rows, those of a process are its shard's."""
    options = {**SMALL, "snip_weight": 1.0}
    expected = run_ranks(statistics, 1, options, checkpoint, 6, 50)[0]
    changed = {**options, "num_distributed_optimizer_instances": 2}
    for got in run_ranks(statistics, 4, changed, checkpoint, 6, 50, seconds=240.0):
        assert not farther(distances_by_name(got, expected), 1e-5)
