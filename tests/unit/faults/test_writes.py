"""The policy for writes that fail: warn, count, go on, try again, and end at last."""

from __future__ import annotations

import logging

from megatron_snip.faults.writes import FailedWrites


def full():
    raise OSError(28, "No space left on device")


def test_failures_are_counted_and_warned_of_ever_more_rarely(caplog):
    caplog.set_level(logging.WARNING, "megatron_snip")
    failed = FailedWrites("metrics.jsonl", limit=9)
    for i in range(1, 9):
        assert failed.attempt(full) is False
        assert failed.in_a_row == i and failed.reason is None
    assert len(caplog.messages) == 4, "the 1st, 2nd, 4th and 8th"
    assert caplog.messages[0] == (
        "metrics.jsonl cannot be written ([Errno 28] No space left on device); the run continues and will retry"
    )
    assert "8 times in a row" in caplog.messages[-1]


def test_a_success_is_told_and_counts_anew(caplog):
    caplog.set_level(logging.WARNING, "megatron_snip")
    failed, done = FailedWrites("metrics.jsonl", limit=2), []
    assert failed.attempt(lambda: done.append(1)) and caplog.messages == []
    failed.attempt(full)
    assert failed.attempt(lambda: done.append(2)) and done == [1, 2]
    assert caplog.messages[-1] == "metrics.jsonl is written again, after 1 failures"
    failed.attempt(full)
    assert failed.reason is None


def test_too_many_in_a_row_are_the_end():
    failed = FailedWrites("metrics.jsonl", limit=2)
    failed.attempt(full)
    failed.attempt(full)
    assert failed.reason == (
        "metrics.jsonl could not be written 2 times in a row ([Errno 28] No space left on device); "
        "make room or mend the folder, and continue from the last checkpoint"
    )


def test_any_exception_is_a_failure():
    """A logging service raises what it likes."""
    assert FailedWrites("wandb", limit=1).attempt(lambda: {}["key"]) is False
