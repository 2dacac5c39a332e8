"""Processes that read samples for a rank (--num-workers).

``Workers(datasets, count)`` starts this module ``count`` times.  A worker imports numpy and the datasets but not torch,
so it starts in a fraction of a second and never touches a GPU.  It is a new process, not a fork, because the rank
already has CUDA and the threads of gloo and NCCL.  A fork would copy their locks in an unknown state, and keep open the
sockets that show other ranks whether this one is alive.

Each worker has its own socket.  When the worker or the rank dies, even in the middle of an answer, the socket closes
and the other side notices at once.  No lock or queue is left for anyone to wait on.
Source of the sharing: pickle protocol 5 (PEP 574).  The datasets are pickled once into an in-memory file that all
workers map.  Arrays lie beside the pickle, so workers do not copy them; memory maps and token files are opened by name.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import megatron_snip
from megatron_snip.data.sampling import Dataset, Tokens
from megatron_snip.errors import UserError

_ALIGNED = 64  # bytes; alignment of arrays in the shared file
_PARENT_CHECK_MS = 500
_CLOSING_SECONDS = 10.0
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)  # sent to all processes, but the rank still needs its last batches

Places = list[tuple[int, int]]  # first byte and size of the pickle and of each array


def end_with_parent() -> None:
    """Let a process of a multiprocessing pool end with the process that made the pool, even if that is killed.

    Otherwise it waits for work forever.
    """

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def most_workers() -> int:
    """Limit of worker processes: 4 per core, or 64.  More do not read faster, but fill the memory."""
    return max(64, 4 * (os.cpu_count() or 1))


def check_workers(option: str, count: int) -> None:
    """Raise UserError for more worker processes than `most_workers`."""
    if count > (most := most_workers()):
        raise UserError(f"{option} is {count}; give at most {most}, 4 for each core of this machine or 64")


def read(dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Tokens:
    """Samples ``numbers`` of a dataset, int64 [samples, tokens], read in this process."""
    return np.stack([dataset[int(number)] for number in numbers])


class DataWorkerError(UserError, ChildProcessError):
    """A worker has died.  The message names it and the way out."""


@dataclass(frozen=True)
class _Worker:
    name: str
    process: subprocess.Popen[bytes]
    socket: Connection

    def ended(self) -> str:
        """How the worker ended.  Call this once its socket is closed."""
        code = self.process.wait()
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with status {code}"
        return f"{self.name} (process {self.process.pid}) {how}; give fewer --num-workers, or 0 to read in threads"


class Workers:
    """``count`` processes that read samples of ``datasets``.  Any thread may call `read`; it waits for a free worker.

    `close` kills the workers.  They also end by themselves when this process ends, even if it is killed.
    """

    def __init__(self, datasets: Sequence[Dataset], count: int) -> None:
        self.count, self._datasets = count, list(datasets)
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        with _shared_file() as file:
            places = _write(file, self._datasets)
            self._all = [_start(f"data worker {n} of {count}", file.fileno(), places) for n in range(1, count + 1)]
        for worker in self._all:
            self._free.put(worker)

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Tokens:
        """Samples ``numbers`` of one of the datasets, int64 [samples, tokens].

        Raises any error of reading them, and DataWorkerError if the worker ends.
        """
        place = next(place for place, each in enumerate(self._datasets) if each is dataset)
        worker, answer = self._free.get(), None
        try:
            worker.socket.send((place, numbers))
            answer = worker.socket.recv()
        except (EOFError, OSError):
            raise DataWorkerError(worker.ended()) from None
        finally:
            if answer is None:  # a late answer must not reach the next caller
                worker.process.kill()
            self._free.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the workers, even while they read.  Callers that wait for one get DataWorkerError."""
        for worker in self._all:
            worker.process.kill()
        end = time.monotonic() + _CLOSING_SECONDS
        for worker in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a read from a dead disk may hang
                worker.process.wait(max(0.0, end - time.monotonic()))


def _start(name: str, file: int, places: Places) -> _Worker:
    ours, theirs = Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)  # new processes inherit blocked signals
    try:
        process = subprocess.Popen(
            [*megatron_snip.child_command(__name__), str(theirs.fileno()), str(file)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), file),
            cwd=megatron_snip.PLACE,  # so that relative paths in PYTHONPATH cannot point into data
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    with contextlib.suppress(OSError):  # a dead worker is reported when it is used
        ours.send((sys.path, os.getcwd(), places))
    return _Worker(name, process, ours)


def _shared_file() -> IO[bytes]:
    """An unnamed file, in memory where the system supports it."""
    return open(os.memfd_create("datasets"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


class _Pickler(pickle.Pickler):
    """Pickles an array that maps a whole file by the file's name."""

    def reducer_override(self, value: Any) -> Any:
        """How to rebuild such an array; NotImplemented for everything else."""
        base = value.base if type(value) is np.ndarray else None
        if not isinstance(base, np.memmap) or (base.shape, base.dtype) != (value.shape, value.dtype):
            return NotImplemented
        return _mapped, (base.filename, base.dtype, base.offset, base.shape)


def _mapped(name: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.memmap(name, dtype, "r", offset, shape).view(np.ndarray)


def _write(file: IO[bytes], datasets: list[Dataset]) -> Places:
    arrays: list[pickle.PickleBuffer] = []
    stream, places = io.BytesIO(), []
    _Pickler(stream, 5, buffer_callback=arrays.append).dump(datasets)
    for part in (stream.getbuffer(), *(array.raw() for array in arrays)):
        file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
        places.append((file.tell(), part.nbytes))
        file.write(part)
    file.flush()
    return places


def _load(file: int, places: Places) -> list[Dataset]:
    mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    first, *arrays = (mapped[begin : begin + size] for begin, size in places)
    return pickle.loads(first, buffers=arrays)


def _end_with_parent(socket: int) -> None:
    """End this process, even during a read, when its socket is closed or its parent is gone.

    The second check covers a socket that a fork of the parent keeps open.  It is also for macOS, whose poll does not
    report a closed socket if no other event is requested (rdar://37537852).
    """
    closed = select.poll()
    closed.register(socket, 0)  # only POLLHUP and POLLERR
    while not closed.poll(_PARENT_CHECK_MS) and os.getppid() == megatron_snip.PARENT:
        pass
    os._exit(0)


def _serve(socket: Connection, file: int, places: Places) -> None:
    """Answer requests with samples, or with the error of reading them, until the other side closes the socket."""
    datasets: list[Dataset] | Exception
    try:
        datasets = _load(file, places)
    except Exception as error:
        datasets = _with_traceback(error)
    while True:
        place, numbers = socket.recv()
        answer: Tokens | Exception
        try:
            answer = datasets if isinstance(datasets, Exception) else read(datasets[place], numbers)
        except Exception as error:
            answer = _with_traceback(error)
        socket.send(answer)


def _with_traceback(error: Exception) -> Exception:
    """The error with its traceback as a note, since tracebacks cannot be pickled."""
    error.add_note(f"In a data worker:\n{traceback.format_exc()}")
    return error


def main() -> None:
    """Entry point of a worker: serve the process that started it."""
    number, file = (int(word) for word in sys.argv[1:])
    threading.Thread(target=_end_with_parent, args=(number,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        socket = Connection(number)
        sys.path[:], folder, places = socket.recv()
        os.chdir(folder)
        _serve(socket, file, places)
