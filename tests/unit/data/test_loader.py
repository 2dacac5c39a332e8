"""The loader: which rank gets which sample, the cursor, and reading ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from megatron_snip.data.loader import Loader
from megatron_snip.data.sampling import MockDataset


class Numbered:
    """Sample i is i, i + 1, ... ; it notes which thread reads what and fails where it is told to."""

    def __init__(self, size=1000, seq_length=4, fails_at=None):
        self.size, self.seq_length, self.fails_at = size, seq_length, fails_at
        self.read: list[tuple[int, str]] = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append((index, threading.current_thread().name))
        if index == self.fails_at:
            raise OSError(f"disk error at {index}")
        return np.arange(index, index + self.seq_length + 1, dtype=np.int64)


def make(dataset, rank=0, ranks=1, batch=12, micro=2, **options):
    return Loader(dataset, global_batch_size=batch, micro_batch_size=micro, dp_rank=rank, dp_size=ranks, **options)


def test_shapes_and_labels():
    batch = make(Numbered(), batch=6).batch(12)
    assert batch.tokens.shape == batch.labels.shape == (3, 2, 4) and batch.sample_index.shape == (3, 2)
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.sample_index)} == {torch.int64}
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.sample_index.tolist() == [[12, 13], [14, 15], [16, 17]]
    assert torch.equal(batch.tokens, batch.sample_index[..., None] + torch.arange(4))
    assert torch.equal(batch.labels, batch.tokens + 1)


def test_dealing_is_megatrons():
    """Microbatches in turn, and within each the ranks in turn, as MegatronPretrainingSampler deals them."""
    for ranks, micro, batch in [(1, 3, 12), (2, 3, 12), (3, 2, 12), (4, 1, 16)]:
        indices = [make(Numbered(), r, ranks, batch, micro).batch(batch).sample_index for r in range(ranks)]
        dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
        pending: list[int] = []
        for sample in range(batch, 2 * batch):
            pending.append(sample)
            if len(pending) == micro * ranks:
                for rank in range(ranks):
                    dealt[rank].append(pending[rank * micro : (rank + 1) * micro])
                pending = []
        assert [i.tolist() for i in indices] == dealt


def test_resume_is_exact_and_does_not_depend_on_the_ranks():
    dataset = MockDataset(100, 8, 0)
    running = make(dataset)
    seen = [running.batch(consumed) for consumed in range(0, 60, 12)]
    fresh = make(dataset).batch(48)
    assert torch.equal(fresh.tokens, seen[4].tokens) and torch.equal(fresh.sample_index, seen[4].sample_index)
    one = {int(i): t for i, t in zip(fresh.sample_index.flatten(), fresh.tokens.flatten(0, 1))}
    for rank in range(3):
        part = make(dataset, rank, 3).batch(48)
        for index, tokens in zip(part.sample_index.flatten(), part.tokens.flatten(0, 1)):
            assert torch.equal(one.pop(int(index)), tokens)
    assert not one


def test_reading_ahead_changes_nothing():
    dataset = MockDataset(100, 8, 0)
    ahead, plain = make(dataset), make(dataset, prefetch=False)
    for consumed in (0, 12, 24, 240, 12, 12, 24, 0):  # jumps back and forth too
        a, b = ahead.batch(consumed), plain.batch(consumed)
        assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("tokens", "labels", "sample_index"))


def test_the_next_two_batches_are_read_once_and_in_the_background():
    dataset = Numbered()
    loader = make(dataset)
    loader.batch(0)
    loader.batch(12)
    loader.close()
    assert sorted(index for index, _ in dataset.read) == list(range(48))
    here = threading.current_thread().name
    assert [index for index, name in dataset.read if name == here] == list(range(12))


def test_an_error_in_the_background_reaches_the_caller():
    loader = make(Numbered(fails_at=15))
    loader.batch(0)
    with pytest.raises(OSError, match="disk error at 15"):
        loader.batch(12)
    assert loader.batch(24).sample_index[0, 0] == 24


def test_an_error_in_a_batch_nobody_asks_for_is_not_raised():
    loader = make(Numbered(fails_at=15))
    loader.batch(0)
    loader.close()
    loader.batch(24)


def test_a_problem_is_told_before_the_batch_is_asked_for():
    dataset = Numbered(fails_at=15)
    loader = make(dataset)
    assert loader.problem(0) == "" and loader.problem(12) == "disk error at 15"
    assert loader.batch(0).sample_index[0, 0] == 0 and loader.problem(12) == "disk error at 15"
    with pytest.raises(OSError, match="disk error at 15"):
        loader.batch(12)
    assert [index for index, _ in dataset.read].count(0) == 1, "what was read for the question is used"


def test_our_own_errors_are_no_problem_of_the_files():
    class Broken(Numbered):
        def __getitem__(self, index):
            raise KeyError(index)

    loader = make(Broken())
    assert loader.problem(0) == ""
    with pytest.raises(KeyError):
        loader.batch(0)


def test_threads_end(monkeypatch):
    before, made, start = threading.active_count(), [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (made.append(thread), start(thread)))
    loader = make(Numbered())
    loader.batch(0)
    assert len(made) == 2 and all(thread.daemon for thread in made), "a read that hangs keeps no process alive"
    loader.close()
    loader.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_batches_that_grow_follow_each_other():
    """Each sample once and in order, whatever the batches, read ahead or not, and from any of them on."""

    def size(consumed):
        return 4 if consumed < 8 else 8 if consumed < 24 else 12

    starts = [0, 4, 8, 16, 24, 36]
    for options in ({}, {"prefetch": False}):
        loader, seen = make(Numbered(), batch=size, **options), []
        for consumed in starts:
            seen += loader.batch(consumed).sample_index.flatten().tolist()
        assert seen == list(range(48)) and loader.cursor(4, 3) == 24 and loader.cursor(24, 0) == 24
        assert len(loader.batch(16).tokens) == 4 and len(loader.make(16, 2).tokens) == 1
        loader.close()
    dataset = Numbered()
    loader = make(dataset, batch=size)
    loader.batch(4)
    loader.close()
    assert sorted(index for index, _ in dataset.read) == list(range(4, 24)), "the next two, at their own sizes"
