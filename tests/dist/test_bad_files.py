"""Files that go bad while several processes use them: all end alike, after a save."""

from __future__ import annotations

import os

import numpy as np
import pytest

from megatron_snip.checkpoint.manifest import newest
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron_snip.data.sampling import GPTDataset
from tests.dist.helpers.faults import SMALL, run_on_files
from tests.dist.helpers.harness import run_ranks

def newest_iteration(saves):
    return newest(saves)[0]


SEQUENCES, ITERATIONS, BATCH = 60, 12, 2


def write(prefix, *, bad=None):
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document in range(SEQUENCES):
            tokens = (np.arange(100) + document) % 500
            builder.add_document(tokens if document != bad else tokens + 9999)
    return str(prefix)


def read_by_rank_1_alone(prefix):
    """(sequence, iteration): the first to read the sequence is rank 1 of two, in an iteration after the third."""
    samples = GPTDataset(IndexedDataset(prefix), (0, SEQUENCES), ITERATIONS * BATCH, SMALL["seq_length"], 1234)
    reads: dict[int, list[int]] = {}
    for number in range(ITERATIONS * BATCH):
        slot = int(samples.shuffle_index[number])
        first, last = (int(samples.sample_index[slot + i][0]) for i in (0, 1))
        for position in range(first, last + 1):
            reads.setdefault(int(samples.document_index[position]), []).append(number)
    return next(
        (sequence, numbers[0] // BATCH + 1)
        for sequence, numbers in reads.items()
        if numbers[0] % 2 == 1 and numbers[0] // BATCH > 3 and numbers[0] - 1 not in numbers
    )


def options(prefix, tmp_path, **more):
    files = {"train_data_path": (prefix,), "run_dir": str(tmp_path / "run")}
    return {**files, "global_batch_size": BATCH, "train_iters": ITERATIONS, **more}


def test_an_id_that_one_rank_reads_ends_all_after_a_save(tmp_path):
    prefix = write(tmp_path / "text")
    sequence, iteration = read_by_rank_1_alone(prefix)
    write(prefix, bad=sequence)
    os.unlink(f"{prefix}.ids.json")
    first, second = run_ranks(run_on_files, 2, options(prefix, tmp_path))
    assert first == second
    assert first.startswith(f"sequence {sequence} of dataset {prefix} holds token id 10")
    assert first.endswith(f"(iteration {iteration - 1} is saved)")
    assert newest_iteration(tmp_path / "run/checkpoints") == iteration - 1
    first, second = run_ranks(run_on_files, 2, options(prefix, tmp_path, load=str(tmp_path / "run/checkpoints")))
    assert first == second and "holds token id 10" in first and "saved" not in first, "found before the first batch"


@pytest.mark.parametrize(
    "layout", [{"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "num_workers": 1}]
)
def test_a_file_cut_while_it_is_used_ends_all_after_a_save(layout, tmp_path):
    prefix = write(tmp_path / "text")
    first, second = run_ranks(run_on_files, 2, options(prefix, tmp_path, **layout), (prefix + ".bin", 4))
    assert first == second and first.startswith(f"{prefix}.bin has 100 bytes, but had 24000 when it was opened")
    saved = newest_iteration(tmp_path / "run/checkpoints")
    assert saved is not None and 3 <= saved <= 6 and first.endswith(f"(iteration {saved} is saved)")


def test_changed_data_is_refused_on_all_though_one_reads_it(tmp_path):
    prefix = write(tmp_path / "text")
    assert run_ranks(run_on_files, 2, options(prefix, tmp_path, exit_interval=2)) == ["", ""]
    write(prefix, bad=5)
    more = options(prefix, tmp_path, load=str(tmp_path / "run/checkpoints"))
    first, second = run_ranks(run_on_files, 2, more)
    assert first == second and "holds token id 10" in first, "the record tells it first"
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.add_document(np.arange(6000) % 500)
    first, second = run_ranks(run_on_files, 2, more)
    assert first == second and first.startswith(f"dataset {prefix} has changed: the lengths of its sequences, the cont")
    assert run_ranks(run_on_files, 2, {**more, "accept_changed_data": True}) == ["", ""]
