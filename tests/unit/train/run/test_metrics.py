"""metrics.jsonl, which is valid JSON whatever happens, and Megatron's lines."""

from __future__ import annotations

import json
import math
import re
import statistics

import msgspec
import pytest

from megatron_snip.config import Config
from megatron_snip.train.run import metrics
from megatron_snip.train.run.metrics import (
    MetricsWriter,
    RunningMean,
    cut_back_ranks,
    metrics_file,
    progress_line,
    read_metrics,
    validation_line,
)


def writer(tmp_path, iteration: int = 0, **more) -> MetricsWriter:
    return MetricsWriter(Config().replace(run_dir=str(tmp_path)), "id", iteration, **more)


def strict(line: str) -> dict:
    """JSON without the NaN that Python alone reads."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def fill(tmp_path, rows: list[dict]) -> None:
    with_rows = writer(tmp_path)
    for row in rows:
        with_rows.write(row)
    with_rows.close()


def test_rows_are_there_at_once(tmp_path):
    one = writer(tmp_path)
    row = {"iteration": 1, "lm loss": 2.5, "snip/plan_hash": "", "skipped": 0}
    one.write(row)
    assert read_metrics(tmp_path / "metrics.jsonl") == [row], "before the file is closed"
    one.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    odd = {"iteration": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 1.5, "f": "NaN", "g": 3}
    fill(tmp_path, [odd])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line) == {"iteration": 1, "a": None, "b": None, "c": None, "d": None, "e": 1.5, "f": "NaN", "g": 3}


def test_a_resume_cuts_back_to_the_checkpoint(tmp_path):
    fill(tmp_path, [{"iteration": i, "lm loss": 1.0 / i} for i in range(1, 8)])
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    again = writer(tmp_path, iteration=4)
    again.write({"iteration": 5, "lm loss": 0.0})
    again.close()
    assert path.read_text().splitlines(keepends=True) == [*before[:4], '{"iteration": 5, "lm loss": 0.0}\n']
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_each_rank_has_a_file_and_cuts_back_its_share(tmp_path):
    """Ranks 0..3 wrote; two processes go on, and the files of the others do not tell of what is undone."""
    for rank in range(4):
        one = MetricsWriter(Config().replace(run_dir=str(tmp_path), wandb_project="p" if rank else None), "", 0, rank)
        for i in range(1, 6):
            one.write({"iteration": i, "rank": rank})
        one.close()
    names = ["rank_0001.jsonl", "rank_0002.jsonl", "rank_0003.jsonl"]
    assert sorted(p.name for p in (tmp_path / "metrics").iterdir()) == names
    rows = lambda rank: [row["iteration"] for row in read_metrics(metrics_file(tmp_path, rank))]  # noqa: E731
    cut_back_ranks(tmp_path, 3, rank=1, world_size=2)
    assert [len(rows(rank)) for rank in range(4)] == [5, 3, 5, 3] and rows(3) == [1, 2, 3]
    cut_back_ranks(tmp_path, 3, rank=0, world_size=2)
    assert [len(rows(rank)) for rank in range(4)] == [5, 3, 3, 3], "rank 0's is its writer's"
    assert {row["rank"] for row in read_metrics(metrics_file(tmp_path, 2))} == {2}


def test_a_line_that_a_kill_cut_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "lm lo')
    assert [row["iteration"] for row in read_metrics(path)] == [1, 2]
    writer(tmp_path, iteration=9).close()
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


def test_a_damaged_line_costs_itself_alone(tmp_path, caplog):
    """Zeros that a crash left, half a line, no object, no iteration; a resume keeps the bytes of the others."""
    caplog.set_level("WARNING", "megatron_snip")
    good = [b'{"iteration": %d, "lm loss": 2.50}\n' % i for i in range(1, 6)]
    damaged = [
        b"\x00\x00\x00\n",
        b'{"iteration": 2, "lm lo\n',
        b"7\n",
        b'{"lm loss": 1.0}\n',
        b'{"a": "\xff"}\n',
        b"\n",
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join([*good[:2], *damaged, *good[2:]]))
    assert [row["iteration"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert caplog.messages == [f"{path}: damaged lines are left out: 6 of 12, by number 3, 4, 5, 6, 7, ..."]
    writer(tmp_path, iteration=4).close()
    assert path.read_bytes() == b"".join(good[:4])


def test_a_last_row_without_its_end_of_line_is_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}')
    writer(tmp_path, iteration=2).close()
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


def test_a_resume_tells_of_rows_that_were_never_written(tmp_path, caplog):
    """The disk was full until the run was killed, and its checkpoints lie on another."""
    caplog.set_level("WARNING", "megatron_snip")
    fill(tmp_path, [{"iteration": i} for i in (1, 2)])
    writer(tmp_path, iteration=2).close()
    assert caplog.messages == []
    writer(tmp_path, iteration=6).close()
    (said,) = caplog.messages
    assert said == f"{tmp_path / 'metrics.jsonl'} has no rows of iterations 3 to 6: they were never written"


class FullDisk:
    """A file that takes so many bytes and no more, until there is room again."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = self.file.write(bytes(data[: self.room]))
        self.room -= taken
        return taken

    def __getattr__(self, name: str):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 7, 16, 17, 18, 40])
