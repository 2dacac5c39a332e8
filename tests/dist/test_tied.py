"""A tied embedding lies in the first and in the last pipeline stage, and stays one weight."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_snip.checkpoint.manifest import check
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import plan_from, save_after
from tests.dist.test_layouts import distances_by_name, farther
from tests.dist.helpers.tied import of_a_pass, train_between

WEIGHT = "embed_tokens.weight"
TIED = {
    "num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 256, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
PP3 = {**TIED, "pipeline_model_parallel_size": 3}
INTERLEAVED = {
    **TIED, "num_layers": 4, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2
}  # fmt: skip
WITH_DP = {**PP3, "data_parallel_sharding_strategy": "optim_grads_params", "bf16": True, "global_batch_size": 6}


@pytest.fixture(scope="module")
def three():
    return run_ranks(of_a_pass, 3, PP3)


def test_the_first_and_the_last_hold_it(three):
    assert [one["place"] for one in three] == [(0, 2), None, (1, 2)]
    assert [WEIGHT in one["squares"] for one in three] == [True, False, True]
    assert not any("lm_head" in name for one in three for name in one["squares"])


def test_its_gradient_is_summed_and_counted_once(three):
    (alone,) = run_ranks(of_a_pass, 1, TIED)
    assert three[0]["squares"][WEIGHT] == three[2]["squares"][WEIGHT]
    assert three[0]["squares"][WEIGHT] == pytest.approx(alone["squares"][WEIGHT], rel=1e-5)
    whole = sum(alone["squares"].values())
    assert sum(one["share"] for one in three) == pytest.approx(whole, rel=1e-5)
    assert math.isclose(alone["share"], whole, rel_tol=1e-5)
    assert alone["squares"][WEIGHT] > 0.01 * whole, "twice it would not show"


@pytest.mark.parametrize("layout", [PP3, pytest.param(INTERLEAVED, marks=pytest.mark.slow)])
def test_a_rerun_finds_it_at_the_first_stage_on_both(layout, three):
    """A fault in any other gradient of the last process lies nearer to the loss, and the rerun tells of that."""
    found = three if layout is PP3 else run_ranks(of_a_pass, 2, layout)
    (first, *_), (last, *others) = found[0]["compared"], found[-1]["compared"]
    assert first == last and first[:2] == (0, WEIGHT)
    stages = [stage for stage, *_ in others]
    assert stages == sorted(stages) and stages[0] > 0


@pytest.mark.parametrize(
    ("world", "options"),
    [(3, PP3), pytest.param(2, INTERLEAVED, marks=pytest.mark.slow), pytest.param(6, WITH_DP, marks=pytest.mark.slow)],
    ids=["pp3", "interleaved", "pp3 x dp2"],
)
def test_a_run_goes_on_bit_for_bit_and_from_one_process(world, options, tmp_path):
    through = run_ranks(train_between, world, options, tmp_path / "through", 0, 4)
    copies = [one["tensors"] for one in through if f"model.{WEIGHT}" in one["tensors"]]
    names = [name for name in copies[0] if WEIGHT in name]
    half = world // options["pipeline_model_parallel_size"]
    assert len(copies) == 2 * half and len(names) == 3
    for first, last in zip(copies[:half], copies[half:], strict=True):
        assert all(first[name].equal(last[name]) for name in names), "weight and moments"

    run_ranks(train_between, world, options, tmp_path / "cut", 0, 2)
    resumed = run_ranks(train_between, world, options, tmp_path / "cut", 2, 4)
    for before, after in zip(through, resumed, strict=True):
        assert after["told"] == before["told"][2:]
        assert all(tensor.equal(before["tensors"][name]) for name, tensor in after["tensors"].items())

    one = {**options, "pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": None}
    run_ranks(train_between, 1, one, tmp_path / "alone", 0, 2)
    more = check(tmp_path / "cut", 2).size - check(tmp_path / "alone", 2).size
    assert more < 3 * 4 * 512 * 128 / 2, "what records cost, and no second weight with its moments"
    (alone,) = run_ranks(train_between, 1, one, tmp_path / "alone", 2, 4)
    (tmp_path / "alone/iter_0000004").rename(tmp_path / "aside")
    moved = run_ranks(train_between, world, options, tmp_path / "alone", 2, 4)
    bound = 2e-2 if options.get("bf16") else 1e-4
    assert np.abs(np.subtract(moved[0]["told"], alone["told"])).max() <= bound


@pytest.mark.slow
def test_one_checkpoint_gives_one_plan(tmp_path):
    run_ranks(save_after, 1, TIED, tmp_path, 4)
    over_all_stages = {"snip_stage_constraint": "none", "snip_weight": 1.0}
    (alone,) = run_ranks(plan_from, 1, {**TIED, **over_all_stages}, tmp_path, 4)
    for found in run_ranks(plan_from, 3, {**PP3, **over_all_stages}, tmp_path, 4):
        assert found["hash"] == alone["hash"]
        assert not farther(distances_by_name(found["stats"], alone["stats"]), 1e-5)
