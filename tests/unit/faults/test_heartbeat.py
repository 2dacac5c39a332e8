"""Signs of life: who is missing, and what the watching thread does about it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_snip.faults import heartbeat
from megatron_snip.faults.heartbeat import Folder, Watch, process_state, where
from tests.dist.helpers.faults import store_host
from tests.dist.helpers.harness import CONTEXT

SECONDS = 3.0  # the time-out; a period is a thirtieth


def client_of(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


@pytest.fixture
def make(monkeypatch):
    """Watches of several ranks in this process, which look after each other through a store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    made: list[Watch] = []

    def make(rank: int, world: int, leave=lambda line: None, seconds: float = SECONDS, connect=None) -> Watch:
        made.append(Watch(connect or (lambda: client_of(server.port)), rank, world, seconds, leave))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_the_state_of_a_process_of_this_host():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process_state(child.pid) is None
        child.send_signal(signal.SIGSTOP)
        for _ in range(100):
            if process_state(child.pid):
                break
            time.sleep(0.02)
        assert process_state(child.pid) == "is stopped"
    finally:
        child.kill()
    time.sleep(0.2)
    assert process_state(child.pid) == "has ended", "not reaped yet"
    child.wait()
    assert process_state(child.pid) == "has ended"


def test_a_stack_says_whether_a_process_waits_for_others():
    namespace: dict = {}
    waits = compile("import sys\nframe = sys._getframe()\n", "torch/distributed/distributed_c10d.py", "exec")
    exec(waits, namespace)
    assert where(namespace["frame"])[0] == "waiting"
    assert where(sys._getframe())[0] == "busy"
    assert where(None) == ("busy", "")


def test_the_innermost_line_of_the_package_is_the_place():
    seen = []
    FailedOnce = type(
        "FailedOnce",
        (),
        {
            "__str__": lambda self: seen.append(sys._getframe()) or "",
        },
    )
    from megatron_snip.faults.ending import one_line

    one_line(type("Odd", (Exception,), {"__str__": FailedOnce.__str__})())
    assert where(seen[0])[1].startswith("megatron_snip/faults/ending.py:") and "in one_line" in where(seen[0])[1]


def freeze(one: Watch) -> None:
    """No more signs of life, and no word that there will be none."""
    one._closed.set()
    one._thread.join()


def test_who_gives_no_sign_of_life_is_missing(make, monkeypatch):
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: None)  # as if the others were on another host
    first, second, _ = make(0, 3), make(1, 3), make(2, 3)
    freeze(second)
    (said,) = first.missing()
    assert said.startswith("rank 1 (process ") and said.endswith(" sends no heartbeat")


def test_who_was_killed_has_ended_once_the_kernel_has_cleared_it_away(make, monkeypatch):
    states = iter([None, None, "has ended", None])
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: next(states))
    first, second, _ = make(0, 3), make(1, 3), make(2, 3)
    freeze(second)
    (said,) = first.missing()
    assert said.startswith("rank 1 (process ") and said.endswith(" has ended")


def test_who_has_failed_itself_is_not_to_blame(make, monkeypatch):
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: None)
    first, second, third = make(0, 3), make(1, 3), make(2, 3)
    assert second.take_the_word() and not third.take_the_word(), "one alone tells"
    second.close()
    third.close()
    assert first.missing() == []


def test_who_computes_while_others_wait_is_missing(make, monkeypatch):
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: None)
    first, _ = make(0, 2), make(1, 2)
    (said,) = first.missing()  # the main thread of both is this one, which sleeps in it
    assert " does not wait for the others: it is in megatron_snip/faults/heartbeat.py:" in said


def test_who_has_left_is_not_missed(make, monkeypatch):
    """At the end of a run, while rank 0 writes its report."""
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: None)
    said: list[str | None] = []
    first, second = make(0, 2, said.append, 1.0), make(1, 2)
    second.close()
    time.sleep(1.5)
    assert said == [] and first.missing() == []


def test_a_silent_rank_is_noticed_by_the_one_before_it(make):
    said: list[str | None] = []
    came = threading.Event()

    def leave(line: str | None) -> None:
        said.append(line)
        came.set()

    make(0, 2, leave, SECONDS)
    silent = make(1, 2, seconds=60.0)
    freeze(silent)
    begin = time.monotonic()
    assert came.wait(4 * SECONDS)
    assert "rank 1 (process " in str(said[0]) and "has sent no heartbeat for" in str(said[0])
    assert 0.8 * SECONDS < time.monotonic() - begin < 2.0 * SECONDS


