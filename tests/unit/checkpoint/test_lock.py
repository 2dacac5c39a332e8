"""A folder of checkpoints belongs to one run, and no dead run keeps it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_snip.checkpoint import lock as lock_module
from megatron_snip.checkpoint.lock import LOCK, FolderLock, LockLost
from tests.unit.checkpoint.conftest import tensors

HOLD = """
import sys, time
from pathlib import Path
from megatron_snip.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "theirs")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hasty(monkeypatch):
    """A lock is stale after a tenth of a second, and is looked at twice in it."""
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.1)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_until_the_first_is_gone(holder, tmp_path):
    with pytest.raises(ValueError) as info:
        FolderLock(tmp_path, "mine")
    assert str(info.value).startswith(f"{tmp_path} belongs to run theirs, process {holder.pid} on ")
    assert str(info.value).endswith("which is still running; wait until it ends, or give another --save")
    os.kill(holder.pid, signal.SIGKILL)  # and not reaped: a zombie holds nothing
    while lock_module._born(holder.pid):
        time.sleep(0.01)
    mine = FolderLock(tmp_path, "mine")
    assert mine.held()
    mine.release()
    assert not (tmp_path / LOCK).exists()


def test_a_copy_of_the_folder_of_a_live_run_is_nobodys(holder, hasty, tmp_path):
    """`cp -r` takes the lock along; its holder lives and touches the original alone."""
    shutil.copytree(tmp_path, tmp_path / "copy")
    mine = FolderLock(tmp_path / "copy", "mine")
    assert mine.held()
    mine.release()
    with pytest.raises(ValueError, match="belongs to run theirs"):
        FolderLock(tmp_path, "mine")


def elsewhere(folder, **changes):
    """A lock of another host."""
    text = {"token": "t", "run_id": "theirs", "host": "node7", "pid": 1, "place": "another", "born": "1"}
    text |= {"folder": folder.stat().st_ino, **changes}
    (folder / LOCK).write_text(json.dumps(text))


def test_a_lock_of_another_host_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 1.0)
    elsewhere(tmp_path)
    stop = threading.Event()
    beat = threading.Thread(target=lambda: [os.utime(tmp_path / LOCK) for _ in iter(lambda: stop.wait(0.1), True)])
    beat.start()
    with pytest.raises(ValueError, match=r"belongs to run theirs, process 1 on node7, which is still running"):
        FolderLock(tmp_path, "mine")
    stop.set()
    beat.join()
    begin = time.monotonic()
    mine = FolderLock(tmp_path, "mine")
    assert mine.held() and 1.0 <= time.monotonic() - begin < 10.0
    mine.release()


def test_an_id_that_another_process_has_now(tmp_path):
    elsewhere(tmp_path, place=lock_module._place(), pid=os.getppid(), born="1")
    mine = FolderLock(tmp_path, "mine")
    assert mine.held()
    mine.release()


NO_LOCKS = {
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("3"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "large": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40),
    "other fields": lambda path: path.write_text('{"token": 1}'),
    "escapes": lambda path: elsewhere(path.parent, host="\x1b[2J"),
    "a huge process id": lambda path: elsewhere(path.parent, pid=1 << 80, place=lock_module._place()),
    "no process id": lambda path: elsewhere(path.parent, pid="1", place=lock_module._place()),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_LOCKS)
def test_a_lock_that_cannot_be_read_is_stale(what, hasty, tmp_path):
    NO_LOCKS[what](tmp_path / LOCK)
    assert lock_module.living_holder(tmp_path) == ""
    mine = FolderLock(tmp_path, "mine")
    assert mine.held()
    mine.release()


def test_whoever_lost_the_lock_writes_no_checkpoint(saver, tmp_path):
    one = saver(tmp_path)
    elsewhere(tmp_path)
    with pytest.raises(LockLost):
        one._lock.check()
    with pytest.raises(ValueError, match=r"run theirs on node7 \(process 1\) took over this folder"):
        one.save(1, tensors(1.0), {"iteration": 1}, finite=True, last=False)
    assert not (tmp_path / "iter_0000001").exists()
    one.close()
    assert json.loads((tmp_path / LOCK).read_text())["run_id"] == "theirs", "another's lock stays"


def test_a_lock_that_was_removed_names_no_other_run(tmp_path):
    one = FolderLock(tmp_path, "mine")
    (tmp_path / LOCK).unlink()
    with pytest.raises(LockLost, match=f"^{tmp_path}/{LOCK} is gone or unreadable: it was removed"):
        one.check()
    one.release()


def test_a_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.05)
    mine = FolderLock(tmp_path, "mine")
    first = (tmp_path / LOCK).stat().st_mtime_ns
    end = time.monotonic() + 10
    while (tmp_path / LOCK).stat().st_mtime_ns == first:
        assert time.monotonic() < end
        time.sleep(0.02)
    mine.release()
