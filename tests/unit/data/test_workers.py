"""Worker processes: the same samples and errors as without, and none is left or waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.data.loader import Loader
from megatron_snip.data.sampling import Dataset, MockDataset, Repeated, build_datasets
from megatron_snip.data.workers import DataWorkerError, Workers, _shared_file, _write
from tests.unit.data.reads import Reads, WhoReads

FIELDS = ("tokens", "labels", "sample_index")


@pytest.fixture
def opened():
    """Makes workers, and ends them."""
    made: list[Workers] = []

    def make(datasets, count):
        made.append(Workers(datasets, count))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def pids(workers):
    return [worker.process.pid for worker in workers._all]


def loader(dataset, workers=None, batch=4, **options):
    sizes = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1}
    return Loader(dataset, global_batch_size=batch, workers=workers, **sizes, **options)


def corpora(tmp_path, cache=None, documents=30) -> tuple[Dataset, Dataset]:
    """A blend of two corpora for training, one of them for validation; each ends and begins again."""
    random = np.random.RandomState(0)
    for name in ("a", "b"):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for length in random.randint(1, 40, size=documents):
                builder.add_document(random.randint(0, 500, size=length))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    train, valid = build_datasets(["0.3", a, "0.7", b], [a], [], "", False, 24, 8, 16, 1, 500, cache)
    assert valid is not None
    return Repeated(train), Repeated(valid)


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends in time; a zombie that waits for its parent has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_batches_are_the_same_for_any_number_of_workers(tmp_path, opened):
    """A ramp, a resume, an iteration once more, a rewind, batches further ahead, and validation, as a run asks."""

    def size(consumed):
        return 2 if consumed < 4 else 4 if consumed < 12 else 8

    def seen(datasets, workers):
        train, valid = (loader(each, workers, size) for each in datasets)
        out = []
        for consumed in (0, 2, 4, 8, 4, 8, 12, 20, 0, 28):
            assert train.problem(consumed) == ""
            out.append(train.batch(consumed))
            out.append(train.make(consumed + 40, 4))
        out += [valid.batch(consumed) for consumed in (0, 2, 4)]
        resumed = loader(datasets[0], workers, size)
        return [*out, resumed.batch(8), resumed.batch(12), resumed.batch(20)]

    plain = seen(corpora(tmp_path), None)
    for count, cache in ((1, None), (2, tmp_path / "cache")):
        if cache:
            corpora(tmp_path, cache)  # fills it
        datasets = corpora(tmp_path, cache)
        for one, other in zip(seen(datasets, opened(datasets, count)), plain, strict=True):
            assert all(torch.equal(getattr(one, field), getattr(other, field)) for field in FIELDS)


def test_memory_maps_and_tokens_are_not_copied_into_the_shared_file(tmp_path):
    arrays, sizes = [], []
    for _ in range(2):  # builds the indices, and then maps what lies in the cache
        with _shared_file() as file:
            places = _write(file, list(corpora(tmp_path, tmp_path / "cache", documents=400)))
            arrays.append(len(places) - 1)
            sizes.append(sum(size for _, size in places))
    assert arrays == [3 * 3 + 2, 0], "three corpora's and the blend's"
    assert sizes[1] < 3000 < min(os.path.getsize(tmp_path / name) for name in ("a.bin", "a.idx")), "names alone"


def test_a_worker_reads_and_has_no_torch_and_leaves_signals_to_its_parent(opened):
    dataset = WhoReads()
    workers = opened([MockDataset(100, 8, 0), dataset], 2)
    said = np.concatenate([workers.read(dataset, np.arange(3)) for _ in range(2)])
    assert set(said[:, 0].tolist()) == set(pids(workers)) and os.getpid() not in pids(workers)
    assert said[:, 1].tolist() == [0] * 6, "torch costs seconds and hundreds of MB"
    assert said[:, 2].tolist() == [1] * 6
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_each_worker_reads_a_batch_of_its_own_ahead(opened):
    dataset = WhoReads(seconds=0.1)
    workers = opened([dataset], 3)
    three = loader(dataset, workers, 2)
    three.batch(0)
    assert list(three._ahead) == [2, 4, 6]
    assert {int(three.batch(consumed).tokens[0, 0, 0]) for consumed in (2, 4, 6)} == set(pids(workers))


def test_errors_are_those_of_the_process_itself(tmp_path, opened):
    cut, _ = corpora(tmp_path)
    failing = Reads(fails_at=5)
    workers = opened([failing, cut], 1)
    workers.read(cut, np.arange(1))
    with open(tmp_path / "b.bin", "r+b") as file:
        file.truncate(10)
    for dataset, consumed in ((failing, 4), (cut, 0)):
        told = []
        for used in (None, workers):
            with pytest.raises((OSError, ValueError)) as info:
                loader(dataset, used).batch(consumed)
            told.append((type(info.value), str(info.value), loader(dataset, used).problem(consumed)))
        assert told[0] == told[1] and told[0][2], "type, text, and what all processes are told"
        assert "reads.py" in info.value.__notes__[0] or "indexed.py" in info.value.__notes__[0]
    assert loader(failing, workers).batch(8).sample_index[0, 0] == 8, "the worker goes on"


def test_a_file_that_a_worker_cannot_open_is_named(tmp_path, opened):
    train, valid = corpora(tmp_path)
    os.unlink(tmp_path / "b.bin")
    with pytest.raises(FileNotFoundError, match=r"dataset .*b has no file .*b\.bin"):
        loader(train, opened([train, valid], 1)).batch(0)


@pytest.mark.parametrize("when", ["idle", "reading"])
def test_a_killed_worker_is_told_before_its_batch_is_asked_for(opened, when):
    dataset = Reads(dies_at=5 if when == "reading" else None)
    workers = opened([dataset], 1)
    one = loader(dataset, workers)
    if when == "idle":
        one.make(0)
        os.kill(pids(workers)[0], signal.SIGKILL)
    else:
        one.batch(0)
    said = f"data worker 1 of 1 (process {pids(workers)[0]}) was killed by signal 9 (out of memory?); give fewer"
    assert one.problem(4) == f"{said} --num-workers, or 0 to read in threads"
    for _ in range(2):
        with pytest.raises(DataWorkerError, match="killed by signal 9"):
            one.batch(4)


def test_an_answer_that_nobody_waited_for_is_given_to_nobody(opened, monkeypatch):
    """An exception, as of a signal, falls between question and answer."""
    dataset = Reads()
    workers = opened([dataset], 1)
    workers.read(dataset, np.arange(2))
    worker = workers._free.get()

    class Interrupted:
        send = worker.socket.send

        def recv(self):
            raise KeyboardInterrupt

    workers._free.put(type(worker)(worker.name, worker.process, Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        workers.read(dataset, np.arange(7, 9))
    assert worker.process.wait(20) == -signal.SIGKILL


def test_closing_ends_workers_whatever_they_do(opened):
    dataset = Reads(seconds=600.0)
    workers = opened([dataset], 2)
    one = loader(dataset, workers)
    one._read_ahead(0)
    waiting = threading.Thread(target=one.problem, args=(0,))
    waiting.start()
    begin = time.monotonic()
    one.close()
    one.close()
    waiting.join(20)
    assert not waiting.is_alive() and time.monotonic() - begin < 20
    assert all(worker.process.returncode is not None for worker in workers._all)


def test_closing_leaves_a_worker_that_the_kernel_holds(opened, monkeypatch):
    """One that a dead disk keeps in a read, where no signal reaches it."""
    workers = opened([Reads()], 1)
    process = workers._all[0].process

    def wait(timeout=None):
        assert timeout is not None, "it waits for ever"
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(process, "wait", wait)
    workers.close()


RUN = """
import os, sys, time
from megatron_snip.data.workers import Workers
from tests.unit.data.reads import Reads
import numpy as np, threading
dataset = Reads(seconds=float(sys.argv[1]))
workers = Workers([dataset], 2)
threading.Thread(target=workers.read, args=(dataset, np.arange(1)), daemon=True).start()
forked = os.fork() if sys.argv[3] == "forked" else 0  # who holds this side of the sockets open
if forked or sys.argv[3] != "forked":
    print(*(worker.process.pid for worker in workers._all), forked, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("end", ["kill", "forked", "returns"])
def test_no_worker_outlives_the_run(end):
    """Neither one that waits nor one that reads, whether the run is killed or leaves without a word."""
    words = ["0", "1", end] if end == "returns" else ["600", "600", end]
    run = subprocess.Popen([sys.executable, "-c", RUN, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        *pids, forked = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 2
        if end != "returns":
            time.sleep(1.0)  # one of them reads
            assert not any(gone(pid, 0.1) for pid in pids)
    finally:
        if end != "returns":
            run.kill()
        run.wait(60)
    try:
        assert [gone(pid) for pid in pids] == [True, True]
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_process_of_a_pool_outlives_the_one_that_made_it(method):
    """As a dry run has, whose forkserver the workers themselves keep alive."""
    lines = (
        "import multiprocessing, os, time",
        "from concurrent.futures import ProcessPoolExecutor",
        "from megatron_snip.data.workers import end_with_parent",
        "if __name__ == '__main__':",
        f"    pool = ProcessPoolExecutor(1, multiprocessing.get_context('{method}'), end_with_parent)",
        "    print(pool.submit(os.getpid).result(), flush=True)",
        "    time.sleep(600)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait(60)  # and not for the end of what it says, as the worker holds that open
    process.stdout.close()
    assert gone(worker)
