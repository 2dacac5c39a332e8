"""Checkpoints of several processes: any layout loads any other's, damage and full disks of one are everybody's."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_snip.checkpoint.lock import LOCK
from megatron_snip.checkpoint.manifest import iterations, read_manifest
from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.harness import end_ranks, run_ranks, start_ranks
from tests.dist.helpers.runs import error_of_run, run_with_full_disk, train_run

SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256}
OPTIONS = {
    **SMALL, "global_batch_size": 2, "train_iters": 5, "lr_decay_iters": 8, "log_interval": 100,
}  # fmt: skip
#: Enough for two processes' pieces of a sequence, and for four of a batch.
LONG = {"seq_length": 512, "global_batch_size": 4}
LONE: dict = {}
TP2_CP2 = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}


def losses(run_dir: Path) -> list[float]:
    return [row["lm loss"] for row in read_metrics(run_dir / "metrics.jsonl")]


def options_for(run_dir: Path, **more: object) -> dict:
    return {**OPTIONS, "run_dir": str(run_dir), "load": str(run_dir / "checkpoints"), **more}


@pytest.fixture(scope="module")
def lone_losses(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(train_run, 1, options_for(run_dir, **LONG, train_iters=10))
    return losses(run_dir)


def test_a_run_moves_between_layouts(lone_losses, tmp_path):
    """1 x 1 x 1, tp2 x pp2, tp2 x cp2, dp4 and back, every other one saving in the background."""
    run_dir = tmp_path / "run"
    layouts = [(1, LONE), (4, TP2_PP2), (4, TP2_CP2), (4, LONE), (1, LONE)]
    for number, (world, layout) in enumerate(layouts, start=1):
        leave = {"exit_interval": 2 * number} if number < len(layouts) else {}
        options = {**LONG, **layout, **leave, "train_iters": 10, "async_save": number % 2 == 0}
        run_ranks(train_run, world, options_for(run_dir, **options))
        assert len(losses(run_dir)) == 2 * number
        manifest = read_manifest(run_dir / f"checkpoints/iter_{2 * number:07d}")
        sizes = list(manifest.sizes().values())
        assert len(sizes) == world, "every process writes a file"
        assert max(sizes) < 1.6 * sum(sizes) / world, "of about its share"
    np.testing.assert_allclose(losses(run_dir), lone_losses, rtol=0, atol=1e-4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def losses_of_four(tmp_path_factory):
    """Of tp2 x pp2, undisturbed."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    run_ranks(train_run, 4, options_for(run_dir, **TP2_PP2))
    return losses(run_dir)


def test_a_damaged_shard_is_passed_over_by_all(losses_of_four, tmp_path):
    """The ranks that read it tell the others; they go on alike from the one before."""
    run_dir = tmp_path / "run"
    layout = {**TP2_PP2, "log_all_ranks": True, "save_interval": 1}
    run_ranks(train_run, 4, options_for(run_dir, **layout, exit_interval=4))
    flip(run_dir / "checkpoints/iter_0000004/__3_0.distcp")
    run_ranks(train_run, 4, options_for(run_dir, **layout))
    assert losses(run_dir) == losses_of_four
    assert iterations(run_dir / "checkpoints") == [5, 4, 3, 2, 1]
    (aside,) = (run_dir / "checkpoints").glob("*.before-*")
    assert aside.name.startswith("iter_0000004")


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_of_one_process(async_save, tmp_path):
    """All go on, and the next save tries again; nothing half is left."""
    run_dir = tmp_path / "run"
    options = options_for(run_dir, **TP2_PP2, save_interval=1, async_save=async_save)
    told = run_ranks(run_with_full_disk, 4, options, 2, {2, 3})
    for lines in told:
        assert len(lines) == 2 and all("failed on rank 2 ([Errno 28] No space left" in line for line in lines)
    assert iterations(run_dir / "checkpoints") == [5, 4, 1]
    assert len(losses(run_dir)) == 5


def test_two_runs_on_one_folder(tmp_path):
    """The second is refused while the first goes, whether a checkpoint is there or not."""
    saves = str(tmp_path / "saves")
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "train_iters": 10_000, "run_dir": str(tmp_path / "one"), "save": saves}
        processes, _ = start_ranks(train_run, 2, options, folder=folder)
        try:
            end = time.monotonic() + 60
            while not (tmp_path / "saves" / LOCK).is_file():
                assert time.monotonic() < end
                time.sleep(0.02)
            said = run_ranks(error_of_run, 1, {**OPTIONS, "run_dir": str(tmp_path / "two"), "save": saves})[0]
        finally:
            end_ranks(processes)
    assert said.startswith(f"{saves} belongs to run ") and said.endswith("wait until it ends, or give another --save")
    assert not (tmp_path / "two/metrics.jsonl").exists()
    run_ranks(train_run, 1, {**OPTIONS, "run_dir": str(tmp_path / "two"), "save": saves})  # killed runs keep nothing
    assert iterations(tmp_path / "saves") == [5]


def test_a_kill_while_saving_in_the_background(losses_of_four, tmp_path):
    """What follows is a run that was never killed."""
    run_dir = tmp_path / "run"
    layout = {**TP2_PP2, "async_save": True, "save_interval": 1}
    for kill_at in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            processes, _ = start_ranks(train_run, 4, options_for(run_dir, **layout), folder=folder)
            try:
                end = time.monotonic() + 60
                while not list((run_dir / "checkpoints").glob(f"iter_{kill_at:07d}*")):
                    assert time.monotonic() < end and all(process.is_alive() for process in processes)
                    time.sleep(0.001)
                for process in processes:
                    os.kill(process.pid, signal.SIGKILL)
            finally:
                end_ranks(processes)
    run_ranks(train_run, 4, options_for(run_dir, **layout))
    assert losses(run_dir) == losses_of_four
