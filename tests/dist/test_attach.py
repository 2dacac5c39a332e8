"""`megatron_snip.attach` beside the trainer, and over data parallel processes."""

from __future__ import annotations

import dataclasses
import pytest

from megatron_snip.snip.predict.divergence import Predictions
from tests.dist.helpers.attached import (
    after_a_validation,
    beside_the_trainer,
    failing_solve,
    of_unequal_batches,
    over_processes,
    tried_over_processes,
)
from tests.dist.helpers.harness import run_ranks
from tests.dist.test_layouts import distances_by_name, farther


QWEN3 = {"model_name": "qwen3", "kv_channels": 64}


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        pytest.param({}, 1e-4, id="float32"),
        pytest.param({"bf16": True}, 0.2, id="bf16"),
        pytest.param(QWEN3, 1e-4, id="qwen3", marks=pytest.mark.slow),
    ],
)
def test_its_plan_is_the_trainers(options, bound):
    """On the same weights and batch; two implementations of one model agree to their rounding."""
    (found,) = run_ranks(beside_the_trainer, 1, options)
    (stats, plan), (ours, our_plan) = found["trainer"], found["library"]
    assert len({str(p) for p in plan.linears.values()}) == 2, "a plan of one precision proves little"
    if "bf16" not in options:
        assert our_plan.linears == plan.linears and our_plan.achieved == plan.achieved
    costs = [Predictions.of(stats).total_loss_divergence(one.linears) for one in (plan, our_plan)]
    assert costs[1] == pytest.approx(costs[0], rel=0.01), "linears that cost alike may change places"
    linears = tuple(dataclasses.replace(shape, other_flops=0) for shape in stats.shapes)  # it sees nothing else
    assert ours.tokens == stats.tokens and ours.shapes == linears
    distances = distances_by_name(ours, stats)
    tokens = {name: d for name, d in distances.items() if " token/" in name or name == "loss"}
    assert len(tokens) == 1 + 2 * len(stats.names) and not farther(tokens, bound)


@pytest.mark.parametrize("wrapped", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_data_parallel_processes_plan_together(wrapped):
    (alone,) = run_ranks(over_processes, 1, "")
    ranks = run_ranks(over_processes, 2, wrapped)
    for rank in ranks:
        assert not farther(distances_by_name(rank["stats"], alone["stats"]), 1e-4)
        assert rank["plan"].hash == alone["plan"].hash and rank["stats"].tokens == 512
    means = [sum(each) / 2 for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(alone["losses"], rel=2e-3), "training under the plan goes the same way"
    assert means[-1] < means[0]


@pytest.mark.parametrize("wrapped", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_data_parallel_processes_try_plans_together(wrapped):
    (alone,) = run_ranks(tried_over_processes, 1, "")
    for rank in run_ranks(tried_over_processes, 2, wrapped):
        plan, expected = rank["plan"], alone["plan"]
        assert plan.hash == expected.hash and plan.trial.name == expected.trial.name
        assert plan.trial.tokens == expected.trial.tokens == 4 * 127
        assert plan.trial.increase == pytest.approx(expected.trial.increase, rel=0.02, abs=2e-5)
        assert plan.trial.error == pytest.approx(expected.trial.error, rel=0.02)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-4), "training goes on as without it"
        if rank["kept"] is not None:
            assert set(map(str, rank["kept"].linears.values())) == {"bf16"}, "it failed on the other process"


def test_processes_with_unequal_batches_count_alike():
    """As several batches do, for the gradient is the mean of theirs."""
    (alone,) = run_ranks(of_unequal_batches, 1)
    expected, options = Predictions.of(alone).loss, ("fp4", "fp8")
    for stats in run_ranks(of_unequal_batches, 2):
        found = Predictions.of(stats).loss
        assert stats.tokens == 512 and found.keys() == expected.keys()
        for name, by_format in expected.items():
            assert [found[name][fmt] for fmt in options] == pytest.approx([by_format[f] for f in options], rel=1e-4)


def test_a_probe_after_a_validation_leaves_no_gradient():
    """FSDP2 keeps the last unit gathered after a forward alone."""
    for rank in run_ranks(after_a_validation, 2, False):
        assert all(grad.equal(rank["probed"][name]) for name, grad in rank["plain"].items())


def test_attach_comes_after_fully_shard():
    for rank in run_ranks(after_a_validation, 2, True):
        assert rank["error"] == "the model was sharded by FSDP2 after attach; call attach after fully_shard"


def test_a_solve_that_fails_leaves_nobody_waiting():
    said = "list index out of range"
    assert run_ranks(failing_solve, 2, seconds=60.0) == [f"IndexError: {said}", f"UserError: {said}"]
