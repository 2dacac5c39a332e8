"""A lock on a folder of checkpoints: one run may write to it, and a dead run loses it.

`<save>/lock.json` names the process and host that hold the folder.  The holder touches the file every few seconds.  On
the same host, the lock is stale as soon as the process is gone; from another host, after 30 s without a touch.
A copy of a lock, made with its folder, is stale too.  A run overwrites a stale lock.  If the holder was suspended for
that long, it finds the new lock when it resumes, and stops writing checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from megatron_snip.errors import UserError
from megatron_snip.files.io import parse_json, read_file
from megatron_snip.files.json import checked, write_atomic

LOCK = "lock.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


#: Text about a host, for messages.
_Word = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f]{0,300}\Z")]


class _Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of lock.json: the process that holds the folder.

    place: identifies the pid namespace.  born: when the process started there.  folder: the folder's inode, which a
    copy does not share.
    """

    token: _Word
    run_id: _Word
    host: _Word
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    place: _Word
    born: _Word
    folder: int

    def __str__(self) -> str:
        return f"run {self.run_id}, process {self.pid} on {self.host}"


class LockLost(RuntimeError):
    """Another run has taken over the folder."""


class FolderLock:
    """Holds a folder of checkpoints until `release`.

    Raises UserError if another run holds it, at once on the same host, else within ``BEAT_SECONDS``.  If the other
    run's host is gone, taking the lock takes ``STALE_SECONDS``.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._token = folder / LOCK, secrets.token_hex(8)
        self._mine = _Holder(
            self._token, run_id, socket.gethostname(), os.getpid(), _place(), _born(os.getpid()), folder.stat().st_ino
        )
        self._text = msgspec.json.encode(self._mine).decode()
        while not self._create():
            if other := living_holder(folder):
                raise UserError(
                    f"{folder} belongs to {other}, which is still running; wait until it ends, or give another --save"
                )
            write_atomic(self.path, self._text)
            time.sleep(0.2)  # other runs that found the same stale lock have written theirs by now; the last one wins
            if self.held():
                break
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="lock of the save folder", daemon=True).start()

    def held(self) -> bool:
        """Whether this run still holds the folder."""
        holder = _read(self.path)
        return holder is not None and holder.token == self._token

    def check(self) -> None:
        """Raise LockLost if it does not."""
        if not self.held():
            other = _read(self.path)
            if other is None:
                raise LockLost(
                    f"{self.path} is gone or unreadable: it was removed, or another run took over the folder and has "
                    "ended; look at the folder, and continue from its last checkpoint"
                )
            raise LockLost(
                f"{self.path.parent}: run {other.run_id} on {other.host} (process {other.pid}) "
                "took over this folder while this run was suspended; end one of them"
            )

    def release(self) -> None:
        """Release the folder."""
        self._stop.set()
        with contextlib.suppress(OSError):
            if self.held():
                self.path.unlink()

    def _create(self) -> bool:
        """Create the lock; False if there is one."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:  # only one process can create it, even on NFS
                file.write(self._text)
        except FileExistsError:
            return False
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the file system may be unavailable for a moment
                if not self.held():
                    return  # `check` reports it
                os.utime(self.path)


def living_holder(folder: Path) -> str:
    """The run, process and host that hold a folder of checkpoints, or "".  Takes seconds if the host is another."""
    path = folder / LOCK
    if not path.is_file():  # a pipe or folder of this name is no lock
        return ""
    other = _read(path)
    alive = (
        _is_touched(path, other)
        if other is None or other.place != _place()
        else _is_alive(other) and (other.folder == folder.stat().st_ino or _is_touched(path, other))
    )
    return str(other or "a run that cannot be read") if alive else ""


def _is_touched(path: Path, other: _Holder | None) -> bool:
    """Whether the holder still touches this lock.  If this lock is a copy, the holder touches the original.

    Uses only this host's clock, because clocks of hosts differ.
    """
    end, first = time.monotonic() + STALE_SECONDS, _touched(path)
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _read(path) != other:
            return _read(path) is not None  # it was released, or another run took it first
        if _touched(path) != first:
            return True
    return False


def _read(path: Path) -> _Holder | None:
    """The holder that a lock names; None if there is no lock or it cannot be read."""
    try:
        return checked(parse_json(read_file(path, "lock", "remove it", most=1 << 16)), _Holder)
    except ValueError:  # includes UserError
        return None


def _touched(path: Path) -> int | None:
    """When the file was last touched.  Opens it, so that network file systems refresh the time."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _place() -> str:
    """Identifies the pid namespace: the boot of the kernel and the namespace's id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _born(pid: int) -> str:
    """Start time of a process, which distinguishes it from a later one with the same pid; "" if it is not alive."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _is_alive(other: _Holder) -> bool:
    """Whether a lock's process, in this pid namespace, is still running and is not this one."""
    if other.pid == os.getpid():
        return False
    if Path("/proc/self").exists():
        return _born(other.pid) != "" and _born(other.pid) == other.born
    try:
        os.kill(other.pid, 0)
    except OSError:
        return False
    return True
