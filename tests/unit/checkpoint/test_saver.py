"""Checkpoints are whole or absent, whatever ends a save; what fails is tried again; old ones go as asked."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from megatron_snip.checkpoint import saver as saver_module
from megatron_snip.checkpoint.lock import LOCK
from megatron_snip.checkpoint.manifest import (
    VERSION,
    iterations,
    newest,
    read_manifest,
    tracked_iteration,
)
from megatron_snip.checkpoint.saver import MOST_FAILED
from tests.unit.checkpoint.conftest import ANOTHER, RUN, loaded, tensors

TRACKER = "latest_checkpointed_iteration.txt"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(iteration: int, value: float) -> dict:
    return {"iteration": iteration, "value": value}


@pytest.mark.parametrize("async_save", [False, True])
def test_what_was_saved_is_loaded(async_save, save, tmp_path):
    assert newest(tmp_path) == (None, []) and newest(tmp_path / "none") == (None, [])
    save(tmp_path, 3, 1.5, async_save=async_save)
    save(tmp_path, 12, 2.5, async_save=async_save)
    assert loaded(tmp_path) == (12, 2.5, 2.5)
    assert names(tmp_path) == ["iter_0000003", "iter_0000012", TRACKER]
    (tmp_path / TRACKER).write_text("3")
    assert loaded(tmp_path) == (3, 1.5, 1.5), "an earlier one can be chosen by hand"


def test_an_iteration_is_saved_anew(save, tmp_path):
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, 5, value)
    assert loaded(tmp_path) == (5, 3.0, 3.0)
    assert names(tmp_path) == ["iter_0000005", TRACKER]


def test_a_folder_that_goes_while_it_is_made_is_made_again(save, tmp_path, monkeypatch):
    """The first process removes what an earlier try left while another one finds it there."""
    mkdir, tries = FileSystemWriter.prepare_local_plan, []

    def raced(self, plan):
        tries.append(plan)
        if len(tries) == 1:
            raise FileExistsError(17, "File exists", str(self.path))
        return mkdir(self, plan)

    monkeypatch.setattr(FileSystemWriter, "prepare_local_plan", raced)
    save(tmp_path, 3, 1.5)
    assert loaded(tmp_path) == (3, 1.5, 1.5) and len(tries) == 2


class Killed(BaseException):
    """The end of the process at this point."""


def kill_at_call(monkeypatch, step: str, number: int, *, after: bool) -> None:
    """Make the module's number-th call of a function the last thing that happens: before it, or once it is done."""
    library, _, name = step.rpartition(".")
    module = getattr(saver_module, library) if library else saver_module
    real, calls = getattr(module, name), []

    def deadly(*args, **kwargs):
        calls.append(name)
        if len(calls) == number and not after:
            raise Killed
        result = real(*args, **kwargs)
        if len(calls) == number and after:
            raise Killed
        return result

    if library:  # others use it too, so the module's view of it is changed, not the library
        kept = {key: getattr(module, key) for key in dir(module) if not key.startswith("__")}
        monkeypatch.setattr(saver_module, library, SimpleNamespace(**{**kept, name: deadly}))
    else:
        monkeypatch.setattr(saver_module, name, deadly)


STEPS = [("dcp_save", 1), ("write_atomic", 1), ("write_atomic", 2), ("os.rename", 1), ("write_atomic", 3)]
STEPS += [("shutil.rmtree", number) for number in (1, 2)] + [("_sync", 1), ("_sync", 2)]
#: (step, its number, whether the iteration was there before, when a second rename puts the old one aside)
KILLS = [(*step, again) for step in STEPS for again in (False, True)] + [("os.rename", 2, True)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("step", "number", "again"), KILLS)
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(step, number, after, again, save, tmp_path, monkeypatch):
    if again:  # a run that was killed after iteration 8, and went on from 4
        save(tmp_path, 8, 7.0)
    save(tmp_path, 4, 1.0)
    with monkeypatch.context() as patch:
        kill_at_call(patch, step, number, after=after)
        with pytest.raises(BaseException) as info:
            save(tmp_path, 8, 2.0)
        assert "Killed" in repr(info.value) or "Killed" in str(info.value)
    assert loaded(tmp_path) in [(4, 1.0, 1.0), (8, 2.0, 2.0)]
    save(tmp_path, 8, 3.0)
    assert loaded(tmp_path) == (8, 3.0, 3.0)
    assert names(tmp_path) == ["iter_0000004", "iter_0000008", TRACKER]


