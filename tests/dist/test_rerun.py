"""A suspicious iteration runs again: the device is told from the data, and training goes on with the right bits."""

from __future__ import annotations

import socket
import tempfile

import pytest
import torch

from megatron_snip.train.run.state_file import read_state
from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.harness import end_ranks, run_ranks, start_ranks
from tests.dist.helpers.troubles import Trouble, troubled_program, troubled_run

LAYOUTS = {
    "one": ({}, 1),
    "dp2": ({}, 2),
    "tp2 x pp2": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}, 4
    ),
}  # fmt: skip
OPTIONS = {
    "global_batch_size": 2, "train_iters": 8, "spike_window": 4, "spike_nats": 0.2, "lr_warmup_iters": 0,
    "precision": "fp4",
}  # fmt: skip
RERUN = ("rerun/reruns", "rerun/differed", "rerun/suspects")


def run(layout: str, tmp_path, *troubles: Trouble, name: str = "run", **more):
    """What the ranks return, and rank 0's metrics without the clock."""
    options, world = LAYOUTS[layout]
    run_dir = tmp_path / name
    ranks = run_ranks(troubled_run, world, {**OPTIONS, **options, "run_dir": str(run_dir), **more}, *troubles)
    rows = [{k: v for k, v in row.items() if k != "iteration-time"} for row in read_metrics(run_dir / "metrics.jsonl")]
    return ranks, rows


def assert_equal(ranks, others) -> None:
    for one, other in zip(ranks, others, strict=True):
        assert one["tensors"].keys() == other["tensors"].keys() and one["error"] == other["error"] == ""
        for name, tensor in one["tensors"].items():
            assert torch.equal(tensor, other["tensors"][name]), name


def without_rerun(rows):
    return [{key: value for key, value in row.items() if key not in RERUN} for row in rows]


#: (kind, rank that breaks) -> ranks that are suspected
SUSPECTS = {
    "one": {("forward", 0): [0], ("backward", 0): [0]},
    "dp2": {("forward", 1): [1], ("backward", 1): [0, 1]},
    "tp2 x pp2": {("forward", 3): [0, 1, 2, 3], ("backward", 1): [1]},
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "tp2 x pp2"))])
def test_a_fault_that_comes_once_leaves_no_trace(layout, tmp_path):
    """Weights and moments are those of a run without it, so no gradient was added twice."""
    plain, plain_rows = run(layout, tmp_path, name="plain", rerun_mode="disabled")
    on, on_rows = run(layout, tmp_path, name="on")
    assert_equal(on, plain)
    assert on_rows == plain_rows, "nothing was suspicious"
    for (kind, rank), suspected in SUSPECTS[layout].items():
        trouble = Trouble(kind, range(6, 7), rank, times=1)
        ranks, rows = run(layout, tmp_path, trouble, name=kind)
        assert_equal(ranks, plain)
        assert without_rerun(rows) == plain_rows
        assert [row["iteration"] for row in rows if "rerun/reruns" in row] == [6]
        names = ", ".join(f"rank {r} (host {socket.gethostname()})" for r in suspected)
        who = f"one of {names}" if len(suspected) > 1 else names
        assert [rows[5][key] for key in RERUN] == [1, 1, who]
        (line,) = [line for line in ranks[0]["log"] if "again" in line]
        assert line.endswith(f"the second result counts, suspect {who}") and line.startswith("iteration 6: loss ")
        assert {"forward": "the loss differs", "backward": "the gradient of layers.0."}[kind] in line


@pytest.mark.dist
@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "tp2 x pp2"])  # four show what one does
def test_bad_data_gives_the_same_again_and_counts(layout, tmp_path):
    trouble = Trouble("data", range(7, 8))
    more = {"train_iters": 9, "lr": 3e-3, "save_interval": 9, "spike_deviations": 2.0}
    plain, plain_rows = run(layout, tmp_path, trouble, name="plain", rerun_mode="disabled", **more)
    ranks, rows = run(layout, tmp_path, trouble, **more)
    assert_equal(ranks, plain)
    assert without_rerun(rows) == plain_rows and rows[6]["lm loss"] > rows[5]["lm loss"] + 0.2
    assert [rows[6].get(key) for key in RERUN] == [1, 0, None] and "rerun/reruns" not in rows[7]
    (line,) = [line for line in ranks[0]["log"] if "when repeated" in line]
    assert "the data or the model is to blame; the microbatch of samples " in line
    first, last = (int(line.split("of samples ")[1].split()[i]) for i in (0, 2))
    assert 12 <= first == last < 14, "two samples an iteration, one a microbatch"
    assert read_state(tmp_path / "run/checkpoints", 9)["rerun"] == {"reruns": 1, "differed": 0}


@pytest.mark.dist
def test_nan_that_stays_is_skipped_as_ever(tmp_path):
    layout, trouble = "tp2 x pp2", Trouble("backward", range(3, 5), 1)
    ranks, rows = run(layout, tmp_path, trouble, train_iters=5)
    plain, plain_rows = run(layout, tmp_path, trouble, name="plain", rerun_mode="disabled", train_iters=5)
    assert_equal(ranks, plain)
    assert without_rerun(rows) == plain_rows and [row["skipped"] for row in rows] == [0, 0, 1, 2, 2]
    assert [row.get("rerun/reruns") for row in rows] == [None, None, 1, 2, None]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["one", "tp2 x pp2"])
def test_a_device_that_goes_wrong_again_ends_the_run(layout, tmp_path):
    """By one line with rank and host, and an exit status of its own, on every rank."""
    options, world = LAYOUTS[layout]
    trouble = Trouble("forward", range(6, 7), world - 1)
    options = {**OPTIONS, **options, "run_dir": str(tmp_path / "run")}
    with tempfile.TemporaryDirectory() as folder:
        processes, _ = start_ranks(troubled_program, world, options, str(tmp_path), trouble, folder=folder)
        try:
            for process in processes:
                process.join(100)
            assert [process.exitcode for process in processes] == [17] * world
        finally:
            end_ranks(processes)
    (line,) = [line for line in (tmp_path / "err0").read_text().splitlines() if line.startswith("error")]
    host = socket.gethostname()
    who = f"rank 0 (host {host})" if world == 1 else "one of " + ", ".join(f"rank {r} (host {host})" for r in range(4))
    assert line.startswith("error: iteration 6: loss ") and f"a device computes wrongly, {who}; take" in line
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 5
