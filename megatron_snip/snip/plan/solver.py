"""The ILP in its own process: training does not wait for a solve, and survives its crash.

``BackgroundSolver(request)`` starts this module as a process that imports numpy and HiGHS but not torch.  The request
is one line of JSON on stdin, the answer the last line on stdout.  Numbers are Python's shortest exact decimals, so the
child solves exactly the same matrices.

The child ends when it is done, when stdin closes or its parent is gone (checked every half second), or on its own
alarm.  The parent ends it in ``result`` and ``cancel``, which always reap it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import IO, Annotated, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import megatron_snip
from megatron_snip.errors import UserError
from megatron_snip.files.json import Finite, Text, checked
from megatron_snip.snip.plan.ilp import InfeasibleTarget, Solution, check_target, solve
from megatron_snip.snip.plan.program import Limit, Terms

#: Seconds beyond the solve's time limit until child and parent give up, for startup, I/O and a busy machine.
GRACE_SECONDS = 60.0
_PARENT_CHECK_SECONDS = 0.5
_MOST_KEPT = 1 << 24  # bytes of a child's output


class SolverFailed(RuntimeError):
    """The child died, could not start, gave no answer in time, or an invalid one."""


class SolverKilled(SolverFailed):
    """A signal killed the child, perhaps because memory ran out.  A retry may succeed."""


#: Dtypes of the arrays that are not float64.
_KINDS: dict[str, type[np.generic]] = {
    **dict.fromkeys(("stage", "ties", "fixed", "current"), np.int64), "reserved": np.bool_,
}  # fmt: skip
_Row = Annotated[list[float], Meta(min_length=1, max_length=4096)]
_Matrix = Annotated[list[_Row], Meta(min_length=1, max_length=1 << 16)]
_Ids = list[Annotated[int, Meta(ge=-1, le=1 << 20)]]


class _Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Limit` in JSON."""

    name: Text
    values: _Matrix
    at_most: Finite


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request in JSON; sizes are checked against quality_loss."""

    quality_loss: _Matrix
    efficiency: _Matrix
    target: Finite
    stage: _Ids | None
    time: _Matrix | None
    ties: _Ids | None
    fixed: _Ids | None
    reserved: list[bool] | None
    current: _Ids | None
    churn: float | _Matrix
    limits: list[_Limit]
    gap: Finite
    node_limit: Annotated[int, Meta(ge=0, le=1 << 40)]
    time_limit: Annotated[float, Meta(ge=0, le=1e6)]


class SolveRequest(Terms):
    """Terms that a checkpoint can hold.

    ``to_dict`` gives plain JSON values, and ``from_dict`` the same request, bit for bit.
    """

    def to_dict(self) -> dict[str, Any]:
        """Lists, numbers and None by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        limits = [{**vars(limit), "values": limit.values.tolist()} for limit in values.pop("limits")]
        plain = {name: np.asarray(v).tolist() if v is not None else None for name, v in values.items()}
        return {**plain, "limits": limits}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SolveRequest:
        """The request from ``to_dict``.  Raises UserError for a field of the wrong type, range or size."""
        found = msgspec.structs.asdict(checked(values, _Request))
        rows, columns = len(found["quality_loss"]), len(found["quality_loss"][0])
        shape_of: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("quality_loss", "efficiency", "time"), (rows, columns)),
            **dict.fromkeys(("stage", "ties", "fixed", "current"), (rows,)),
            "reserved": (columns,),
            "churn": (columns, columns) if isinstance(found["churn"], list) else (),
        }
        for name, shape in shape_of.items():
            if found[name] is not None:
                found[name] = _array(name, found[name], shape)
        found["limits"] = tuple(
            Limit(one["name"], _array(f"limits: {one['name']}", one["values"], (rows, columns)), one["at_most"])
            for one in map(msgspec.structs.asdict, found["limits"])
        )
        return cls(**found)

    def most(self) -> float:
        """The highest target, at most 1, that a plan reaches."""
        try:
            check_target(replace(self, target=1.0))
        except InfeasibleTarget as error:
            return max(0.0, error.reachable * (1 - 1e-9))
        return 1.0

    def solve(self) -> Solution:
        """Solve in this process; see ``ilp.solve``."""
        return solve(self)


