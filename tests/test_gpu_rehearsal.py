"""The first contact with a GPU, rehearsed on a CPU, so that its first minute does not go to a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_runs_and_finds_nothing_wrong(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--output", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert {name: step["bad"] for name, step in steps.items()} == {name: [] for name in steps}, done.stderr[-2000:]
    assert done.returncode == 0 and len(steps) == 7
    assert all(step["rows"] for step in steps.values())
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == 7


def test_what_cannot_run_is_told(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(tmp_path), "--steps", "bits,typo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--steps typo unknown; known: ceilings, bits" in done.stderr
