"""metrics.jsonl, Megatron's progress line, and the trackers behind them.

metrics.jsonl has one JSON object per iteration, with the keys that Megatron users chart.  A resumed run truncates it to
the checkpoint's iteration, so no iteration appears twice.  With --log-all-ranks, the other ranks write rows of their
own to metrics/rank_0001.jsonl and so on.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_snip.config import Config
from megatron_snip.faults.writes import FailedWrites
from megatron_snip.files.io import parse_json
from megatron_snip.files.json import Count, Finite, PlanOrNone, checked, write_atomic
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train.run.trackers import start_trackers

LOGGER = logging.getLogger("megatron_snip")
#: Rows kept in memory while writes fail; one more consecutive failure ends the run.
ROWS_KEPT = 1000
#: Consecutive skipped iterations that cause an alert.
SKIPPED_IN_A_ROW = 3


class RunningMean(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean of the values seen under one plan, with its standard error.  Source: Welford, Technometrics 4 (1962)."""

    plan: PlanOrNone = ""
    count: Count = 0
    mean: Finite = 0.0
    squares: Annotated[float, Meta(ge=0)] = 0.0  # sum of squared differences from the mean

    def following(self, plan: str, value: float) -> RunningMean:
        """The mean with one more value.  Another plan starts over; values that are not finite are ignored."""
        before = self if plan == self.plan else RunningMean(plan)
        if not math.isfinite(value):
            return before
        count, difference = before.count + 1, value - before.mean
        mean = before.mean + difference / count
        return RunningMean(plan, count, mean, before.squares + difference * (value - mean))

    def summary(self) -> dict[str, float]:
        """The count, the mean and, from two values on, the standard error."""
        found: dict[str, float] = {"count": self.count}
        if self.count > 0:
            found["mean"] = self.mean
        if self.count > 1:
            found["standard_error"] = math.sqrt(self.squares / (self.count - 1) / self.count)
        return found


def _json_line(row: Mapping[str, Any]) -> str:
    """One row as valid JSON, with null for NaN and infinities, which JSON does not have."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


_Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Value = _Whole | float | str | bool | None


class _Row(msgspec.Struct, frozen=True):
    """The field that every row has."""

    iteration: Count


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """The row in one line of metrics: numbers and texts by name, with an iteration.  None for anything else."""
    try:
        values = parse_json(line)
        checked(values, _Row)
        return checked(values, dict[str, _Value])
    except ValueError:  # not text, not JSON, or not a row
        return None


def lines_of(content: bytes, path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], list[str]]:
    """The lines of a metrics file, each with its row, and a note if any are damaged and left out.

    A last line that a kill has truncated does not count.
    """
    found, damaged = [], []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if (row := row_of(line)) is not None:
            found.append((line + b"\n", row))
        elif number < len(lines):
            damaged.append(str(number))
    if not damaged:
        return found, []
    shown = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
    return found, [f"{path}: damaged lines are left out: {len(damaged)} of {len(lines)}, by number {shown}"]


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """`lines_of` a file, [] if it is missing; logs the note as a warning."""
    found, notes = lines_of(path.read_bytes() if path.is_file() else b"", path)
    for note in notes:
        LOGGER.warning(note)
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file.  Damaged lines are skipped with a warning, and a truncated last line without one."""
    return [row for _, row in _read_lines(path)]


def metrics_file(run_dir: Path, rank: int = 0) -> Path:
    """Path of a rank's rows."""
    return run_dir / f"metrics/rank_{rank:04d}.jsonl" if rank else run_dir / "metrics.jsonl"


def cut_back(path: Path, iteration: int) -> int | None:
    """Drop the rows of later iterations; the others stay byte for byte.  Creates the file if it is missing.

    Returns the last iteration that has a row.
    """
    lines = [(line, row["iteration"]) for line, row in _read_lines(path) if row["iteration"] <= iteration]
    write_atomic(path, b"".join(line for line, _ in lines).decode())
    return max((number for _, number in lines), default=None)


def cut_back_ranks(run_dir: Path, iteration: int, rank: int, world_size: int) -> None:
    """`cut_back` for this rank's share of the files other than rank 0's.  Every rank must call it.

    There may be files of more ranks than now, or from a run with --log-all-ranks that this one lacks.
    """
    for path in sorted(run_dir.glob("metrics/rank_*.jsonl")):
        number = path.stem.removeprefix("rank_")
        if number.isdigit() and int(number) % world_size == rank:
            cut_back(path, iteration)


