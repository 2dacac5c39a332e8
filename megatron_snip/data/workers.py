"""Processes that read samples for this one (--num-workers).

``Workers(datasets, count)`` starts this module as so many processes.  A worker imports numpy and the datasets but not
torch, so it starts in a fraction of a second and never touches a GPU.  It is a new process and no
fork: this one has CUDA and threads of gloo, NCCL and its own by then.  A fork would copy their locks as they are, and
would hold the sockets open by which other processes see that this one has gone.

Each worker has a socket of its own.  A worker that dies closes it, even in the middle of an answer, and so does this
process: the other side finds out at once, and no lock or queue is left that anybody could wait for.
Source of the sharing: pickle protocol 5 (PEP 574).  The datasets are pickled once into a file in memory that all
workers map: arrays lie beside the pickle and no worker copies them; memory maps and token files are opened by name.
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

_ALIGNED = 64  # bytes; where arrays begin in the shared file
_PARENT_CHECK_MS = 500
_CLOSING_SECONDS = 10.0
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)  # they go to all processes; the run still reads its last batches

Places = list[tuple[int, int]]  # first byte and size of the pickle and of each of its arrays


def end_with_parent() -> None:
    """Let a process of a multiprocessing pool end when the one that made the pool is gone, however it ended.

    Else it waits for work that nobody gives.
    """

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def most_workers() -> int:
    """Processes beyond which more read no faster on this machine, but fill its memory: 4 for each core, or 64."""
    return max(64, 4 * (os.cpu_count() or 1))


def check_workers(option: str, count: int) -> None:
    """Raise UserError for more worker processes than `most_workers`."""
    if count > (most := most_workers()):
        raise UserError(f"{option} is {count}; give at most {most}, 4 for each core of this machine or 64")


def read(dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Tokens:
    """Samples ``numbers`` of a dataset, int64 [samples, tokens], in this process."""
    return np.stack([dataset[int(number)] for number in numbers])


class DataWorkerError(UserError, ChildProcessError):
    """A worker has ended; the message names it and the way out."""


@dataclass(frozen=True)
class _Worker:
    name: str
    process: subprocess.Popen[bytes]
    socket: Connection

    def ended(self) -> str:
        """How it ended, once its socket is closed."""
        code = self.process.wait()
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with status {code}"
        return f"{self.name} (process {self.process.pid}) {how}; give fewer --num-workers, or 0 to read in threads"


class Workers:
    """``count`` processes that read samples of ``datasets``; any thread may ask, and waits until one is free.

    They are killed by `close`, and end by themselves when this process is gone, however it ended.
    """

    def __init__(self, datasets: Sequence[Dataset], count: int) -> None:
        self.count, self._datasets = count, list(datasets)
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        with _shared_file() as file:
            places = _write(file, self._datasets)
            self._all = [_start(f"data worker {n} of {count}", file.fileno(), places) for n in range(1, count + 1)]
        for worker in self._all:
            self._free.put(worker)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [worker.process.pid for worker in self._all]

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Tokens:
        """Samples ``numbers`` of one of the datasets, int64 [samples, tokens].

        Raises what reading them raises, and DataWorkerError if the worker ends.
        """
        place = next(place for place, each in enumerate(self._datasets) if each is dataset)
        worker, answer = self._free.get(), None
        try:
            worker.socket.send((place, numbers))
            answer = worker.socket.recv()
        except (EOFError, OSError):
            raise DataWorkerError(worker.ended()) from None
        finally:
            if answer is None:  # nobody may take an answer that comes later for his own
                worker.process.kill()
            self._free.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers, whatever they are reading; who waits for one gets DataWorkerError."""
        for worker in self._all:
            worker.process.kill()
        end = time.monotonic() + _CLOSING_SECONDS
        for worker in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a dead disk keeps it, and it ends with the read
                worker.process.wait(max(0.0, end - time.monotonic()))


def _start(name: str, file: int, places: Places) -> _Worker:
    ours, theirs = Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)  # a new process inherits what is blocked
    try:
        process = subprocess.Popen(
            [*megatron_snip.child_command(__name__), str(theirs.fileno()), str(file)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), file),
            cwd=megatron_snip.PLACE,  # so that relative places in PYTHONPATH lead to no data either
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    with contextlib.suppress(OSError):  # whoever asks a dead worker is told
        ours.send((sys.path, os.getcwd(), places))
    return _Worker(name, process, ours)


def _shared_file() -> IO[bytes]:
    """A file without a name, in memory where the system can do that."""
    return open(os.memfd_create("datasets"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


class _Pickler(pickle.Pickler):
    """Pickles an array that is a memory map of a whole file by the file's name."""

    def reducer_override(self, value: Any) -> Any:
        """How such an array is made again; NotImplemented leaves all else as it is."""
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
    """End this process when the other side of its socket is closed or its parent is gone, also while it reads.

    The second check is for a socket that a process forked from the parent holds open.  It is also for macOS, whose poll
    does not report a closed one to those who ask for no other event (rdar://37537852).
    """
    closed = select.poll()
    closed.register(socket, 0)  # which leaves POLLHUP and POLLERR
    while not closed.poll(_PARENT_CHECK_MS) and os.getppid() == megatron_snip.PARENT:
        pass
    os._exit(0)


def _serve(socket: Connection, file: int, places: Places) -> None:
    """Answer until the other side closes the socket: samples, or the error of reading them."""
    datasets: list[Dataset] | Exception
    try:
        datasets = _load(file, places)
    except Exception as error:
        datasets = _told(error)
    while True:
        place, numbers = socket.recv()
        answer: Tokens | Exception
        try:
            answer = datasets if isinstance(datasets, Exception) else read(datasets[place], numbers)
        except Exception as error:
            answer = _told(error)
        socket.send(answer)


def _told(error: Exception) -> Exception:
    """The error with its traceback as a note, since tracebacks do not travel."""
    error.add_note(f"In a data worker:\n{traceback.format_exc()}")
    return error


def main() -> None:
    """Serve the process that started this one; a worker's whole life."""
    number, file = (int(word) for word in sys.argv[1:])
    threading.Thread(target=_end_with_parent, args=(number,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        socket = Connection(number)
        sys.path[:], folder, places = socket.recv()
        os.chdir(folder)
        _serve(socket, file, places)
