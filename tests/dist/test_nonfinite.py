"""A NaN on one rank skips the step on all of them, and ends the run if it stays; a plan is applied by all or none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_snip.checkpoint.manifest import newest, read_manifest
from megatron_snip.train.run.state_file import read_state
from tests.dist.helpers.faults import differing_plans, poisoned_run, poisoned_steps
from tests.dist.helpers.harness import run_ranks

#: layout -> the rank that goes wrong; in pp2 the gradients of the other one stay finite.
LAYOUTS = {
    "dp2": ({}, 1),
    "pp2": ({"pipeline_model_parallel_size": 2}, 0),
    "tp2": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_skips_the_step_on_all(layout):
    options, rank = LAYOUTS[layout]
    ranks = run_ranks(poisoned_steps, 2, options, rank, {2, 3}, 4)
    losses, norms, _, skipped, _ = np.array(ranks[0]["told"], float).T
    assert list(skipped) == [0, 1, 1, 0]
    assert np.isfinite(losses).all(), "the loss alone would not have told"
    assert list(np.isfinite(norms)) == [True, False, False, True]
    for result in ranks:
        assert np.array_equal(np.array(result["told"], float), np.array(ranks[0]["told"], float), equal_nan=True)
        assert result["moved"] == [True, False, False, True] and result["updates"] == 2


#: In CI a pipeline, where one process has no NaN of its own and must be told.
@pytest.mark.parametrize("layout", [pytest.param("dp2", marks=pytest.mark.slow), "pp2"])
def test_too_many_in_a_row_end_the_run_on_all_ranks(layout, tmp_path):
    options, rank = LAYOUTS[layout]
    run = tmp_path / "run"
    options = {**options, "run_dir": str(run), "max_skipped_iterations": 3, "save_interval": 1, "train_iters": 8}
    errors = run_ranks(poisoned_run, 2, options, rank, {2, 4, 5, 6, 7})
    assert (
        errors
        == [
            "loss or gradient was not finite in 3 iterations in a row, up to iteration 6; "
            "lower --lr or raise precision, and continue from the last checkpoint"
        ]
        * 2
    )
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert [row["grad-norm"] is None for row in rows] == [False, True, False, True, True, True]
    assert all(row["lm loss"] > 0 for row in rows) and [row["skipped"] for row in rows] == [0, 1, 1, 2, 3, 4]
    assert newest(run / "checkpoints")[0] == 3, "a resume begins before the trouble, and can leave it out"
    state = read_state(run / "checkpoints", 3)
    assert (state["optimizer_steps"], state["nan_iterations"]) == (2, 1)
    assert read_manifest(run / "checkpoints/iter_0000005").not_finite == ("loss or gradient",)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=pytest.mark.slow)])  # all processes compare
def test_a_plan_that_differs_between_ranks_is_applied_by_none(layout):
    options, _ = LAYOUTS[layout]
    ranks = run_ranks(differing_plans, 2, options)
    for first, second in ranks:
        assert first["metrics"]["snip/solve_failed"] == 1 and "hash differs" in first["metrics"]["snip/solve_error"]
        assert first["metrics"]["snip/plan_hash"] == "" and set(first["precisions"].values()) == {"bf16"}
        assert second["metrics"]["snip/solve_failed"] == 0 and set(second["precisions"].values()) == {"fp4", "fp8"}
    assert len({second["metrics"]["snip/plan_hash"] for _, second in ranks}) == 1