def test_no_row_is_lost_once_the_disk_is_back(tmp_path, room, caplog):
    """Wherever in a row the disk was full; rows are 17 bytes."""
    caplog.set_level("WARNING", "megatron_snip")
    one = writer(tmp_path)
    one._file = disk = FullDisk(one._file, room)
    for i in range(1, 6):
        one.write({"iteration": i})
    whole = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]]
    assert [row["iteration"] for row in whole] == list(range(1, room // 17 + 1))
    assert one.reason is None and "No space left on device" in caplog.text
    disk.room = 10**6
    one.write({"iteration": 6})
    one.close()
    expected = "".join(f'{{"iteration": {i}}}\n' for i in range(1, 7))
    assert (tmp_path / "metrics.jsonl").read_text() == expected
    assert "is written again" in caplog.text


@pytest.mark.parametrize("room", [0, 7, 17, 40])
def test_a_checkpoint_holds_the_rows_that_could_not_be_written(tmp_path, room, caplog):
    """Else a run that is killed before it can try again, and goes on from there, would never have them."""
    caplog.set_level("WARNING", "megatron_snip")
    killed = writer(tmp_path)
    killed._file = FullDisk(killed._file, room)
    for i in range(1, 6):
        killed.write({"iteration": i})
    held = list(killed.unwritten)
    caplog.clear()
    again = writer(tmp_path, iteration=5, unwritten=held)
    assert caplog.messages == [] and again.unwritten == []
    again.write({"iteration": 6})
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(f'{{"iteration": {i}}}\n' for i in range(1, 7))


@pytest.mark.parametrize("room", [0, 7, 40, 70])
def test_going_back_on_a_full_disk(tmp_path, room, caplog):
    """The guard's way: rows of before are all there in the end, once, and none of what was given up."""
    caplog.set_level("WARNING", "megatron_snip")
    one = writer(tmp_path)
    one._file = disk = FullDisk(one._file, room)
    for i in range(1, 6):
        one.write({"iteration": i})
    one.go_back(3)
    one.write({"iteration": 4, "again": 1})
    held = list(one.unwritten)
    disk.room = 10**6
    one.write({"iteration": 5, "again": 1})
    one.close()
    expected = [{"iteration": i} for i in (1, 2, 3)] + [{"iteration": i, "again": 1} for i in (4, 5)]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected
    again = writer(tmp_path, iteration=3, unwritten=held)
    again.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == expected[:3], "rows of after the checkpoint are not its"


def test_a_disk_that_stays_full_is_the_end_at_last(tmp_path, monkeypatch, caplog):
    caplog.set_level("WARNING", "megatron_snip")
    monkeypatch.setattr(metrics, "ROWS_KEPT", 3)
    one = writer(tmp_path)
    one._file = FullDisk(one._file, 0)
    for i in range(1, 4):
        assert one.reason is None
        one.write({"iteration": i})
    assert one.reason is not None and "could not be written 3 times in a row" in one.reason
    one.close()
    assert caplog.messages[-1].endswith("metrics.jsonl lacks the last 3 rows")


ROW = {
    "iteration": 10, "consumed-samples": 160, "iteration-time": 0.6676, "learning-rate": 4.915152e-7, "batch-size": 8,
    "lm loss": 11.60323, "grad-norm": 5.658,
}  # fmt: skip


def test_megatrons_progress_line():
    line = progress_line(ROW, 100, nan_iterations=2, tokens=16384, left=90061.4, tflops=123.44)
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\] iteration", line)
    assert line.partition("]")[2] == (
        " iteration       10/     100 | consumed samples:          160 | elapsed time per iteration (ms): 667.6 |"
        " throughput per GPU (TFLOP/s/GPU): 123.4 | learning rate: 4.915152E-07 | global batch size:     8 |"
        " lm loss: 1.160323E+01 | loss scale: 1.0 | grad norm: 5.658 | number of skipped iterations:   2 |"
        " number of nan iterations:   2 | tokens per second: 24542 | time left: 1 day, 1:01:01 |"
    )
    assert "throughput" not in progress_line(ROW, 100, nan_iterations=0, tokens=1, left=0, tflops=None)
    unknown = {**ROW, "lm loss": math.nan, "grad-norm": math.nan}
    nan = progress_line(unknown, 100, nan_iterations=1, tokens=1, left=0, tflops=None)
    assert "lm loss: NAN" in nan


def test_megatrons_validation_line():
    assert validation_line(100, 11.0) == (
        " validation loss at iteration 100 on validation set | lm loss value: 1.100000E+01 |"
        " lm loss PPL: 5.987414E+04 |"
    )
    assert "PPL: 4.851652E+08" in validation_line(1, 1e4), "capped, as Megatron's"


def test_a_running_mean_with_its_standard_error():
    values, seen = [1.0, 4.0, -2.0, 0.5], RunningMean()
    assert seen.following("a", values[0]).summary() == {"mean": 1.0, "count": 1}, "one value tells no error"
    for value in values:
        seen = seen.following("a", value)
    expected = {"mean": statistics.mean(values), "count": 4, "standard_error": statistics.stdev(values) / 2}
    assert seen.summary() == pytest.approx(expected)
    assert seen.following("a", math.nan) == seen.following("a", math.inf) == seen, "what is not finite is left out"
    assert seen.following("b", 3.0).summary() == {"mean": 3.0, "count": 1}, "another plan begins anew"
    assert seen.following("b", math.nan).following("b", 3.0) == RunningMean("b", 1, 3.0)
    again = RunningMean(**json.loads(json.dumps(msgspec.to_builtins(seen))))
    assert again.following("a", 9.0) == seen.following("a", 9.0)
