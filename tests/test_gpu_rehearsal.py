"""The first contact with a GPU, rehearsed on a CPU, so that its first minute does not go to a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(600)
def test_every_step_runs_and_finds_nothing_wrong(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--output", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert {name: step["bad"] for name, step in steps.items()} == {name: [] for name in steps}, done.stderr[-2000:]
    assert done.returncode == 0 and len(steps) == 8
    assert all(step["rows"] for step in steps.values())
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == 8


@pytest.mark.slow
def test_a_layout_of_several_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu_cluster.py"), "--rehearse", "--gpus", "2"]
    command += ["--layout", "tp 2", "--output", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    (step,) = json.loads((tmp_path / "gpu.json").read_text())["steps"].values()
    assert done.returncode == 0 and step["bad"] == [], done.stderr[-2000:]
    (row,) = step["rows"]
    assert row[:2] == ["tp 2", "fp8"] and float(row[2]) > 0 and row[4] == "-", "a CPU's trace has no kernels of NCCL"


def test_what_of_nccl_is_hidden(monkeypatch):
    """Two pieces of communication that touch are one; a copy beside them hides it, nothing else does."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_cluster

    def kernel(name: str, begin: float, end: float, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ts": begin, "dur": end - begin}

    events = [
        kernel("ncclDevKernel_AllGather", 0, 10), kernel("ncclDevKernel_ReduceScatter", 5, 20),
        kernel("ncclDevKernel_AllGather", 30, 40), kernel("cast_kernel", 8, 12), kernel("sm90_gemm", 11, 15),
        kernel("sm90_gemm", 22, 31), kernel("aten::mm", 0, 100, "cpu_op"),
    ]  # fmt: skip
    assert gpu_cluster.nccl(events) == (30.0, 8.0)
    assert gpu_cluster.nccl([]) == (0.0, 0.0)


def test_deep_gemms_operands_are_what_it_multiplies(monkeypatch):
    """A stand-in with its rules: [M, K] by [N, K], contiguous, scales by 128 along K, float32 sums added to c."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_linears

    def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        assert codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn
        rows, columns = (size // blocks for size, blocks in zip(codes.shape, scales.shape, strict=True))
        assert columns == 128
        return codes.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    def fp8_gemm_nt(a, b, d, c=None, recipe=(1, 128, 128)):
        assert (len(a[1]), len(b[1])) == (len(a[0]) // recipe[0], len(b[0]) // recipe[1])
        d.copy_((decoded(*a) @ decoded(*b).T + (0 if c is None else c)).to(d.dtype))

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    x, w, g = (torch.randn(size).bfloat16() for size in ((128, 256), (384, 256), (128, 384)))
    (run,) = gpu_linears._deep_gemm(x, w, g).values()
    for made, exact in zip(run(), (x @ w.T, g @ w, g.T @ x), strict=True):
        assert float((made - exact).float().norm() / exact.float().norm()) < 0.06


def test_what_cannot_run_is_told(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(tmp_path), "--steps", "bits,typo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--steps typo unknown; known: ceilings, bits" in done.stderr
