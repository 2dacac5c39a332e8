"""One run a folder of checkpoints: a lock that a dead run does not keep.

`<save>/lock.json` says which process of which host holds the folder.  Its holder touches it every few seconds.  On the
holder's own host the lock is stale as soon as the process is gone; from elsewhere, when it has not been touched for
half a minute.  So is one that came along in a copy of its folder.  Whoever finds it stale writes its own
over it.  A holder that was stopped for so long finds another's lock when it goes on, and writes no checkpoint any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError
from megatron_snip.jsonfile import write_atomic

LOCK = "lock.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


class LockLost(RuntimeError):
    """Another run has taken the folder over."""


class FolderLock:
    """Holds a folder of checkpoints from its making to `release`.

    UserError if another run has it, at once on its host, else within ``BEAT_SECONDS``.  Where the other's host is
    gone, making one takes ``STALE_SECONDS``.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._token = folder / LOCK, secrets.token_hex(8)
        self._mine = {
            "token": self._token, "run_id": run_id, "host": socket.gethostname(), "pid": os.getpid(),
            "place": _place(), "born": _born(os.getpid()), "folder": folder.stat().st_ino,
        }  # fmt: skip
        while not self._create():
            if other := living_holder(folder):
                raise UserError(
                    f"{folder} belongs to {other}, which is still running; wait until it ends, or give another --save"
                )
            write_atomic(self.path, json.dumps(self._mine))
            time.sleep(0.2)  # another that found the same stale lock writes its own by now: the last one holds
            if self.held():
                break
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="lock of the save folder", daemon=True).start()

    def held(self) -> bool:
        """Whether the folder is still ours."""
        return _read(self.path).get("token") == self._token

    def check(self) -> None:
        """LockLost if it is not."""
        if not self.held():
            other = _read(self.path)
            if not other:
                raise LockLost(
                    f"{self.path} is gone or cannot be read: somebody removed it, or another run took the folder over "
                    "and has ended; see what the folder holds, and continue from its last checkpoint"
                )
            raise LockLost(
                f"{self.path.parent}: run {other.get('run_id')} on {other.get('host')} (process {other.get('pid')}) "
                "took this folder over while this one stood still; end one of them"
            )

    def release(self) -> None:
        """Let go of the folder."""
        self._stop.set()
        with contextlib.suppress(OSError):
            if self.held():
                self.path.unlink()

    def _create(self) -> bool:
        """Whether there was no lock, and there is ours now."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:  # made by one process alone, on NFS too
                file.write(json.dumps(self._mine))
        except FileExistsError:
            return False
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                if not self.held():
                    return  # `check` tells
                os.utime(self.path)


def living_holder(folder: Path) -> str:
    """Run, process and host that hold a folder of checkpoints, "" if none does.  Of another host it takes a while."""
    path = folder / LOCK
    if not path.exists():
        return ""
    other = _read(path)
    copied = other.get("folder", folder.stat().st_ino) != folder.stat().st_ino
    if other.get("place") == _place():
        alive = _is_alive(other) and (not copied or _beats(path, other))
    else:
        alive = _beats(path, other)
    return f"run {other.get('run_id')}, process {other.get('pid')} on {other.get('host')}" if alive else ""


def _beats(path: Path, other: dict[str, Any]) -> bool:
    """Whether a lock's holder touches it, and not one that this is a copy of.

    It is seen by this clock alone, as hosts' clocks differ.
    """
    end, first = time.monotonic() + STALE_SECONDS, _touched(path)
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _read(path) != other:
            return bool(_read(path))  # it was let go of, or another was faster
        if _touched(path) != first:
            return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """A lock's content; nothing if there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _touched(path: Path) -> int | None:
    """When the file was last touched, read through the file, which network file systems look up anew."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _place() -> str:
    """Where process ids mean the same processes: this boot of this kernel, this namespace of ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _born(pid: int) -> str:
    """When a process started, which tells it from a later one with its id; empty if there is none, or a dead one."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _is_alive(other: dict[str, Any]) -> bool:
    """Whether a lock's process, of this place, still runs and is another than this one."""
    pid = other.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    if Path("/proc/self").exists():
        return _born(pid) != "" and _born(pid) == other.get("born")
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
