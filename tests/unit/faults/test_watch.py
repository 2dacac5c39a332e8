"""Signs of life: who is missing, and what the watching thread does about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_snip.faults import watch
from megatron_snip.faults.watch import Watch, process_state, where

SECONDS = 3.0  # the time-out; a period is a thirtieth


@pytest.fixture
def make(monkeypatch):
    """Watches of several ranks in this process, which look after each other through a store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    made: list[Watch] = []

    def make(rank: int, world: int, leave=lambda line: None, seconds: float = SECONDS) -> Watch:
        client = TCPStore(
            "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
        )
        made.append(Watch(client, rank, world, seconds, leave))
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
    monkeypatch.setattr(watch, "process_state", lambda pid: None)  # as if the others were on another host
    first, second, _ = make(0, 3), make(1, 3), make(2, 3)
    freeze(second)
    (said,) = first.missing()
    assert said.startswith("rank 1 (process ") and said.endswith(" sends no heartbeat")


def test_who_was_killed_has_ended_once_the_kernel_has_cleared_it_away(make, monkeypatch):
    states = iter([None, None, "has ended", None])
    monkeypatch.setattr(watch, "process_state", lambda pid: next(states))
    first, second, _ = make(0, 3), make(1, 3), make(2, 3)
    freeze(second)
    (said,) = first.missing()
    assert said.startswith("rank 1 (process ") and said.endswith(" has ended")


def test_who_has_failed_itself_is_not_to_blame(make, monkeypatch):
    monkeypatch.setattr(watch, "process_state", lambda pid: None)
    first, second, third = make(0, 3), make(1, 3), make(2, 3)
    assert second.take_the_word() and not third.take_the_word(), "one alone tells"
    second.close()
    third.close()
    assert first.missing() == []


def test_who_computes_while_others_wait_is_missing(make, monkeypatch):
    monkeypatch.setattr(watch, "process_state", lambda pid: None)
    first, _ = make(0, 2), make(1, 2)
    (said,) = first.missing()  # the main thread of both is this one, which sleeps in it
    assert " does not wait for the others: it is in megatron_snip/faults/watch.py:" in said


def test_who_has_left_is_not_missed(make, monkeypatch):
    """At the end of a run, while rank 0 writes its report."""
    monkeypatch.setattr(watch, "process_state", lambda pid: None)
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

    make(0, 2, leave)
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
