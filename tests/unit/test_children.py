"""Processes that we start run our own code, whatever lies in the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 1 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 128 --vocab-size 128 "
    "--global-batch-size 1 --train-iters 1 --mock-data"
)
SOLVE = """
from megatron_snip.snip.plan.solver import BackgroundSolver, SolveRequest
import numpy as np
with BackgroundSolver(SolveRequest(np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]]), 0.5)) as solver:
    assert solver.result().choice.tolist() == [1]
"""
READ = """
from megatron_snip.data.sampling import MockDataset
from megatron_snip.data.workers import Workers
import numpy as np
data = MockDataset(128, 8, 4)
workers = Workers([data], 1)
assert (workers.read(data, np.array([1])) == data[1]).all()
workers.close()
"""
#: What a forged pickle did: paths lead into the current folder from then on.
POISON = "import pathlib; pathlib.PurePath.parents = property(lambda self: [pathlib.Path.cwd()] * 9)\n"


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A folder whose modules, if anybody runs them, leave a file ``ran`` with their name."""
    packages = ("megatron_snip", "megatron_snip/snip", "megatron_snip/snip/plan", "megatron_snip/data")
    files = [f"{name}/__init__.py" for name in ("numpy", "socket", "multiprocessing", "msgspec", *packages)]
    for name in (*files, "megatron_snip/snip/plan/solver.py", "megatron_snip/data/workers.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    return tmp_path


def run_in(folder: Path, *words: str) -> None:
    """Run Python in a folder; its own imports come from the repository."""
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **path}, capture_output=True, text=True
    )
    ran = (folder / "ran").read_text() if (folder / "ran").exists() else ""
    assert ran == "", f"modules of the current folder ran: {ran}"
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [SOLVE, READ], ids=["solver", "workers"])
@pytest.mark.parametrize("before", ["", POISON], ids=["", "poisoned"])
def test_no_module_of_the_current_folder_runs_in_our_processes(code, before, decoy):
    run_in(decoy, "-P", "-c", f"import megatron_snip.snip.plan.solver, megatron_snip.data.workers\n{before}{code}")


def test_no_module_of_the_current_folder_runs_in_a_dry_run(decoy):
    """Its processes are made by multiprocessing's forkserver."""
    run_in(decoy, str(ROOT / "pretrain_llama.py"), *MODEL.split(), "--dry-run", "--run-dir", str(decoy / "run"))
