"""A killed run goes on bit for bit: loss, gradient norm, plan, with SNIP on and a solve under way."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.metrics import metrics_file, read_metrics
from tests.dist.helpers.harness import end_ranks, run_ranks, start_ranks
from tests.dist.helpers.kills import run_to_kill

WORLD = 4
OPTIONS = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "global_batch_size": 2,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True, "train_iters": 20,
    "bf16": True, "precision": "snip", "snip_start": 3, "snip_interval": 6, "snip_apply_lag": 3, "save_interval": 2,
    "snip_trials": 2, "snip_trial_tokens": 256,  # BF16 and the solver's plan, which always takes effect
    "eval_interval": 6, "eval_iters": 1, "log_interval": 10, "log_all_ranks": True,
    "preflight": False,
}  # fmt: skip
TIMES = ("iteration-time", "snip/probe_seconds", "snip/wait_seconds", "snip/apply_seconds", "snip/solver_seconds", "snip/trial_seconds")


def options_for(run_dir: Path) -> dict:
    """The same options for the first start and each restart."""
    return {**OPTIONS, "run_dir": str(run_dir), "load": str(run_dir / "checkpoints")}


def timeless(run_dir: Path, rank: int = 0) -> list[dict]:
    """A rank's metrics without what a clock wrote."""
    rows = read_metrics(metrics_file(run_dir, rank))
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def marker(run_dir: Path) -> Path:
    """The file that tells the iteration whose probe is under way, in a run with slow probes."""
    return run_dir.with_name("probing")


@contextmanager
def running(run_dir: Path, slow: str = ""):
    """A run under way on all ranks, killed on leaving if it still goes."""
    with tempfile.TemporaryDirectory() as folder:
        options = options_for(run_dir)
        processes, _ = start_ranks(run_to_kill, WORLD, options, slow, marker(run_dir), folder=folder)
        try:
            yield processes
        finally:
            end_ranks(processes)


def run_to_end(run_dir: Path, **more: object) -> list:
    """A run to its last iteration; what each rank's linears ran in."""
    return run_ranks(run_to_kill, WORLD, {**options_for(run_dir), **more}, "", marker(run_dir))


def wait_for(condition, processes, what: str) -> None:
    """Until the condition holds; AssertionError if the run ends before or it takes too long."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end and all(p.is_alive() for p in processes), f"never came to: {what}"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, run_to_end(run_dir)


@pytest.fixture(scope="module")
def uninterrupted(whole):
    return whole[0]


def assert_equal_runs(run_dir: Path, other: Path) -> None:
    """But for the clock all ranks' metrics are equal, and so are plans and statistics."""
    for rank in range(WORLD):
        assert timeless(run_dir, rank) == timeless(other, rank)
    for kind in ("plans", "stats"):
        ours, theirs = ({p.name: json.loads(p.read_text()) for p in (d / kind).iterdir()} for d in (run_dir, other))
        for plan in (*ours.values(), *theirs.values()):
            plan.get("solver", {}).pop("seconds", None)
        assert ours == theirs and ours, kind


def lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.parametrize("places", [(0, 2, 5, 7), pytest.param(range(10), marks=pytest.mark.slow)], ids=["four", "ten"])
def test_kills_change_nothing(uninterrupted, tmp_path, places):
    run_dir, draw = tmp_path / "run", random.Random(7)
    saves = run_dir / "checkpoints"
    solve_in_flight = lambda i: lambda: (run_dir / f"stats/iter_{i:07d}.json").is_file()  # noqa: E731
    in_save = lambda i: lambda: bool(list(saves.glob(f"iter_{i:07d}.writing-*/.metadata")))  # noqa: E731
    progress = lambda i: lambda: lines(run_dir) >= i  # noqa: E731
    in_probe = lambda i: lambda: marker(run_dir).is_file() and marker(run_dir).read_text() == str(i)  # noqa: E731
    points = [
        ("iteration 1, before any checkpoint", progress(1)),
        ("after the probe of iteration 3", solve_in_flight(3)),
        ("inside the save of iteration 4", in_save(4)),
        ("iteration 5", progress(5)),
        ("inside the save of iteration 8", in_save(8)),
        ("after the probe of iteration 9", solve_in_flight(9)),
        ("iteration 11, the solve's checkpoint loaded", progress(11)),
        ("inside the probe of iteration 15", in_probe(15)),
        ("iteration 16, with the third solve in flight", progress(16)),
        ("iteration 19", progress(19)),
    ]
    for what, condition in [points[place] for place in places]:
        slow = next((place for place in ("save", "probe") if f"inside the {place}" in what), "")
        with running(run_dir, slow) as processes:
            wait_for(condition, processes, what)
            if not slow:
                time.sleep(draw.uniform(0.0, 0.25))
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
        if slow == "save":
            assert list(saves.glob("*.writing-*")), f"{what}: the kill came too late to be in the save"
        if slow == "probe":
            assert lines(run_dir) == 15, f"{what}: the kill came too late to be in the probe"
            assert not (run_dir / "stats/iter_0000015.json").exists()
    run_to_end(run_dir)
    assert_equal_runs(run_dir, uninterrupted)


def test_uninterrupted_run_planned_and_learned(uninterrupted):
    rows = timeless(uninterrupted)
    assert [row["iteration"] for row in rows] == list(range(21))
    assert rows[0].keys() == {"iteration", "lm loss validation", "lm loss validation ppl"}
    assert len({row["snip/plan_hash"] for row in rows[1:]} - {""}) == 3
    assert rows[-1]["lm loss"] < rows[1]["lm loss"] - 0.5


def test_every_rank_changes_plan_at_the_same_iteration(whole):
    """By the hashes in the metrics of each, and by what its linears ran in."""
    run_dir, held = whole
    applied = {probed + OPTIONS["snip_apply_lag"] for probed in (3, 9, 15)}
    plans = {plan.iteration: plan for plan in map(Plan.load, (run_dir / "plans").iterdir())}
    assert plans.keys() == applied and len({plan.hash for plan in plans.values()}) == 3
    for rank, precisions in enumerate(held):
        hashes = {row["iteration"]: row["snip/plan_hash"] for row in timeless(run_dir, rank) if row["iteration"]}
        assert list(hashes) == list(range(1, OPTIONS["train_iters"] + 1)), rank
        for i, told in hashes.items():
            plan = plans.get(max((a for a in applied if a <= i), default=0))
            assert told == (plan.hash if plan else ""), (rank, i)
            assert precisions[i] == {name: str(plan.linears[name]) if plan else "bf16" for name in precisions[i]}
    assert {name for precisions in held for name in precisions[1]} == plans[6].linears.keys()


def test_sigterm_saves_and_leaves(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    with running(run_dir) as processes:
        wait_for(lambda: lines(run_dir) >= 5, processes, "iteration 5")
        os.kill(processes[1].pid, signal.SIGTERM)  # one rank hears it, all leave
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    left_at = read_metrics(run_dir / "metrics.jsonl")[-1]["iteration"]
    assert left_at < OPTIONS["train_iters"]
    assert (run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == str(left_at)
    run_to_end(run_dir, preflight=True)
    assert_equal_runs(run_dir, uninterrupted)
