"""Runs a function on several gloo ranks with a time limit, and returns what each rank returned.

Ranks are forked from a server that has torch loaded, so a test of four ranks starts in a fraction of a
second.  They meet through a file.  Whatever happens, none of them outlives the call.  What they run must
stand in a module that a plain `import` finds, so not in a test file.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
#: What the server loads; the last two are loaded by what most ranks do, and take each of them a second.
_PRELOADED = ["torch", "torch.distributed.checkpoint", "megatron_snip.train.loop", "torch._dynamo", "megatron_snip.parallel.pipeline_stage"]
CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(module: str) -> None:
    """Let the server load this module, too, if it has not started: else each rank that needs it takes the time."""
    _PRELOADED.append(module)
    CONTEXT.set_forkserver_preload(_PRELOADED)


def _rank(rank: int, world: int, folder: str, seconds: float, pipe: Any, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    from megatron_snip.train import loop

    # half a second at each run's end; the quickstart's test sees both
    loop.write_report, loop.format_summary = lambda run_dir: run_dir, lambda run_dir: ""
    faulthandler.dump_traceback_later(seconds, exit=True)  # says where a hang sits
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
        pipe.send_bytes(pickle.dumps((True, function(*args))))  # by value: send() would share memory
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()


def start_ranks(
    function: Callable, world: int, *args: Any, folder: str, seconds: float = 120.0
) -> tuple[list[Any], list[Any]]:
    """Start `function(*args)` on each of `world` ranks -> (processes, pipes of their results).

    The caller ends them, and keeps `folder`, where they meet, until then.
    """
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_rank, args=(rank, world, folder, seconds, theirs, function, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return processes, pipes


def end_ranks(processes: list[Any]) -> None:
    """Kill what is still alive, and reap all."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def run_ranks(function: Callable, world: int, *args: Any, seconds: float = 120.0) -> list[Any]:
    """`function(*args)` on each of `world` ranks -> their results in order.  AssertionError with the traceback
    of the first rank that failed, or if they have not ended after `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = start_ranks(function, world, *args, folder=folder, seconds=seconds)
        results: dict[int, Any] = {}
        try:
            open_pipes = dict(zip(pipes, range(world), strict=True))
            while open_pipes:
                ready = wait(list(open_pipes), timeout=seconds)
                assert ready, f"ranks {sorted(open_pipes.values())} gave no answer within {seconds} s"
                for pipe in ready:
                    rank = open_pipes.pop(pipe)
                    try:
                        good, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        good, value = False, "ended without an answer"
                    assert good, f"rank {rank} of {world}:\n{value}"
                    results[rank] = value
            for process in processes:
                process.join(seconds)
        finally:
            end_ranks(processes)
        return [results[rank] for rank in range(world)]