def test_what_is_not_finite_is_kept_and_not_continued(save, tmp_path, caplog):
    save(tmp_path, 3, 1.0)
    save(tmp_path, 4, 2.0, finite=False)
    save(tmp_path, 5, float("nan"))
    save(tmp_path, 6, float("inf"))
    assert loaded(tmp_path) == (3, 1.0, 1.0) and tracked_iteration(tmp_path) == 3
    assert iterations(tmp_path) == [6, 5, 4, 3], "for whoever looks for the reason"
    assert read_manifest(tmp_path / "iter_0000004").not_finite == ("loss or gradient",)
    assert read_manifest(tmp_path / "iter_0000005").not_finite == ("model.a", "optim.a.exp_avg")
    (tmp_path / TRACKER).write_text("6")
    iteration, passed_over = newest(tmp_path)
    assert iteration == 3 and len(passed_over) == 3
    assert passed_over[0] == (
        f"{tmp_path}/iter_0000006: it was saved with values that are not finite: model.a, optim.a.exp_avg"
    )


def test_old_ones_are_deleted_as_asked(save, tmp_path):
    for iteration in range(1, 5):
        save(tmp_path, iteration, 1.0)
    assert iterations(tmp_path) == [4, 3, 2, 1]
    save(tmp_path, 5, 1.0, keep_last=2)
    assert iterations(tmp_path) == [5, 4]
    for iteration in range(6, 12):
        save(tmp_path, iteration, 1.0, keep_last=2, keep_every=4)
    assert iterations(tmp_path) == [11, 10, 8, 4]
    save(tmp_path, 12, 1.0, keep_last=1, finite=False)
    assert iterations(tmp_path) == [12, 11, 10, 8, 4], "nothing goes for one that cannot be continued"
    save(tmp_path, 13, 1.0, keep_last=2)
    assert iterations(tmp_path) == [13, 11], "nor does that one count"
    save(tmp_path, 14, 1.0, keep_last=1, run_id=ANOTHER)
    assert iterations(tmp_path) == [14, 13, 11], "others' checkpoints stay"


def test_what_could_not_be_read_again_is_not_saved(saver, tmp_path, monkeypatch):
    monkeypatch.setattr(saver_module, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="bytes, but at most 100 can be read.*, and it was the run's last"):
        saver(tmp_path).save(1, tensors(1.0), state_of(1, 1.0) | {"more": "." * 100}, finite=True, last=True)
    assert iterations(tmp_path) == []


def test_going_back_puts_later_ones_aside(saver, save, tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration, 1.0)
    (tmp_path / f"iter_0000006.writing-{RUN}").mkdir()
    saver(tmp_path, start=2)
    left = names(tmp_path)
    assert left[:1] == ["iter_0000002"] and left[-2:] == [TRACKER, LOCK]
    assert [name[:20] for name in left[1:3]] == ["iter_0000004.before-", "iter_0000006.before-"] and len(left) == 5
    assert loaded(tmp_path) == (2, 1.0, 1.0)


def failing(monkeypatch, times: int) -> list[int]:
    """A disk that is full for a number of saves."""
    real, calls = saver_module.write_atomic, []

    def write(path, text):
        if Path(path).name == "manifest.json":
            calls.append(1)
            if len(calls) <= times:
                raise OSError(28, "No space left on device", str(path))
        real(path, text)

    monkeypatch.setattr(saver_module, "write_atomic", write)
    return calls


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_is_tried_again(async_save, saver, tmp_path, monkeypatch, caplog):
    failing(monkeypatch, MOST_FAILED - 1)
    one = saver(tmp_path, async_save=async_save)
    for iteration in range(1, 4):
        one.save(iteration, tensors(1.0), state_of(iteration, 1.0), finite=True, last=iteration == 3)
    told = [record.getMessage() for record in caplog.records if "failed on rank 0" in record.getMessage()]
    assert len(told) == 2 and "No space left on device" in told[0] and "the next save tries again" in told[0]
    assert loaded(tmp_path) == (3, 1.0, 1.0) and iterations(tmp_path) == [3]


