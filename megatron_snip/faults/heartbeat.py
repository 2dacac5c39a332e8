"""A thread in every rank that sends heartbeats, and notices missing heartbeats and the end of the run.

Every period, each rank writes a heartbeat to a store: a count, its pid and host, and the position of its main thread.
Each rank watches the next rank's heartbeat.  Only the first rank to fail reports.  All others see the report in the
store, write their stacks and end, even if they are blocked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from torch._C import _distributed_c10d as c10d

LOGGER = logging.getLogger("megatron_snip")
_PACKAGE = Path(__file__).resolve().parents[1]
_LONGEST_PERIOD, _PERIODS = 2.0, 30  # seconds; periods per time-out, at least
_READINGS_APART = 2.5  # periods between two readings: every live rank sends a heartbeat in between
#: Files of the innermost frames of a process that waits for other ranks.
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "/pipelining/", "/fsdp/")


class Folder:
    """A store in a folder of this host, one file per key.  It opens no port and does not grow over time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "_")

    def set(self, key: str, value: str) -> None:
        """Write a value; overwrites."""
        part = self.folder / f"part_{os.getpid()}_{threading.get_ident()}"
        part.write_text(value)
        part.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """The value of an existing key."""
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value.  The file has one byte per count."""
        with self._path(key).open("ab") as file:
            file.write(amount * b"1")
            file.flush()
            return file.tell()


Store = c10d.Store | Folder


@dataclass(frozen=True)
class Sign:
    """The last heartbeat of a rank."""

    count: int
    pid: int
    host: str
    state: str  # waiting (for other ranks), busy, leaving
    place: str  # innermost line of this package in its main thread's stack

    def describe(self, rank: int, what: str) -> str:
        """A line that names the rank and its problem."""
        return f"rank {rank} (process {self.pid} on {self.host}) {what}"


def where(frame: FrameType | None) -> tuple[str, str]:
    """(waiting or busy, `file:line in function`) from the innermost frames of a stack."""
    state, place, depth = "busy", "", 0
    while frame is not None and not place:
        path = frame.f_code.co_filename
        if depth < 3 and any(part in path for part in _WAITING):
            state = "waiting"
        if Path(path).is_relative_to(_PACKAGE):
            place = f"{Path(path).relative_to(_PACKAGE.parent)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame, depth = frame.f_back, depth + 1
    return state, place


def process_state(pid: int) -> str | None:
    """The problem of a process on this host, "has ended" or "is stopped"; None if there is no sign of one."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return {"Z": "has ended", "X": "has ended", "T": "is stopped", "t": "is stopped"}.get(state)