def _array(name: str, values: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Checked values as an array.  Raises UserError unless they have this shape."""
    if (len(shape) == 2 and any(len(row) != shape[1] for row in values)) or (shape and len(values) != shape[0]):
        raise UserError(f"field {name} is not {' x '.join(map(str, shape))}, the size that quality_loss implies")
    return np.array(values, _KINDS.get(name, np.float64))


class BackgroundSolver:
    """One solve in progress.  ``done()`` never waits, ``result()`` waits, ``cancel()`` ends it.

    command: a child to start instead of this module, for tests.  Raises SolverFailed if it cannot start.
    As a context manager, it cancels on exit.
    """

    def __init__(self, request: SolveRequest, *, command: Sequence[str] | None = None) -> None:
        self.request = request
        self._outcome: Solution | Exception | None = None
        self._deadline = time.monotonic() + request.time_limit + GRACE_SECONDS
        try:
            self._child = subprocess.Popen(
                [*(command or megatron_snip.child_command(__name__)), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=megatron_snip.PLACE,  # so that relative paths in PYTHONPATH cannot point into data
            )
        except OSError as error:
            raise SolverFailed(f"the solver's process did not start: {error}") from error
        line = json.dumps(request.to_dict()).encode() + b"\n"
        # A child that never reads would block the write of a long request, so a thread does it.
        self._writer = threading.Thread(target=self._write, args=(line,), name="solver-stdin", daemon=True)
        self._writer.start()
        # Threads read its output, so that much output does not block it either.  Files would fail on a full disk.
        self._output, self._errors = _Reader(self._child.stdout), _Reader(self._child.stderr)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def done(self) -> bool:
        """Whether ``result()`` would return or raise at once."""
        return self._outcome is not None or self._child.poll() is not None

    def result(self, timeout: float | None = None) -> Solution:
        """The solution.  Waits up to ``timeout`` seconds, never beyond time_limit + GRACE_SECONDS.

        Raises SolverFailed, also if there is none by then (the child is killed; a late answer is dropped),
        InfeasibleTarget, or the UserError of ``ilp.solve``.  Later calls repeat the outcome.
        """
        if self._outcome is None:
            self._outcome = self._wait(timeout)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Kill and reap the child, but keep a result that has arrived.  May be called at any time and repeatedly."""
        if self._outcome is None:
            self._end()
            self._outcome = SolverFailed("the solve was cancelled")

    def __enter__(self) -> BackgroundSolver:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _wait(self, timeout: float | None) -> Solution | Exception:
        left = max(0.0, self._deadline - time.monotonic())
        seconds = left if timeout is None else min(timeout, left)
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._end()
            return SolverFailed(f"the solver gave no answer within {seconds:.1f} seconds and was ended")
        output, errors = self._output.text(), self._errors.text()
        self._end()
        if code != 0:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            kind = SolverKilled if code < 0 else SolverFailed
            return kind(f"the solver's process failed ({how}){_last_line(errors)}")
        return _parse_answer(output, len(self.request.quality_loss))

    def _end(self) -> None:
        """Kill the child if alive, reap it, close everything."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        self._writer.join()  # the pipe has lost its reader, so a blocked write has failed
        with contextlib.suppress(OSError):
            assert self._child.stdin is not None
            self._child.stdin.close()
        self._output.text()
        self._errors.text()

    def _write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # a dead child is reported by its exit status
            self._child.stdin.write(line)
            self._child.stdin.flush()  # stays open: its end tells the child to stop


class _Reader(threading.Thread):
    """Keeps the end of a pipe's output, and closes the pipe at its end."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        super().__init__(name="solver-output", daemon=True)
        assert pipe is not None
        self._pipe, self._kept = pipe, b""
        self.start()

    def run(self) -> None:
        """Read until all writers have closed the pipe."""
        with self._pipe:
            while part := os.read(self._pipe.fileno(), 1 << 16):
                self._kept = (self._kept + part)[-_MOST_KEPT:]

    def text(self) -> str:
        """The output kept.  Waits at most a second for a grandchild that holds the pipe open."""
        self.join(1.0)
        return self._kept.decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


def _parse_answer(output: str, count: int) -> Solution | Exception:
    """The answer on the last line of the child's output; HiGHS may print before it."""
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
        kind = answer["kind"]
        if kind == "infeasible":
            return InfeasibleTarget(str(answer["message"]), float(answer["reachable"]))
        if kind == "user_error":
            return UserError(str(answer["message"]))
        choice = np.array(answer["choice"], np.int64)
        if kind != "solution" or choice.shape != (count,):
            raise UserError("no solution for these linears")
        numbers = {name: float(answer[name]) for name in ("objective", "bound", "gap", "seconds", "churn")}
        makespan = None if answer["makespan"] is None else float(answer["makespan"])
        return Solution(choice=choice, status=str(answer["status"]), makespan=makespan, **numbers)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        shown = lines[-1][:200] if lines else ""
        return SolverFailed(f"the solver's answer cannot be read ({error!r}): {shown!r}")


def _answer(line: str) -> dict[str, Any]:
    """The child's work: from the request's JSON to the answer's."""
    try:
        request = SolveRequest.from_dict(json.loads(line))
        found = request.solve()
    except InfeasibleTarget as error:
        return {"kind": "infeasible", "message": str(error), "reachable": error.reachable}
    except UserError as error:
        return {"kind": "user_error", "message": str(error)}
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return {"kind": "solution", **values, "choice": found.choice.tolist()}


def _exit_with_parent(parent: int) -> NoReturn:
    """End this process when stdin closes or the parent is gone.

    The second check covers a pipe whose other end a fork of the parent has inherited.
    HiGHS releases the GIL while it solves, so this thread keeps running.
    """
    while True:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_SECONDS)
        if os.getppid() != parent or (readable and not os.read(0, 4096)):
            os._exit(3)


def main() -> None:
    """Entry point of the child: read one request from stdin, write one answer to stdout."""
    parent = int(sys.argv[1])  # it may be gone by now, with another process as our parent
    # The default action ends the process even while no Python code can run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.alarm(int(GRACE_SECONDS))
    line = _read_line()
    signal.alarm(int(json.loads(line)["time_limit"] + GRACE_SECONDS))
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    answer = json.dumps(_answer(line))
    sys.stdout.write("\n" + answer + "\n")  # HiGHS's own output stays on separate lines
    sys.stdout.flush()
    os._exit(0)  # skip the interpreter's teardown while a thread is in select()


def _read_line() -> str:
    """One line from file descriptor 0, unbuffered, so that the watching thread sees what follows."""
    parts = bytearray()
    while not parts.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit("stdin closed before the request was complete")
        parts += part
    return parts.decode()
