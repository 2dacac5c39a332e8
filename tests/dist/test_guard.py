"""The loss guard's three steps, on one process and on several: each is reached, told, alike everywhere, resumed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.checkpoint.manifest import newest
from megatron_snip.train.run.state_file import read_state
from megatron_snip.train.run.metrics import metrics_file, read_metrics
from tests.unit.checkpoint.conftest import prove
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.troubles import Trouble, slow_disk_run, troubled_run

LAYOUTS = {
    "one": ({}, 1),
    "tp2 x pp2": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}, 4
    ),
    "tp2": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pp2 x dp2": ({"pipeline_model_parallel_size": 2}, 4),
}  # fmt: skip
#: Several processes show what one does; what does not depend on them runs on one by default.
SEVERAL = pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "tp2 x pp2"])
ONE = pytest.mark.parametrize("layout", ["one", pytest.param("tp2 x pp2", marks=pytest.mark.slow)])
#: Plans come to hold at 3, 8 and 13.
OPTIONS = {
    "precision": "snip", "snip_granularity": "linear", "snip_start": 2, "snip_interval": 5, "snip_target": 0.75, "train_iters": 13, "lr": 5e-3,
    "snip_stage_constraint": "none", "spike_window": 7, "spike_nats": 1.0, "spike_deviations": 1.0, "snip_guard": True,
    "snip_guard_patience": 2, "save_interval": 4, "log_all_ranks": True, "snip_trials": 0, "micro_batch_size": 2,
}  # fmt: skip
TIMES = ("iteration-time", "snip/probe_seconds", "snip/wait_seconds", "snip/apply_seconds", "snip/solver_seconds", "snip/trial_seconds")
#: The second plan breaks; or it and all that follow it with FP4.
SECOND, FROM_SECOND = Trouble("plan", range(8, 9), factor=math.nan), Trouble("plan", range(8, 13), factor=math.nan)
DATA, DATA_OF_TWO = Trouble("data", range(9, 15)), Trouble("data", range(9, 11))


def rows_of(run_dir: Path, rank: int = 0) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(metrics_file(run_dir, rank))]


def run(layout: str, run_dir: Path, *troubles: Trouble, program=troubled_run, **more):
    """What the ranks return; all of them have told the same."""
    options, world = LAYOUTS[layout]
    options = {**OPTIONS, **options, "run_dir": str(run_dir), **more}
    ranks = run_ranks(program, world, options, *troubles, seconds=240.0)
    told = ("iteration", "lm loss", "snip/plan_hash", "snip/guard", "snip/guard_why", "skipped", "consumed-samples")
    rows = rows_of(run_dir)
    for rank in range(1, world):
        assert [[row.get(k) for k in told] for row in rows_of(run_dir, rank)] == [[r.get(k) for k in told] for r in rows]
    return ranks, rows


def by_iteration(rows: list[dict], key: str) -> dict[int, object]:
    return {row["iteration"]: row[key] for row in rows if key in row}


def assert_equal(ranks, others) -> None:
    for one, other in zip(ranks, others, strict=True):
        assert one["precisions"] == other["precisions"] and one["error"] == other["error"] == ""
        for name, tensor in one["tensors"].items():
            assert torch.equal(tensor, other["tensors"][name]), name


def hold(run_dir: Path) -> dict[int, dict[str, str]]:
    """Plan files: iteration -> precisions."""
    plans = map(Plan.load, (run_dir / "plans").glob("iter_*.json"))
    return {plan.iteration: {name: str(p) for name, p in plan.linears.items()} for plan in plans}


@pytest.mark.dist
@ONE
def test_without_trouble_it_is_not_seen(layout, tmp_path):
    plain, rows = run(layout, tmp_path / "plain", snip_guard=False, rerun_mode="disabled", train_iters=9)
    ranks, guarded = run(layout, tmp_path / "run", train_iters=9)
    assert_equal(ranks, plain)
    assert guarded == rows and len(rows) == 9


@pytest.mark.dist
@SEVERAL
def test_a_bad_plan_gives_way_to_the_one_before(layout, tmp_path):
    ranks, rows = run(layout, tmp_path / "run", SECOND)
    assert by_iteration(rows, "snip/guard") == {10: "plan"} and rows[-1]["skipped"] == 2
    assert [row["lm loss"] is None for row in rows] == [i in (8, 9) for i in range(1, 14)]
    plans = hold(tmp_path / "run")
    assert plans.keys() == {3, 8, 10, 13} and plans[10] == plans[3] != plans[8]
    assert plans[13] != plans[10], "planning goes on at the next probe"
    why = "broken since iteration 8, loss nan, gradient norm nan: falling back to the last plan without trouble"
    assert rows[9]["snip/guard_why"] == why and rows[9]["snip/achieved"] == rows[2]["snip/achieved"]
    assert f"iteration 9: {why}" in ranks[0]["log"]
    state = read_state(tmp_path / "run/checkpoints", 13)
    assert [entry.get("guard") for entry in state["snip"]["history"]] == [None, None, why, None]
    assert [step["kind"] for step in state["guard"]["steps"]] == ["plan"] and state["guard"]["level"] == 0
    assert Plan.load(tmp_path / "run/plans/iter_0000010.json").objective == "guard: plan of iteration 3"


@pytest.mark.dist
@ONE
def test_then_to_the_base_option(layout, tmp_path):
    """The solve under way, whose plan was due at 13, goes on: the step was before its probe."""
    _, rows = run(layout, tmp_path / "run", FROM_SECOND)
    assert by_iteration(rows, "snip/guard") == {10: "plan", 12: "base"}
    assert [row["skipped"] for row in rows[6:]] == [0, 1, 2, 3, 4, 4, 4]
    plans = hold(tmp_path / "run")
    assert set(plans[12].values()) == {"fp8"} and rows[11]["snip/achieved"] == 0
    assert plans.keys() == {3, 8, 10, 12, 13}


@pytest.mark.dist
def test_nan_gradients_in_a_row_take_steps_too(tmp_path):
    """On one rank; without the guard three of them would end the run."""
    trouble, more = Trouble("backward", range(5, 9), 1), {"train_iters": 9, "max_skipped_iterations": 3}
    ranks, rows = run("tp2", tmp_path / "run", trouble, **more)
    assert [one["error"] for one in ranks] == ["", ""]
    assert by_iteration(rows, "snip/guard") == {7: "base"} and rows[-1]["skipped"] == 4
    assert "broken since iteration 5, loss 5." in rows[6]["snip/guard_why"] and "norm nan" in rows[6]["snip/guard_why"]
    (error,) = {one["error"] for one in run("tp2", tmp_path / "off", trouble, snip_guard=False, **more)[0]}
    assert error.startswith("UserError: loss or gradient was not finite in 3 iterations in a row, up to iteration 7")


@pytest.mark.dist
def test_where_no_step_is_left_the_run_ends_as_ever(tmp_path):
    trouble = Trouble("backward", range(3, 99))
    more = {"precision": "bf16", "save_interval": None, "max_skipped_iterations": 5}
    (one,), rows = run("one", tmp_path / "run", trouble, **more)
    assert one["error"].startswith("UserError: loss or gradient was not finite in 5 iterations in a row, up to iteration 7")
    assert by_iteration(rows, "snip/guard") == {5: "none", 7: "none"}
    assert rows[4]["snip/guard_why"].endswith("no step is left, so the current precision stays")


@pytest.mark.dist
@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "tp2"])
def test_a_checkpoint_that_is_being_written_is_waited_for(layout, tmp_path):
    """Otherwise the disk's pace would decide how far the run goes back."""
    more = {"precision": "bf16", "train_iters": 12, "save_interval": 8}
    _, rows = run(layout, tmp_path / "run", DATA_OF_TWO, **more)
    _, late = run(layout, tmp_path / "late", DATA_OF_TWO, program=slow_disk_run, **more)
    assert "iteration 8, past" in by_iteration(rows, "snip/guard_why")[9] and late == rows


