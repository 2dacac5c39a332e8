"""The process: seeds, logging, the stop signal and how an error leaves."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch

from megatron_snip import runtime


def test_ranks_come_from_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (runtime.environment_rank(), runtime.environment_world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (runtime.environment_rank(), runtime.environment_world_size()) == (3, 8)


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU and none is here; use gloo"):
        runtime.start("nccl", 1.0)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no GPU: 2 are here; start one process a GPU"):
        runtime.start("auto", 1.0)


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert runtime.seed_of(1234, "layers.0.mlp.up_proj") == 6050616723310766188, "weights of old runs hang on it"
    seeds = {runtime.seed_of(*parts) for parts in [(1,), (2,), (1, "a"), (1, "b"), ("1a",), (1, "a", 0)]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)


def test_an_iteration_reseeds_torch():
    def draw(seed: int, iteration: int) -> float:
        torch.rand(3)
        runtime.seed_iteration(seed, iteration)
        return torch.rand(()).item()

    assert draw(1, 5) == draw(1, 5)
    assert len({draw(1, 5), draw(1, 6), draw(2, 5)}) == 3


def test_sigterm_is_remembered_if_it_is_listened_to():
    before = signal.getsignal(signal.SIGTERM)
    try:
        deaf = runtime.StopSignal(listen=False)
        assert signal.getsignal(signal.SIGTERM) is before
        heard = runtime.StopSignal(listen=True)
        assert not heard.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.received and not deaf.received
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def logger():
    before = (runtime.LOGGER.handlers[:], runtime.LOGGER.level, runtime.LOGGER.propagate)
    yield runtime.LOGGER
    runtime.LOGGER.handlers[:], runtime.LOGGER.level, runtime.LOGGER.propagate = before


def test_rank_0_tells_everything_and_others_errors(logger, capsys):
    for rank in (0, 1):
        runtime.set_up_logging(rank)
        logging.getLogger("megatron_snip").info("news")
        logging.getLogger("megatron_snip").warning("careful")
        logging.getLogger("megatron_snip").error("wrong")
    lines = [line.split("[", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["rank 0] news", "rank 0] careful", "rank 0] wrong", "rank 1] wrong"]


def leave_with(monkeypatch, error: Exception) -> tuple[list[int], list[float]]:
    """What report_errors does about an error: exit codes and how long it waits before it tells."""
    left: list[int] = []
    waited: list[float] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(runtime.time, "sleep", waited.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with runtime.report_errors():
            raise error
    finally:
        signal.signal(signal.SIGTERM, before)
    return left, waited


def test_a_users_error_is_one_line_and_status_2(logger, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert leave_with(monkeypatch, ValueError("--lr is odd; even it")) == ([2], [])
    assert capsys.readouterr().err == "error: --lr is odd; even it\n"


def test_other_ranks_wait_before_they_tell(logger, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "2")
    left, waited = leave_with(monkeypatch, ValueError("odd"))
    assert left == [2] and sum(waited) >= 2.0
    assert capsys.readouterr().err == "error [rank 2]: odd\n"


def test_a_path_that_cannot_be_used_is_one_line_too(logger, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as info:
        (tmp_path / "file/folder").mkdir()
    assert leave_with(monkeypatch, info.value) == ([2], [])
    line = f"{tmp_path}/file/folder: Not a directory; one of the folders in it is a file; give another path"
    assert capsys.readouterr().err == f"error: {line}\n"


def test_an_os_error_without_a_path_keeps_its_traceback(logger, monkeypatch):
    with pytest.raises(BrokenPipeError):
        leave_with(monkeypatch, BrokenPipeError(32, "Broken pipe"))


def test_our_own_errors_keep_their_traceback(logger, monkeypatch):
    with pytest.raises(AssertionError, match="mine"):
        leave_with(monkeypatch, AssertionError("mine"))