def test_all_leave_once_one_has_told(make):
    came = threading.Event()
    first = make(0, 2, lambda line: came.set() if line is None else None)
    second = make(1, 2)
    assert second.take_the_word()
    second.tell("why")
    assert first.told() and came.wait(10.0)


class Flaky:
    """A store that can be out of reach."""

    def __init__(self, folder: Path) -> None:
        self.inner, self.fails, self.connections = Folder(folder), False, 0

    def connect(self) -> Flaky:
        self.connections += 1
        return self

    def __getattr__(self, name: str):
        if self.fails:
            raise ConnectionError(f"{name}: nobody answers")
        return getattr(self.inner, name)


def count_of(store: Flaky, rank: int) -> int:
    return json.loads(store.inner.get(f"sign/{rank}"))["count"]


def test_failed_calls_of_the_store_end_no_heartbeat_and_no_run(make, tmp_path, caplog):
    """A store away for longer than the time-out: nobody is to blame, one line says so, and all goes on."""
    stores, said = [Flaky(tmp_path), Flaky(tmp_path)], []
    for rank, store in enumerate(stores):
        make(rank, 2, said.append, SECONDS, store.connect)
    before = [count_of(stores[0], rank) for rank in (0, 1)]
    for store in stores:
        store.fails = True
    time.sleep(1.5 * SECONDS)
    for store in stores:
        store.fails = False
    time.sleep(0.5 * SECONDS)
    assert said == []
    assert all(count_of(stores[0], rank) >= before[rank] + 5 for rank in (0, 1)), "heartbeats come again"
    assert all(1 < store.connections <= 50 for store in stores), "a try each period, none beside"
    for rank in (0, 1):
        (line,) = [line for line in caplog.messages if line.startswith(f"rank {rank} has not reached the run's store")]
        assert "nobody answers" in line


def test_a_process_that_stays_out_of_reach_is_missed(make, tmp_path):
    stores, said = [Flaky(tmp_path), Flaky(tmp_path)], queue.Queue()
    for rank, store in enumerate(stores):
        make(rank, 2, said.put, SECONDS, store.connect)
    stores[1].fails = True
    assert "has sent no heartbeat" in said.get(timeout=4 * SECONDS)


def test_a_store_that_has_gone_ends_nothing_by_itself_and_close_joins(make, tmp_path):
    store, said = Flaky(tmp_path), []
    one = make(0, 2, said.append, connect=store.connect)
    store.fails = True
    time.sleep(5 * one.period)
    assert one._thread.is_alive()
    begin = time.monotonic()
    one.close()
    assert not one._thread.is_alive() and time.monotonic() - begin < 1.0 and said == []


@contextlib.contextmanager
def host(port: int):
    """A process with a store, and the store's port."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=store_host, args=(port, theirs), daemon=True)
    process.start()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()


def heartbeats_come(port: int, ranks: list[int], seconds: float = 20.0) -> bool:
    """Whether each rank's count grows, twice."""
    client, end, seen = client_of(port), time.monotonic() + seconds, {rank: set() for rank in ranks}
    while time.monotonic() < end and any(len(counts) < 3 for counts in seen.values()):
        for rank in ranks:
            if client.check([f"sign/{rank}"]):
                seen[rank].add(json.loads(client.get(f"sign/{rank}"))["count"])
        time.sleep(0.05)
    return all(len(counts) > 2 for counts in seen.values())


def test_a_store_that_is_stopped_or_away_for_a_while_breaks_nothing(make):
    said: list[str | None] = []
    with host(0) as (process, port):
        watches = [make(rank, 2, said.append, 10.0, lambda: client_of(port)) for rank in (0, 1)]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3.0)  # the clients' own limit is a second
        os.kill(process.pid, signal.SIGCONT)
        assert heartbeats_come(port, [0, 1])
    time.sleep(1.5)
    with host(port):
        assert heartbeats_come(port, [0, 1]), "over new connections"
        assert said == []
        for one in watches:
            one.close()
            assert not one._thread.is_alive()


def test_a_folder_is_a_store(tmp_path):
    store = Folder(tmp_path / "store")
    assert not store.check(["sign/0"])
    store.set("sign/0", "a")
    store.set("sign/0", "b")
    assert store.check(["sign/0"]) and not store.check(["sign/0", "over"]) and store.get("sign/0") == b"b"
    assert [Folder(tmp_path / "store").add("word", 1) for _ in range(3)] == [1, 2, 3]
    assert len(list(store.folder.iterdir())) == 2 and store.folder.stat().st_mode & 0o077 == 0