class MetricsWriter:
    """A rank's metrics file and, on rank 0, the trackers.

    A row that cannot be written, such as on a full disk, is kept and written before the next one; see `FailedWrites`.
    """

    def __init__(
        self, config: Config, run_id: str, iteration: int, rank: int = 0, unwritten: Sequence[str] = ()
    ) -> None:
        self.path = metrics_file(Path(config.logging.run_dir), rank)
        self._pending = bytearray()  # bytes not written yet
        self.unwritten: list[str] = []  # lines that may not be complete in the file, for a checkpoint
        self.failed = FailedWrites(str(self.path), ROWS_KEPT)
        last = cut_back(self.path, iteration)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        last = self._add_missing(unwritten, last, iteration)
        if last is not None and last < iteration:
            LOGGER.warning(f"{self.path} has no rows of iterations {last + 1} to {iteration}: they were never written")
        trackers = start_trackers(config, run_id, iteration) if rank == 0 else []
        self._trackers = [(tracker, FailedWrites(tracker.name, ROWS_KEPT)) for tracker in trackers]
        self._skipped = self._skipped_in_a_row = 0  # in total, as in rows

    def _add_missing(self, lines: Sequence[str], last: int | None, iteration: int) -> int | None:
        """Append those lines after the file's ``last`` row, up to an iteration; returns the new last row."""
        for line in lines:
            number = json.loads(line)["iteration"]
            if (-1 if last is None else last) < number <= iteration:
                self._add(line)
                last = number
        return last

    def go_back(self, iteration: int) -> None:
        """Continue after this iteration and drop later rows, even on a full disk."""
        lines, self._pending, self.unwritten = self.unwritten, bytearray(), []
        end, last = 0, None
        for line, row in _read_lines(self.path):
            if row["iteration"] > iteration:
                break
            end, last = end + len(line), row["iteration"]
        self._file.truncate(end)
        self._add_missing(lines, last, iteration)
        for tracker, failed in self._trackers:
            failed.attempt(partial(tracker.go_back, iteration))

    def alert(self, title: str, text: str, iteration: int = 0) -> None:
        """Send an alert to all trackers."""
        for tracker, failed in self._trackers:
            failed.attempt(partial(tracker.alert, title, text, iteration))

    def write(self, row: Mapping[str, Any], plan: Plan | None = None, predictions: Predictions | None = None) -> None:
        """Write one iteration's metrics; the line goes to the system at once.

        plan: the plan that takes effect, for trackers that show more than numbers.
        """
        self._add(_json_line(row))
        for tracker, failed in self._trackers:
            failed.attempt(partial(tracker.log, row, plan, predictions))
        if self._trackers:
            self._alert_of(row)

    def _add(self, line: str) -> None:
        self._pending += line.encode()
        self.unwritten.append(line)
        if self.failed.attempt(self._write_pending):
            self.unwritten.clear()

    def _alert_of(self, row: Mapping[str, Any]) -> None:
        """Send alerts for a failed solve and for a streak of skipped iterations."""
        if why := row.get("snip/solve_error"):
            text = f"iteration {row['iteration']}: keeping the current plan: {why}"
            self.alert("no new plan", text, row["iteration"])
        skipped = row.get("skipped", self._skipped)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if self._skipped_in_a_row == SKIPPED_IN_A_ROW:
            text = f"loss or gradient was not finite in {SKIPPED_IN_A_ROW} iterations in a row"
            self.alert("iterations are skipped", f"iteration {row['iteration']}: {text}", row["iteration"])

    @property
    def reason(self) -> str | None:
        """Why the run must end: too many consecutive failed writes.  None while it may continue."""
        return next((one.reason for one in (self.failed, *(f for _, f in self._trackers)) if one.reason), None)

    def _write_pending(self) -> None:
        """Write all pending bytes in order.  Bytes that a failing write has taken are not written again."""
        while self._pending:
            del self._pending[: self._file.write(self._pending) or 0]

    def close(self) -> None:
        """Close the file and the trackers.  Never raises."""
        self.failed.attempt(self._write_pending)
        if self._pending:
            LOGGER.warning(f"{self.path} lacks the last {self._pending.count(bytes([10]))} rows")
        else:
            self.failed.attempt(lambda: os.fsync(self._file.fileno()))
        self._file.close()
        for tracker, failed in self._trackers:
            failed.attempt(tracker.finish)


def progress_line(
    row: Mapping[str, Any],
    total: int,
    *,
    nan_iterations: int,
    tokens: float,
    left: float,
    tflops: float | None,
    peak: float | None = None,
) -> str:
    """Megatron's progress line for one row of metrics, then tokens per second and the time left.

    `iteration-time` is in seconds, and so is ``left``.  tokens: of an iteration.  peak: the device's peak TFLOP/s in
    BF16, for MFU.
    """
    throughput = "" if tflops is None else f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    if tflops is not None and peak is not None:
        throughput += f" MFU (%): {100 * tflops / peak:.1f} |"
    return (
        f" [{datetime.now()}] iteration {row['iteration']:8d}/{total:8d} |"
        f" consumed samples: {row['consumed-samples']:12d} |"
        f" elapsed time per iteration (ms): {row['iteration-time'] * 1000:.1f} |{throughput}"
        f" learning rate: {row['learning-rate']:.6E} | global batch size: {row['batch-size']:5d} |"
        f" lm loss: {row['lm loss']:.6E} | loss scale: 1.0 | grad norm: {row['grad-norm']:.3f} |"
        f" number of skipped iterations: {nan_iterations:3d} | number of nan iterations: {nan_iterations:3d} |"
        f" tokens per second: {tokens / row['iteration-time']:.0f} | time left: {timedelta(seconds=round(left))} |"
    )


def validation_line(iteration: int, loss: float) -> str:
    """Megatron's line for a validation."""
    return (
        f" validation loss at iteration {iteration} on validation set | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {math.exp(min(loss, 20.0)):.6E} |"
    )
