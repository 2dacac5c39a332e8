"""What is told of an error, and what is written of it."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch.distributed as dist

from megatron_snip.faults.ending import Ending, lost_connection, one_line

CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:27149"
TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 24000ms for send operation to complete"


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (RuntimeError(CLOSED), "lost"),
        (RuntimeError(TIMED_OUT), "timed out"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "lost"),
        (dist.DistStoreError("wait timeout after 60000ms, keys: /a"), "timed out"),
        (RuntimeError("shapes differ"), None),
        (OSError(32, "Broken pipe"), None),
        (ValueError(CLOSED), None),
    ],
)
def test_a_lost_connection_is_told_from_other_errors(error, how):
    assert lost_connection(error) == how


def test_the_cause_of_an_error_counts():
    try:
        try:
            raise RuntimeError(CLOSED)
        except RuntimeError as error:
            raise KeyError("stage 1") from error
    except KeyError as error:
        assert lost_connection(error) == "lost"


def test_an_error_is_one_line():
    assert one_line(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert one_line(MemoryError()) == "MemoryError"


@pytest.fixture
def ending(tmp_path, monkeypatch):
    made = Ending(1, str(tmp_path / "error.json"))
    made.folder, made.advice = tmp_path / "run/stacks", lambda: "start it again"
    left: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    return made


def test_an_error_of_ours_is_a_line_and_its_traceback_a_file(ending, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        ending.after(RuntimeError("shapes differ"))
    assert left.value.code == 1
    line = "RuntimeError: shapes differ; start it again"
    assert capsys.readouterr().err == f"error [rank 1]: {line}\n"
    assert "RuntimeError: shapes differ" in (tmp_path / "run/stacks/rank_0001.txt").read_text()
    about = json.loads((tmp_path / "error.json").read_text())["message"]
    assert about["message"] == line and int(about["extraInfo"]["timestamp"]) > 0, "what torchrun's summary shows"


def test_an_interruption_has_its_status(ending, capsys):
    with pytest.raises(SystemExit) as left:
        ending.after(KeyboardInterrupt())
    assert left.value.code == 130 and capsys.readouterr().err == "error [rank 1]: interrupted; start it again\n"


def test_a_traceback_without_a_disk_goes_to_stderr(ending, tmp_path, capsys):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(SystemExit):
        ending.after(RuntimeError("shapes differ"))
    err = capsys.readouterr().err
    assert err.startswith("RuntimeError: shapes differ\n") and "error [rank 1]: RuntimeError: shapes differ" in err


def test_a_run_that_went_well_leaves_no_stacks(ending, tmp_path):
    ending.open()
    assert (tmp_path / "run/stacks/rank_0001.txt").is_file()
    ending.close()
    assert not (tmp_path / "run/stacks").exists()


def test_a_store_that_does_not_answer_is_asked_once(ending, capsys, monkeypatch):
    """Where the cable was cut every question takes its whole time, here a tenth of it: one, and the line is told."""
    ask = Ending._ask
    monkeypatch.setattr(Ending, "_ask", lambda self, what, seconds: ask(self, what, seconds / 10))
    asked: list[str] = []

    class Away:
        def __getattr__(self, name):
            return lambda *words: asked.append(name) or threading.Event().wait(60)

    ending.watch = Away()
    with pytest.raises(SystemExit):
        ending.after(RuntimeError(TIMED_OUT))
    assert asked == ["take_the_word"]
    assert "rank 1 waited too long for another rank: the run's store does not answer" in capsys.readouterr().err
