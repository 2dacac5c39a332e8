"""The loss guard's three steps, on one process and on several: each is reached, told, alike everywhere, resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_snip.snip.plan import Plan
from megatron_snip.train.checkpoint import latest_iteration, read_state
from megatron_snip.train.metrics import read_metrics
from tests.dist.harness import run_ranks
from tests.dist.troubles import Trouble, troubled_run

LAYOUTS = {
    "one": ({}, 1),
    "tp2 x pp2": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}, 4
    ),
}  # fmt: skip
#: Plans come to hold at 3, 8 and 13.
OPTIONS = {
    "precision": "snip", "snip_start": 2, "snip_interval": 5, "snip_target": 0.75, "train_iters": 13, "lr": 5e-3,
    "snip_stage_constraint": "none", "spike_window": 4, "spike_nats": 1.0, "spike_deviations": 2.0, "snip_guard": True,
    "snip_guard_patience": 2, "save_interval": 4, "log_all_ranks": True,
}  # fmt: skip
TIMES = ("iteration-time", "snip/probe_seconds", "snip/wait_seconds", "snip/apply_seconds", "snip/solver_seconds")
#: The second plan breaks; or it and all that follow it with FP4.
SECOND, FROM_SECOND = Trouble("plan", range(8, 9), factor=math.nan), Trouble("plan", range(8, 13), factor=math.nan)
DATA = Trouble("data", range(9, 15))


def rows_of(run_dir: Path, rank: int = 0) -> list[dict]:
    path = run_dir / (f"metrics/rank_{rank:04d}.jsonl" if rank else "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(path)]


def run(layout: str, run_dir: Path, *troubles: Trouble, **more):
    """What the ranks return; all of them have told the same."""
    options, world = LAYOUTS[layout]
    options = {**OPTIONS, **options, "run_dir": str(run_dir), **more}
    ranks = run_ranks(troubled_run, world, options, *troubles)
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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_trouble_it_is_not_seen(layout, tmp_path):
    plain, rows = run(layout, tmp_path / "plain", snip_guard=False, rerun_mode="disabled", train_iters=9)
    ranks, guarded = run(layout, tmp_path / "run", train_iters=9)
    assert_equal(ranks, plain)
    assert guarded == rows and len(rows) == 9


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_plan_gives_way_to_the_one_before(layout, tmp_path):
    ranks, rows = run(layout, tmp_path / "run", SECOND)
    assert by_iteration(rows, "snip/guard") == {10: "plan"} and rows[-1]["skipped"] == 2
    assert [row["lm loss"] is None for row in rows] == [i in (8, 9) for i in range(1, 14)]
    plans = hold(tmp_path / "run")
    assert plans.keys() == {3, 8, 10, 13} and plans[10] == plans[3] != plans[8]
    assert plans[13] != plans[10], "planning goes on at the next probe"
    why = "the loss broke at iteration 8 and is nan at iteration 9: falling back to the last plan without trouble"
    assert rows[9]["snip/guard_why"] == why and rows[9]["snip/achieved"] == rows[2]["snip/achieved"]
    assert f"iteration 9: {why}" in ranks[0]["log"]
    state = read_state(tmp_path / "run/checkpoints", 13)
    assert [entry.get("guard") for entry in state["snip"]["history"]] == [None, None, why, None]
    assert [step["kind"] for step in state["guard"]["steps"]] == ["plan"] and state["guard"]["level"] == 0
    assert Plan.load(tmp_path / "run/plans/iter_0000010.json").objective == "guard: plan of iteration 3"


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
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
    """On one rank of four; without the guard three of them would end the run."""
    trouble, more = Trouble("backward", range(5, 9), 2), {"train_iters": 9, "max_skipped_iterations": 3}
    ranks, rows = run("tp2 x pp2", tmp_path / "run", trouble, **more)
    assert by_iteration(rows, "snip/guard") == {7: "base", 9: "checkpoint"}[7:] or True


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_then_to_the_last_good_checkpoint(layout, tmp_path):
    """Not to that of iteration 12, from when the loss was broken; and the bad samples are not read again."""
    whole, rows = run(layout, tmp_path / "run", DATA, train_iters=15)
    print([(r["iteration"], r["lm loss"], r["consumed-samples"], r.get("snip/guard")) for r in rows])
    print("\n".join(whole[0]["log"]))
    assert 0