@pytest.mark.dist
def test_the_checkpoint_before_a_damaged_one_can_be_gone_back_to(tmp_path):
    """In another folder than --save, of which that one alone counts: the one that was read, not the one looked for."""
    more, first = {"precision": "bf16"}, tmp_path / "first/checkpoints"
    run("one", tmp_path / "first", train_iters=8, **more)
    shard = first / "iter_0000008/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[::-1])
    _, rows = run("one", tmp_path / "run", Trouble("backward", range(6, 8)), load=str(first), train_iters=9, **more)
    assert by_iteration(rows, "snip/guard")[5] == "checkpoint" and rows[0]["snip/guard_why"].endswith(
        "going back to the checkpoint of iteration 4, past the samples read since"
    )


@pytest.mark.dist
def test_a_checkpoint_that_gave_its_weights_alone_is_none_to_go_back_to(tmp_path):
    """It is another run's, here of an iteration that this run has saved too and no longer keeps."""
    more = {"precision": "bf16", "train_iters": 8}
    run("one", tmp_path / "other", **more)
    weights = {"load": str(tmp_path / "other/checkpoints"), "finetune": True, "save_interval": 1, "keep_last": 1}
    _, rows = run("one", tmp_path / "run", DATA_OF_TWO, **{**more, **weights, "train_iters": 12})
    assert by_iteration(rows, "snip/guard") == {11: "none"} and [row["iteration"] for row in rows] == list(range(1, 13))