class Watch:
    """The watch thread and its state.  `close` ends it; it ends the process only by calling `leave`.

    connect: returns a store whose keys no other start has, over a connection of its own; called again after a
        failure, because an interrupted call may leave the connection out of step.
    seconds: a rank without a heartbeat for this long has failed.
    leave: called in this thread with the line to report, or with None if another rank has reported.
    """

    def __init__(
        self, connect: Callable[[], Store], rank: int, world_size: int, seconds: float,
        leave: Callable[[str | None], None],
    ) -> None:  # fmt: skip
        self.store, self.rank, self.world_size, self.seconds = connect(), rank, world_size, seconds
        self.period = min(_LONGEST_PERIOD, seconds / _PERIODS)
        self.leaving = False
        self._connect, self._leave, self._count = connect, leave, 0
        self._unreachable_since: float | None = None  # when the store failed, until it answers again
        self._logged_unreachable = False
        self._closed = threading.Event()
        self._main = threading.main_thread().ident
        self._next = (rank + 1) % world_size
        self._next_sign: Sign | None = None
        self._next_seen = self._last_turn = time.monotonic()
        self._warned = False
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and tell the other ranks not to expect more heartbeats."""
        self._closed.set()
        self.leaving = True
        if self._unreachable_since is None:
            with contextlib.suppress(Exception):
                self._send_heartbeat()
        self._thread.join(self.period + 5.0)  # a thread stuck in the store ends with the process

    def take_the_word(self) -> bool:
        """Whether this rank is the first to fail, and must report.  The others see the report with `told`."""
        self.leaving = True
        self._send_heartbeat()
        return self.store.add("word", 1) == 1

    def tell(self, line: str) -> None:
        """Tell all ranks that the run has failed."""
        self.store.set("over", line)

    def told(self) -> bool:
        """Whether a rank has reported why the run ends."""
        return self.store.check(["over"])

    def missing(self) -> list[str]:
        """Ranks that explain a lost connection or a time-out: only the most specific kind found; may be empty.

        First, ranks of this host that have ended or are stopped.  If there are none, ranks without a heartbeat.  If
        there are none either, ranks that compute while others wait.  Takes up to 2.5 periods.
        """
        first = self._signs()
        here = socket.gethostname()
        others = {r: sign for r, sign in first.items() if r != self.rank and sign.state != "leaving"}

        def ended() -> list[str]:
            states = {r: process_state(sign.pid) for r, sign in others.items() if sign.host == here}
            return [others[r].describe(r, what) for r, what in states.items() if what]

        if found := ended():
            return found
        time.sleep(_READINGS_APART * self.period)
        if found := ended():  # the kernel closes connections before it has reaped a killed process
            return found
        later = {r: sign for r, sign in self._signs().items() if r in others and sign.state != "leaving"}
        if silent := [r for r, sign in later.items() if sign.count == others[r].count]:
            return [others[r].describe(r, "sends no heartbeat") for r in silent]
        busy = [r for r, sign in later.items() if sign.state == "busy" == others[r].state]
        return [later[r].describe(r, f"does not wait for the others: it is in {later[r].place}") for r in busy]

    def wake_stopped(self) -> None:
        """Continue stopped processes of this host, so that they see the report and write their stacks."""
        for rank, sign in self._signs().items():
            if rank != self.rank and sign.host == socket.gethostname() and process_state(sign.pid) == "is stopped":
                with contextlib.suppress(OSError):
                    os.kill(sign.pid, signal.SIGCONT)

    def _run(self) -> None:
        while not self._closed.wait(self.period):
            try:
                if self._unreachable_since is not None:
                    self.store = self._connect()
                self._turn()
                self._unreachable_since = None
            except Exception as error:  # if the store's process is dead, lost connections end the run
                self._note_unreachable(error)

    def _note_unreachable(self, error: Exception) -> None:
        """Retry in the next period.  Log once, before other ranks miss this rank's heartbeat."""
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since, self._logged_unreachable = now, False
        seconds = now - self._unreachable_since
        if seconds > self.seconds / 2 and not self._logged_unreachable:
            self._logged_unreachable = True
            LOGGER.error(
                f"rank {self.rank} has not reached the run's store for {seconds:.0f} s, and sends no heartbeat: "
                f"{' '.join(str(error).split())[:200]}; retrying every {self.period:.1f} s"
            )

    def _turn(self) -> None:
        now = time.monotonic()
        self._send_heartbeat()
        if self.told():
            self._closed.wait(2.0)  # the main thread may be about to leave on its own
            if not self._closed.is_set():
                self._leave(None)
            return
        # this rank was suspended or could not reach the store, and perhaps all ranks were
        if self._unreachable_since is not None or now - self._last_turn > 5 * self.period:
            self._next_seen = now
        self._last_turn = now
        self._check_next(now)

    def _check_next(self, now: float) -> None:
        sign = self._signs([self._next]).get(self._next)
        if sign is not None and (self._next_sign is None or sign.count != self._next_sign.count):
            self._next_sign, self._next_seen, self._warned = sign, now, False
        elif self._next_sign is not None and self._next_sign.state != "leaving":
            silent = now - self._next_seen
            if silent > self.seconds:
                line = self._next_sign.describe(self._next, f"has sent no heartbeat for {silent:.0f} s")
                self._leave(line)
            elif silent > self.seconds / 2 and not self._warned:
                self._warned = True
                line = self._next_sign.describe(self._next, f"has sent no heartbeat for {silent:.0f} s")
                LOGGER.error(f"{line}; the run ends after {self.seconds:.0f} s")

    def _send_heartbeat(self) -> None:
        self._count += 1
        state, place = where(sys._current_frames().get(self._main or 0))
        sign = Sign(self._count, os.getpid(), socket.gethostname(), "leaving" if self.leaving else state, place)
        self.store.set(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def _signs(self, ranks: list[int] | None = None) -> dict[int, Sign]:
        """The last heartbeats of the given ranks (default: all), without ranks that never sent one."""
        found = {}
        for rank in range(self.world_size) if ranks is None else ranks:
            if self.store.check([f"sign/{rank}"]):
                found[rank] = Sign(**json.loads(self.store.get(f"sign/{rank}")))
        return found
