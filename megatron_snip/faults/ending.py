"""How a rank leaves a failed run: one rank prints one line; tracebacks and stacks go to files."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from torch.distributed import DistError

from megatron_snip.faults.heartbeat import Watch

#: Errors of gloo, NCCL and the store when another rank has died or does not arrive.
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile(r"gloo/transport|connectFullMesh|ncclRemoteError|NCCL.*(abort|timeout)", re.IGNORECASE)
_PACKAGE = str(Path(__file__).resolve().parents[1])


def lost_connection(error: BaseException) -> str | None:
    """Whether an error means that another rank is gone: "lost" or "timed out", or None for other errors."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, DistError) or (isinstance(seen, RuntimeError) and _LOST.search(text)):
            return "timed out" if _TIMED_OUT.search(text) else "lost"
        seen = seen.__cause__ or seen.__context__
    return None


def one_line(error: BaseException) -> str:
    """`Type: message (file:line)` with the innermost line of this package."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}" if text else f"{type(error).__name__}{place}"


class Ending:
    """State that a rank needs to leave a failed run.  One per process; `train` fills it in during startup.

    error_file: where torchrun reads the message for its own summary.
    """

    def __init__(self, rank: int, error_file: str | None = None) -> None:
        self.rank, self.error_file = rank, error_file
        self.folder: Path | None = None  # for stacks and tracebacks; created on the first write
        self.advice: Callable[[], str] = str  # how to continue; ends the error line
        self.watch: Watch | None = None
        self._file: IO[str] | None = None
        self._leaving = threading.Lock()
        self._unanswered = False  # the store did not answer in time

    def open(self) -> None:
        """Open the file of stacks, so that even a crash of the interpreter writes one."""
        assert self.folder is not None
        with contextlib.suppress(OSError):  # without stacks the run still works
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            faulthandler.enable(self._file, all_threads=True)

    @property
    def path(self) -> Path:
        """This rank's file of stacks."""
        assert self.folder is not None
        return self.folder / f"rank_{self.rank:04d}.txt"

    def close(self) -> None:
        """Clean up after a successful run: stop the thread and remove empty files."""
        if self.watch is not None:
            self.watch.close()
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            with contextlib.suppress(OSError):
                if self.path.stat().st_size == 0:
                    self.path.unlink()
                self.path.parent.rmdir()  # fails if other ranks have files there

    def after(self, error: BaseException) -> NoReturn:
        """Leave after an error in the main thread: write its traceback, and report it if no other rank has."""
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank's process ends
        with self._leaving:
            self._write("".join(traceback.format_exception(error)), error)
            if self._first():
                self._tell(f"{self._describe(error)}; {self.advice()}", 1)
            else:
                self._ask(self._wait_until_told, 10.0)
            self.leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def from_watch(self, line: str | None) -> None:
        """Leave from the watch thread: it saw a rank fail (line), or another rank ended the run (None)."""
        if not self._leaving.acquire(blocking=False):
            return  # the main thread is already leaving
        self._write_stacks()
        if line is not None and self._first():
            self._tell(f"{line}; {self.advice()}", 1)
        elif self.watch is not None:
            self._ask(self.watch.wake_stopped, 2.0)
        self.leave(1)

    def tell_user(self, line: str, status: int = 2) -> NoReturn:
        """Leave with the message of a user's mistake, or with any other line and its own exit status."""
        if self._first():
            self._tell(line, status)
        self.leave(status)

    def leave(self, status: int) -> NoReturn:
        """End this process at once, without cleanup: other ranks may be inside a collective."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    def _describe(self, error: BaseException) -> str:
        kind = lost_connection(error)
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        if kind is None:
            return one_line(error)
        missing = self._ask(self.watch.missing, 15.0) if self.watch is not None else None
        who = "; ".join((missing or [])[:4])
        what = "waited too long for" if kind == "timed out" else "lost its connection to"
        if self._unanswered:
            who = "the run's store does not answer either; its node or the network may be down"
        return f"rank {self.rank} {what} {'another rank' if not who else f'another rank: {who}'}"

    def _tell(self, line: str, status: int) -> None:
        where = f" [rank {self.rank}]" if self.rank > 0 else ""
        print(f"error{where}: {line}", file=sys.stderr, flush=True)
        if self.error_file:
            about = {"message": line, "errorCode": status, "extraInfo": {"timestamp": str(int(time.time()))}}
            with contextlib.suppress(OSError):
                Path(self.error_file).write_text(json.dumps({"message": about}))
        if self.watch is not None:
            self._ask(lambda: self.watch.tell(line), 2.0)  # type: ignore[union-attr]
            self._ask(self.watch.wake_stopped, 2.0)

    def _first(self) -> bool:
        """Whether this rank reports the failure.  If the store does not answer, every rank does."""
        if self.watch is None:
            return True
        return self._ask(self.watch.take_the_word, 5.0) is not False

    def _wait_until_told(self) -> None:
        while self.watch is not None and not self.watch.told():
            time.sleep(0.1)

    def _write(self, text: str, error: BaseException) -> None:
        """Append a traceback to the file of stacks, or print it to stderr if there is no such file."""
        try:
            if self.folder is None:
                raise OSError("no run folder yet")
            with self._append("") as file:
                file.write(f"{text}\n")
        except OSError:
            if lost_connection(error) is None:
                print(text, file=sys.stderr, flush=True)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, AssertionError), self._append(": stacks") as file:
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _append(self, what: str) -> IO[str]:
        """Open the file of stacks, and write the time, this rank and what follows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}, process {os.getpid()}{what}\n")
        return file

    def _ask(self, function: Callable[[], Any], seconds: float) -> Any:
        """Call the function; None if it fails or takes too long (the store's process may be stopped or dead).

        After one time-out, later calls return None at once, so that a rank without a network ends soon.
        """
        if self._unanswered:
            return None
        found: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                found.append(function())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        self._unanswered = thread.is_alive()
        return found[0] if found else None
