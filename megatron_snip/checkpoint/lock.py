"""One run a folder of checkpoints: a lock that a dead run does not keep.

`<save>/lock.json` says which process of which host holds the folder.  Its holder touches it every few seconds.  On the
holder's own host the lock is stale as soon as the process is gone; from elsewhere, when it has not been touched for
half a minute.  So is one that came along in a copy of its folder.  Whoever finds it stale writes its own
over it.  A holder that was stopped for so long finds another's lock when it goes on, and writes no checkpoint any more.
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
from megatron_snip.files import parse_json, read_file
from megatron_snip.jsonfile import checked, write_atomic

LOCK = "lock.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


#: Words of a host, which go into messages.
_Word = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f]{0,300}\Z")]


class _Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """What lock.json says of the process that holds the folder.

    place: where process ids mean the same processes; born: when it started there; folder: the folder's inode, which a
    copy does not have.
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
    """Another run has taken the folder over."""


class FolderLock:
    """Holds a folder of checkpoints from its making to `release`.

    UserError if another run has it, at once on its host, else within ``BEAT_SECONDS``.  Where the other's host is
    gone, making one takes ``STALE_SECONDS``.
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
            time.sleep(0.2)  # another that found the same stale lock writes its own by now: the last one holds
            if self.held():
                break
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="lock of the save folder", daemon=True).start()

    def held(self) -> bool:
        """Whether the folder is still ours."""
        holder = _read(self.path)
        return holder is not None and holder.token == self._token

    def check(self) -> None:
        """LockLost if it is not."""
        if not self.held():
            other = _read(self.path)
            if other is None:
                raise LockLost(
                    f"{self.path} is gone or cannot be read: somebody removed it, or another run took the folder over "
                    "and has ended; see what the folder holds, and continue from its last checkpoint"
                )
            raise LockLost(
                f"{self.path.parent}: run {other.run_id} on {other.host} (process {other.pid}) "
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
                file.write(self._text)
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
    if not path.is_file():  # a pipe or a folder of this name holds nothing
        return ""
    other = _read(path)
    alive = (
        _beats(path, other)
        if other is None or other.place != _place()
        else _is_alive(other) and (other.folder == folder.stat().st_ino or _beats(path, other))
    )
    return str(other or "a run that cannot be read") if alive else ""


def _beats(path: Path, other: _Holder | None) -> bool:
    """Whether a lock's holder touches it, and not one that this is a copy of.

    It is seen by this clock alone, as hosts' clocks differ.
    """
    end, first = time.monotonic() + STALE_SECONDS, _touched(path)
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _read(path) != other:
            return _read(path) is not None  # it was let go of, or another was faster
        if _touched(path) != first:
            return True
    return False


def _read(path: Path) -> _Holder | None:
    """What a lock says; None if there is none or it cannot be read."""
    try:
        return checked(parse_json(read_file(path, "lock", "remove it", most=1 << 16)), _Holder)
    except ValueError:  # UserError too
        return None


def _touched(path: Path) -> int | None:
    """When the file was last touched, read through the file, which network file systems look up anew."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
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


def _is_alive(other: _Holder) -> bool:
    """Whether a lock's process, of this place, still runs and is another than this one."""
    if other.pid == os.getpid():
        return False
    if Path("/proc/self").exists():
        return _born(other.pid) != "" and _born(other.pid) == other.born
    try:
        os.kill(other.pid, 0)
    except OSError:
        return False
    return True
