"""Runs for tests/soak/run.py on forked ranks, which start ten times as fast as torchrun's; importable by them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_snip import runtime
from megatron_snip.checkpoint import manifest, storage
from megatron_snip.config import Config
from tests.dist.helpers.harness import end_ranks, start_ranks

Run = Callable[[Mapping[str, Any], str], None]


def run_and_tell(options: Mapping[str, Any], pipe: str) -> None:
    """The program, its words and errors going into a pipe, as those of torchrun's ranks do."""
    words = os.open(pipe, os.O_WRONLY)
    os.dup2(words, 1)
    os.dup2(words, 2)
    with runtime.report_errors() as ending:
        from megatron_snip.train import loop

        loop.train(Config().replace(**options), ending)


def run_carelessly(options: Mapping[str, Any], pipe: str) -> None:
    """The program with a loader that looks at nothing, as torch's does."""
    manifest.check = storage.check = lambda save, i: manifest.read_manifest(manifest.folder_of(save, i))
    storage.CheckedReader = lambda folder, *_: FileSystemReader(folder)  # type: ignore[assignment,misc]
    run_and_tell(options, pipe)


class Forked:
    """A run on forked ranks; nobody but the test waits for them."""

    def __init__(self, options: Mapping[str, Any], log: Path, function: Run = run_and_tell) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pipe = f"{self._folder.name}/pipe"
        os.mkfifo(pipe)
        log.parent.mkdir(parents=True, exist_ok=True)
        both = os.open(pipe, os.O_RDWR)  # opened for writing too, so that the reader lives from the start
        self._reader = subprocess.Popen(["tee", "-a", str(log)], stdin=both, stdout=subprocess.DEVNULL)
        os.close(both)
        world = options["tensor_model_parallel_size"] * options["pipeline_model_parallel_size"]
        self._processes, _ = start_ranks(function, world, options, pipe, folder=self._folder.name)

    def ranks(self) -> list[int]:
        """Ranks that live."""
        return [process.pid for process in self._processes if process.is_alive()]

    def agent(self) -> int | None:
        """There is none."""
        return None

    def alive(self) -> bool:
        """Whether all ranks go on: torchrun would end a run as soon as one does not."""
        return all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        """Kill and reap."""
        end_ranks(self._processes)
        self._reader.kill()
        self._reader.wait()
        self._folder.cleanup()


def forked(options: Mapping[str, Any], log: Path) -> Forked:
    """Start a run on forked ranks."""
    return Forked(options, log)


def careless(options: Mapping[str, Any], log: Path) -> Forked:
    """Start a run that looks at nothing when it loads."""
    return Forked(options, log, run_carelessly)
