"""What code does while it is watched: writes outside a folder, memory, time.  In this process, so that it is fast."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Bytes and seconds beyond which a case fails.
MOST_MEMORY, MOST_SECONDS = 1 << 30, 30.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Event -> which of its arguments are paths, and the place of the folder's descriptor behind each.
_PATHS = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),),
}  # fmt: skip
#: No reader of a file needs these.
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect")
_LINK = ("os.rename", "os.remove", "os.symlink", "os.link")  # act on a link itself


class Outside(BaseException):
    """A write outside the folder, which did not take place."""


class TooLate(BaseException):
    """A case took too long; raised wherever the code is."""


@dataclass
class Seen:
    """What was seen; bytes are what the peak added to what was there."""

    allowed: Path
    writes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0
    thread: int = 0


_now: Seen | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit events; a hook stays for the process's life, so it looks at nothing while nobody watches."""
    if _now is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        itself = arguments[2] & (os.O_EXCL | os.O_NOFOLLOW)  # fails at a link
        _look("os.link" if itself else event, arguments[0], None)
    elif event == "subprocess.Popen":
        if arguments[0] != sys.executable:
            _refuse(f"{event} {arguments[1]}")
    elif event in _NEVER or (event == "ctypes.dlopen" and arguments[0] is not None):
        _refuse(f"{event} {arguments}")
    elif event in _PATHS:
        for place, folder in _PATHS[event]:
            _look(event, arguments[place], arguments[folder] if folder is not None else None)


def _look(event: str, path: Any, folder: int | None) -> None:
    assert _now is not None
    if isinstance(path, int):  # a descriptor: its opening was looked at
        return
    name = os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder not in (None, -1) else "", os.fsdecode(path))
    parent = os.path.realpath(os.path.dirname(os.path.abspath(name)))
    whole = os.path.join(parent, os.path.basename(name)) if event in _LINK else os.path.realpath(name)
    if not Path(whole).is_relative_to(_now.allowed) and whole != os.devnull:
        _refuse(f"{event} {whole}")


def _refuse(what: str) -> None:
    assert _now is not None
    _now.writes.append(what[:300])
    raise Outside(what[:300])


def _status(key: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


@contextmanager
def watched(allowed: Path) -> Iterator[Seen]:
    """Nothing may be written outside a folder; memory is limited, and the block ends when its time is over."""
    global _now, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    seen, main = Seen(allowed.resolve()), threading.main_thread().ident
    assert main is not None and threading.get_ident() == main

    def late(*_: object) -> None:
        raise TooLate(f"it took more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGUSR1, late)
    timer = threading.Timer(MOST_SECONDS, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    timer.daemon = True
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    here, limits = _status("RssAnon"), resource.getrlimit(resource.RLIMIT_AS)
    # torch's pools and the stacks of threads take addresses too; what is used is looked at afterwards
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 2 * MOST_MEMORY, limits[1]))
    timer.start()
    begin = time.perf_counter()
    _now = seen
    try:
        yield seen
    finally:
        _now = None
        timer.cancel()
        seen.seconds = time.perf_counter() - begin
        resource.setrlimit(resource.RLIMIT_AS, limits)
        # the kernel may drop pages of mapped libraries meanwhile, so they count neither before nor after
        seen.bytes = max(0, _status("VmHWM") - _status("RssFile") - here)
        signal.signal(signal.SIGUSR1, before)