@pytest.mark.dist
@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "pp2 x dp2"])
def test_going_back_is_a_fresh_start_from_the_checkpoint_past_the_samples(layout, tmp_path):
    """Bit for bit; the validation after iteration 10 has left the pipeline's old weights gathered."""
    more = {"precision": "bf16", "train_iters": 12, "eval_interval": 5, "eval_iters": 1, "micro_batch_size": 1}
    there, back = tmp_path / "run", tmp_path / "fresh"
    ranks, rows = run(layout, there, DATA_OF_TWO, **more)
    assert by_iteration(rows, "snip/guard") == {9: "checkpoint"}
    assert [row["iteration"] for row in rows] == list(range(13)), "rows of what was rolled back are cut"
    assert [row.get("consumed-samples") for row in rows[8:]] == [32, 44, 48, 52, 56]
    state = read_state(there / "checkpoints", 12)
    assert (state["data_skipped"], state["consumed_samples"], state["optimizer_steps"]) == (8, 56, 12)
    shutil.copytree(there / "checkpoints/iter_0000008", back / "checkpoints/iter_0000008")
    (back / "checkpoints/latest_checkpointed_iteration.txt").write_text("8")
    path = back / "checkpoints/iter_0000008/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_skipped": 8, "consumed_samples": 40, "guard": None}))
    prove(path)
    fresh, again = run(layout, back, load=str(back / "checkpoints"), **more)
    assert_equal(ranks, fresh)
    assert [row["lm loss"] for row in again] == [row["lm loss"] for row in rows[9:]]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "leave"), [("one", [8, *[1] * 7]), pytest.param("tp2 x pp2", [5, 5], marks=pytest.mark.slow)]
)
def test_all_three_steps_and_a_resume_in_the_middle(layout, leave, tmp_path):
    """Noise for six iterations, whatever the plan.  Iteration 12 is saved while the loss is broken: not a good one.

    The run in pieces leaves before the noise, after each of its iterations, and after the last step's first; or at
    10, where a step has been decided and not yet applied.
    """
    ranks, rows = run(layout, tmp_path / "run", DATA, train_iters=15)
    assert [row["iteration"] for row in rows] == list(range(1, 16)) and rows[-1]["lm loss"] < 5
    assert by_iteration(rows, "snip/guard") == {9: "checkpoint"} and rows[8]["snip/guard_steps"] == 3
    assert [row["consumed-samples"] for row in rows[7:10]] == [32, 60, 64]
    state = read_state(tmp_path / "run/checkpoints", 15)
    kinds = [(step["kind"], step["iteration"], step["checkpoint"]) for step in state["guard"]["steps"]]
    assert kinds == [("plan", 10, None), ("base", 12, None), ("checkpoint", 14, 8)]
    plans = hold(tmp_path / "run")
    assert plans.keys() == {3, 8, 9, 13} and set(plans[9].values()) == {"fp8"}
    pieces, saves = tmp_path / "pieces", tmp_path / "pieces/checkpoints"
    for interval in [*leave, None]:
        assert newest(saves)[0] != 15
        again, got = run(layout, pieces, DATA, train_iters=15, load=str(saves), exit_interval=interval)
    assert_equal(again, ranks)
    assert got == rows and hold(pieces) == plans


#: From iteration 10 on.
FINAL = {"snip_final_precision": "bf16/plan/plan", "snip_final_iters": 31, "train_iters": 40}


@pytest.mark.dist
def test_after_the_late_switch_the_steps_come_to_an_end(tmp_path):
    """A plan to fall back to is switched, too: as it would be at once, it must not count as another one."""
    (one,), rows = run("one", tmp_path / "run", Trouble("backward", range(10, 99)), **FINAL, max_skipped_iterations=6)
    kinds = by_iteration(rows, "snip/guard")
    assert kinds.pop(9) == "checkpoint" and list(kinds.values())[-2:] == ["none"] * 2
    assert one["error"].startswith("UserError: loss or gradient was not finite in 6 iterations in a row, up to iteration")
    assert rows[-1]["iteration"] < 30 and {one.split("/")[0] for one in hold(tmp_path / "run")[10].values()} == {"bf16"}


@pytest.mark.dist
def test_before_the_late_switch_a_format_is_as_given_again(tmp_path):
    """Of a run that went back from behind the switch."""
    more, found = {"precision": "fp4", "train_iters": 12}, {}
    for name, switch in (("run", {**FINAL, "snip_final_iters": 3}), ("without", {})):
        _, rows = run("one", tmp_path / name, Trouble("backward", range(11, 13), times=8), **{**switch, **more})
        assert by_iteration(rows, "snip/guard")[9] == "checkpoint"
        found[name] = by_iteration(rows, "lm loss")
    assert found["run"][9] == found["without"][9] and found["run"][11] != found["without"][11]
