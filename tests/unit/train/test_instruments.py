"""Profiles, memory and garbage collection change no number of a run."""

from __future__ import annotations

import gc
import gzip
import json

import pytest
import torch

from megatron_snip.config import Config, LoggingConfig
from megatron_snip.train import instruments
from megatron_snip.train.run.metrics import progress_line


def losses(rows: list[dict]) -> list[float]:
    return [row["lm loss"] for row in rows]


@pytest.fixture
def collections(monkeypatch):
    """How often garbage was collected by hand."""
    seen: list[None] = []
    monkeypatch.setattr(instruments.gc, "collect", lambda: seen.append(None))
    yield seen
    gc.enable()


def test_a_run_with_all_of_them_is_the_same(train_here, tmp_path, collections):
    plain = train_here(run_dir=str(tmp_path / "plain"))
    assert not collections and not (tmp_path / "plain/profile").exists()
    watched = train_here(
        manual_gc=True, manual_gc_interval=2, log_memory=True, profile=True, profile_step_start=2, profile_step_end=3,
        deterministic_mode=True,
    )  # fmt: skip
    assert losses(watched) == losses(plain)
    assert len(collections) == 3 and gc.isenabled(), "at the start, after iterations 2 and 4"
    assert all(row["mem-max-resident-bytes"] > 1 << 20 for row in watched)
    assert not any("mem" in key for row in plain for key in row)
    (trace,) = (tmp_path / "run/profile").iterdir()
    assert trace.name == "rank_0000_iter_0000002_0000003.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2


def test_the_collector_is_off_in_between(train_here, monkeypatch, collections):
    seen = []
    after = instruments.Instruments.after_step
    monkeypatch.setattr(
        instruments.Instruments, "after_step", lambda self, i: seen.append(gc.isenabled()) or after(self, i)
    )
    train_here(manual_gc=True)
    assert seen == [False] * 4 and len(collections) == 1


def test_other_ranks_and_a_run_that_ends_early(train_here, tmp_path):
    train_here(profile=True, profile_ranks=(), profile_step_start=1, profile_step_end=2)
    assert not (tmp_path / "run/profile").exists()
    train_here(run_dir=str(tmp_path / "early"), profile=True, profile_step_start=4, profile_step_end=9)
    assert [path.name for path in (tmp_path / "early/profile").iterdir()] == ["rank_0000_iter_0000004_0000004.json.gz"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("TPU", None),
    ],
)
def test_a_devices_peak(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert instruments.peak_tflops(torch.device("cuda", 0)) == peak
    assert instruments.peak_tflops(torch.device("cpu")) is None


def test_mfu_stands_beside_tflops():
    row = {"iteration": 1, "consumed-samples": 1, "iteration-time": 1.0, "learning-rate": 1.0, "batch-size": 1}
    row |= {"lm loss": 1.0, "grad-norm": 1.0}
    line = progress_line(row, 2, nan_iterations=0, tokens=1, left=0, tflops=400.0, peak=800.0)
    assert "throughput per GPU (TFLOP/s/GPU): 400.0 | MFU (%): 50.0 |" in line
    assert "MFU" not in progress_line(row, 2, nan_iterations=0, tokens=1, left=0, tflops=400.0)


def test_a_rewind_within_the_profile_goes_on_with_it(tmp_path):
    config = Config(
        logging=LoggingConfig(run_dir=str(tmp_path), profile=True, profile_step_start=2, profile_step_end=3)
    )
    tools = instruments.Instruments(config, 0, torch.device("cpu"))
    for iteration in (2, 2, 3):  # iteration 2 again, as after the guard has gone back
        tools.before_step(iteration)
        torch.ones(3).sin()
        tools.after_step(iteration)
    tools.close(3)
    (trace,) = (tmp_path / "profile").iterdir()
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert trace.name == "rank_0000_iter_0000002_0000003.json.gz" and names.count("aten::sin") == 3
