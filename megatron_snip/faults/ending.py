"""How a process leaves a run that has failed: one line from one process, tracebacks and stacks into files."""

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

from megatron_snip.faults.watch import Watch

#: What gloo, NCCL and the store say where another process has gone, and where one does not come.
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile(r"gloo/transport|connectFullMesh|ncclRemoteError|NCCL.*(abort|timeout)", re.IGNORECASE)
_PACKAGE = str(Path(__file__).resolve().parents[1])


def lost_connection(error: BaseException) -> str | None:
    """How an error tells that another process has gone: "lost" or "timed out"; None if it tells something else."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, DistError) or (isinstance(seen, RuntimeError) and _LOST.search(text)):
            return "timed out" if _TIMED_OUT.search(text) else "lost"
        seen = seen.__cause__ or seen.__context__
    return None


def one_line(error: BaseException) -> str:
    """`Type: message (file:line)`, the line being the innermost of this package."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}" if text else f"{type(error).__name__}{place}"


class Ending:
    """What a process needs to leave a failed run.  One a process; `train` fills it in as the run comes to life.

    error_file: where torchrun looks for the line that its own summary is to show.
    """

    def __init__(self, rank: int, error_file: str | None = None) -> None:
        self.rank, self.error_file = rank, error_file
        self.folder: Path | None = None  # of stacks and tracebacks, made when there is one to write
        self.advice: Callable[[], str] = str  # what to do now, as the end of a line
        self.watch: Watch | None = None
        self._file: IO[str] | None = None
        self._leaving = threading.Lock()
        self._unanswered = False  # the store did not answer in time

    def open(self) -> None:
        """Open the file of stacks, so that a crash of the interpreter itself leaves one."""
        assert self.folder is not None
        with contextlib.suppress(OSError):  # then there are no stacks, but there is a run
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            faulthandler.enable(self._file, all_threads=True)

    @property
    def path(self) -> Path:
        """This process's file of stacks."""
        assert self.folder is not None
        return self.folder / f"rank_{self.rank:04d}.txt"

    def close(self) -> None:
        """The run went well: end the thread, and leave no empty file."""
        if self.watch is not None:
            self.watch.close()
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            with contextlib.suppress(OSError):
                if self.path.stat().st_size == 0:
                    self.path.unlink()
                self.path.parent.rmdir()  # fails where others have theirs

    def after(self, error: BaseException) -> NoReturn:
        """Leave after an error that ended the main thread: tell it if nobody has, its traceback into the file."""
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, who has seen another process end
        with self._leaving:
            self._write("".join(traceback.format_exception(error)), error)
            if self._first():
                self._tell(f"{self._describe(error)}; {self.advice()}", 1)
            else:
                self._ask(self._wait_until_told, 10.0)
            self.leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def from_watch(self, line: str | None) -> None:
        """Leave from the watching thread: it has seen a process fail (line), or that the run is over (None)."""
        if not self._leaving.acquire(blocking=False):
            return  # the main thread leaves
        self._write_stacks()
        if line is not None and self._first():
            self._tell(f"{line}; {self.advice()}", 1)
        elif self.watch is not None:
            self._ask(self.watch.wake_stopped, 2.0)
        self.leave(1)

    def tell_user(self, line: str, status: int = 2) -> NoReturn:
        """Leave with a user's mistake, or what else is one line and an exit status of its own."""
        if self._first():
            self._tell(line, status)
        self.leave(status)

    def leave(self, status: int) -> NoReturn:
        """End this process at once: others may be inside a collective, so there is no leave-taking."""
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
            who = "the run's store does not answer either, its node or the network may be gone"
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
        """Whether this process is to tell; where the store does not answer, each one tells."""
        if self.watch is None:
            return True
        return self._ask(self.watch.take_the_word, 5.0) is not False

    def _wait_until_told(self) -> None:
        while self.watch is not None and not self.watch.told():
            time.sleep(0.1)

    def _write(self, text: str, error: BaseException) -> None:
        """A traceback into the file of stacks, or to stderr where there is none."""
        try:
            if self.folder is None:
                raise OSError("no run folder yet")
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}, process {os.getpid()}\n{text}\n")
        except OSError:
            if lost_connection(error) is None:
                print(text, file=sys.stderr, flush=True)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}, process {os.getpid()}: stacks\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _ask(self, function: Callable[[], Any], seconds: float) -> Any:
        """The function's value; None if it fails or takes too long, as where the store's process is stopped or away.

        Once it took too long nothing is asked any more, so that a process whose cable was cut ends soon.
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