@pytest.mark.parametrize("async_save", [False, True])
def test_why_tensors_could_not_be_written_is_told(async_save, saver, tmp_path):
    """By the system: torch alone would say that a position in its archive was unexpected."""
    one, (soft, hard) = saver(tmp_path, async_save=async_save), resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"model.a": torch.zeros(1 << 20)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ValueError, match=r"failed on rank 0 \(\[Errno 27\] File too large\), and it was"):
            one.save(1, big, state_of(1, 1.0), finite=True, last=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("async_save", [False, True])
def test_too_many_failed_saves_end_the_run(async_save, saver, tmp_path, monkeypatch):
    failing(monkeypatch, 100)
    one, way_out = saver(tmp_path, async_save=async_save), "free space or give another --save, and "
    with pytest.raises(ValueError, match=f"No space left on device.*, 3 in a row; {way_out}start again"):
        for iteration in range(1, 5):
            one.save(iteration, tensors(1.0), state_of(iteration, 1.0), finite=True, last=False)
    assert names(tmp_path) == [LOCK], "what was written of them would keep the disk full"
    (tmp_path / "iter_0000004").mkdir()
    with pytest.raises(ValueError, match=f"and it was the run's last; {way_out}continue with --load {tmp_path}"):
        one.save(9, tensors(1.0), state_of(9, 1.0), finite=True, last=True)
    assert names(tmp_path) == ["iter_0000004", LOCK]


def disk(monkeypatch, folder: Path, room: int, *, tells: bool = True) -> None:
    """A disk with room for a number of checkpoints like those in the folder; it `tells` what is free, or only fails."""
    size = read_manifest(folder / "iter_0000001").size

    def free() -> int:
        return (room - len(iterations(folder))) * size + 100

    def full(self, *args):
        if free() < size:
            raise OSError(28, "No space left on device", str(self.path))
        return write(self, *args)

    write = saver_module.CheckedWriter.write_data
    monkeypatch.setattr(saver_module.CheckedWriter, "write_data", full)
    usage = SimpleNamespace(free=free() if tells else 1 << 60)
    kept = {key: getattr(saver_module.shutil, key) for key in ("rmtree",)}

    def disk_usage(path):
        usage.free = free() if tells else 1 << 60
        return usage

    monkeypatch.setattr(saver_module, "shutil", SimpleNamespace(**kept, disk_usage=disk_usage))


@pytest.mark.parametrize("tells", [True, False], ids=["free space is told", "a quota is not told"])
@pytest.mark.parametrize("async_save", [False, True])
def test_room_is_made_for_a_save_that_does_not_fit(async_save, tells, saver, tmp_path, monkeypatch, caplog):
    """With --keep-last, by deleting what it would delete after the save, and no more than one whole one is kept."""
    one = saver(tmp_path, async_save=async_save, keep_last=2)

    def save(iteration: int, *, last: bool = False) -> None:
        one.save(iteration, tensors(1.0), state_of(iteration, 1.0), finite=True, last=last)
        one.wait_copied()

    for iteration in (1, 2):
        save(iteration)
    one.wait()
    disk(monkeypatch, tmp_path, 2, tells=tells)
    save(3)
    if async_save and not tells:  # it is found in the background, and the next save has room
        save(4)
    one.wait()
    newest_one = iterations(tmp_path)[0]
    assert iterations(tmp_path) in ([3, 2], [4, 2]) and loaded(tmp_path)[0] == newest_one
    save(5, last=True)
    assert iterations(tmp_path) == [5, newest_one], "the last one of a run is tried again at once"
    assert "deleted iteration 1 " in caplog.text and "to make room" in caplog.text


@pytest.mark.parametrize("tells", [True, False])
def test_no_room_is_made_of_the_last_whole_one(tells, saver, save, tmp_path, monkeypatch, caplog):
    """Nor of other runs', of those that --keep-every keeps, or without --keep-last.  A damaged one stays, uncounted."""
    save(tmp_path, 1, 1.0, run_id=ANOTHER)
    for iteration in (2, 3, 4, 5):
        save(tmp_path, iteration, float(iteration))
    save(tmp_path, 6, 6.0, run_id=ANOTHER)  # is no reason to let go of ours
    (tmp_path / "iter_0000005/__0_0.distcp").write_bytes(b"")
    with monkeypatch.context() as patch:
        disk(patch, tmp_path, 1, tells=tells)
        for options in ({}, {"keep_last": 2, "keep_every": 2}, {"keep_last": 1}):
            one = saver(tmp_path, **options)
            with pytest.raises(ValueError, match="No space left on device.*, and it was the run's last"):
                one.save(7, tensors(7.0), state_of(7, 7.0), finite=True, last=True)
            one.close()
            left = {(): [6, 5, 4, 3, 2, 1], (2,): [6, 5, 4, 2, 1], (1,): [6, 5, 4, 1]}[tuple(options.values())[:1]]
            assert iterations(tmp_path) == left, options
    save(tmp_path, 7, 7.0, keep_last=1)
    assert loaded(tmp_path) == (7, 7.0, 7.0) and iterations(tmp_path) == [7, 6, 5, 1]


@pytest.mark.parametrize("tells", [True, False])
def test_room_is_made_of_what_a_rewind_has_left_behind_too(tells, saver, tmp_path, monkeypatch):
    """A checkpoint that is later than the run's last one counts as none: nothing continues from it."""
    one = saver(tmp_path, keep_last=3)
    for iteration in (1, 5, 2, 3):  # back to 1 after 5
        one.save(iteration, tensors(1.0), state_of(iteration, 1.0), finite=True, last=False)
    assert iterations(tmp_path) == [5, 3, 2, 1]
    disk(monkeypatch, tmp_path, 1, tells=tells)
    with pytest.raises(ValueError, match="No space left on device"):
        one.save(4, tensors(1.0), state_of(4, 1.0), finite=True, last=True)
    assert iterations(tmp_path) == [3] and newest(tmp_path) == (3, [])


@pytest.mark.parametrize("async_save", [False, True])
def test_a_bug_of_ours_is_no_failed_write(async_save, saver, tmp_path, monkeypatch):
    monkeypatch.setattr(saver_module, "write_atomic", lambda path, text: [].no_such_name)
    with pytest.raises(BaseException, match="no_such_name"):
        saver(tmp_path, async_save=async_save).save(1, tensors(1.0), state_of(1, 1.0), finite=True, last=True)


def test_a_save_in_the_background_has_a_copy(saver, tmp_path, monkeypatch):
    """The tensors and the state of the call, whatever becomes of them while it is written."""
    going, write = threading.Event(), saver_module.CheckedWriter.write_data
    monkeypatch.setattr(saver_module.CheckedWriter, "write_data", lambda *args: (going.wait(30), write(*args))[1])
    one, values, state = saver(tmp_path, async_save=True), tensors(1.0), state_of(1, 1.0)
    one.save(1, values, state, finite=True, last=False)
    one.wait_copied()
    for tensor in values.values():
        tensor.fill_(7.0)
    state["value"] = 7.0
    assert iterations(tmp_path) == []
    going.set()
    one.wait()
    assert loaded(tmp_path) == (1, 1.0, 1.0)


def test_a_manifest_tells_what_is_there(save, tmp_path):
    save(tmp_path, 5, 1.0)
    folder = tmp_path / "iter_0000005"
    found = read_manifest(folder)
    assert found.run_id == RUN and found.layout == {"tp": 1, "pp": 1, "dp": 1}
    assert names(folder) == sorted(["manifest.json", *found.small, *found.sizes()])
    assert found.size == sum((folder / name).stat().st_size for name in names(folder) if name != "manifest.json")
    assert json.loads((folder / "manifest.json").read_text())["version"] == VERSION
    assert torch.equal(tensors(1.0)["model.a"], torch.ones(30, 4))


def test_closing_does_not_hide_why_the_run_ends(saver, tmp_path, monkeypatch, caplog):
    """A bug in a save in the background is told of, and what ends the run goes on."""
    monkeypatch.setattr(saver_module, "write_atomic", lambda path, text: [].no_such_name)
    one = saver(tmp_path, async_save=True)
    with pytest.raises(KeyError, match="the reason"):
        try:
            one.save(1, tensors(1.0), state_of(1, 1.0), finite=True, last=False)
            raise KeyError("the reason")
        finally:
            one.close()
    assert "the last background save failed" in caplog.text
