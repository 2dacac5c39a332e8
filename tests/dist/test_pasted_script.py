"""A Megatron-LM launch script of Llama 3 8B, its options pasted: told what to change, and with that a dry run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_megatron_options import INSTEAD, LEFT_OUT, LLAMA3_8B, without

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(1200)]


def dry_run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "pretrain_llama.py"), *words, "--dry-run", "--dry-run-gemms", "--world-size", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_as_it_is_each_option_is_told_in_one_line(tmp_path: Path) -> None:
    done = dry_run(LLAMA3_8B.split(), tmp_path)
    lines = [line for line in done.stderr.splitlines() if "Megatron-LM options that are not supported here" in line]
    assert done.returncode != 0 and len(lines) == 1
    assert all(f"--{name}" in lines[0] for name in LEFT_OUT.split())
    assert not list(tmp_path.iterdir())


def test_with_these_changes_a_dry_run_counts_the_published_model(tmp_path: Path) -> None:
    done = dry_run([*without(LLAMA3_8B.split(), LEFT_OUT.split()), *INSTEAD.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "iteration, fp8" in done.stdout
    assert "| GEMM 8192 x 14336 x 4096, fp8 " in done.stdout  # gate and up of a sequence of 8192 tokens
    assert "rank 0, pipeline stage 0, holds 1.004e9 parameters" in done.stdout  # an eighth of 8.03e9
    assert not list(tmp_path.iterdir())
