"""The program in a process that is forked from one with torch loaded; importable, so that the process finds it."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

import torch

from megatron_snip.train.run import trackers

PROGRAM = Path(__file__).resolve().parents[4] / "pretrain_llama.py"


def program(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Become `python pretrain_llama.py words` in a folder and a session of its own, with what it says in <folder>/log.

    wandb has two seconds to answer.
    """
    os.setsid()
    os.chdir(folder)
    file = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    trackers._PATIENCE = 2.0
    sys.argv = [str(PROGRAM), *words]
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves it to its caller, and wandb waits for it
