"""Fingerprints: what changes them and what does not; the record of token ids; files cut while they are in use."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise

import numpy as np
import pytest

from megatron_snip.data import identity
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder, IndexedDatasetError
from megatron_snip.data.sampling import GPTDataset

DOCUMENTS = [[*range(30)], [], [*range(40, 60)], [7] * 50]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return IndexedDataset(prefix)


def differing(one, other):
    return [key for key in one.fingerprint if one.fingerprint[key] != other.fingerprint[key]]


def test_the_same_data_elsewhere_has_the_same_fingerprint(tmp_path):
    first = write(tmp_path / "a")
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}")
    assert differing(first, IndexedDataset(tmp_path / "b")) == []
    json.dumps(first.fingerprint)  # a checkpoint keeps it


@pytest.mark.parametrize(
    ("documents", "differs"),
    [
        ([[*range(30)], [], [*range(40, 60)], [7] * 49 + [8]], ["content"]),
        ([[*range(30)], [], [*range(40, 60)], [7] * 51], ["lengths", "size", "content"]),
        ([[*range(30)], [], [*range(40, 60), 7], [7] * 49], ["lengths"]),
        ([[*range(30)], [*range(40, 60)], [], [7] * 50], ["lengths"]),  # the documents are cut elsewhere
        ([*DOCUMENTS, [1]], ["lengths", "size", "content"]),
    ],
)
def test_other_data_has_another(tmp_path, documents, differs):
    assert differing(write(tmp_path / "a"), write(tmp_path / "b", documents)) == differs


def test_of_a_large_file_samples_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "BLOCK_BYTES", 64)
    whole = np.arange(20_000, dtype=np.uint16)
    first = write(tmp_path / "a", [whole])
    ranges = identity._samples(40_000)
    assert ranges[0] == (0, 64) and ranges[-1] == (39_936, 40_000) and len(ranges) == identity.BLOCKS
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "none overlap"
    changed = whole.copy()
    changed[::64] += 1  # one token in two blocks: some sample sees one
    assert differing(first, write(tmp_path / "b", [changed])) == ["content"]
    read: list[int] = []
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, start: read.append(size) or plain(fd, size, start))
    assert write(tmp_path / "c", [whole]).fingerprint == first.fingerprint
    assert sum(read) == 2 * 64 * identity.BLOCKS, "once for the record"


def test_the_record_refuses_a_small_vocabulary_and_is_only_for_its_pair(tmp_path, caplog):
    dataset = write(tmp_path / "a")
    dataset.check_recorded_ids(60)
    with pytest.raises(IndexedDatasetError, match=r"a holds token id 59, outside the vocabulary of 59; give .*--vocab"):
        dataset.check_recorded_ids(59)
    write(tmp_path / "b", [[100]])
    shutil.copy(tmp_path / "b.ids.json", tmp_path / "a.ids.json")
    with caplog.at_level("WARNING", logger="megatron_snip"):
        dataset.check_recorded_ids(59)
    assert "a.ids.json is ignored" in caplog.text and "it belongs to another dataset" in caplog.text
    (tmp_path / "a.ids.json").unlink()
    dataset.check_recorded_ids(1)


@pytest.mark.parametrize("text", ["{", "[]", '{"least_id": 0}', "\0", '{"size": 1, "size": 1}', "[" * 10**5])
def test_a_damaged_record_is_left_alone(tmp_path, text, caplog):
    dataset = write(tmp_path / "a")
    (tmp_path / "a.ids.json").write_text(text)
    with caplog.at_level("WARNING", logger="megatron_snip"):
        dataset.check_recorded_ids(1)
    assert "a.ids.json is ignored" in caplog.text


def test_negative_ids_are_recorded(tmp_path):
    with pytest.raises(IndexedDatasetError, match="holds token id -3,"):
        write(tmp_path / "a", [[5, -3]], np.int32).check_recorded_ids(100)


def test_an_id_without_a_record_is_named_with_its_sequence(tmp_path):
    indexed = write(tmp_path / "a")
    (tmp_path / "a.ids.json").unlink()
    samples = GPTDataset(indexed, (0, 3), 1, 99, 0, vocab_size=59)
    with pytest.raises(IndexedDatasetError, match=r"sequence 1 of dataset .*a holds token id 59, outside .* of 59; "):
        samples[0]


@pytest.mark.parametrize(("suffix", "size"), [(".bin", 150), (".bin", 0), (".idx", 50)])
def test_a_file_cut_while_in_use_is_an_error_and_no_signal(tmp_path, suffix, size):
    documents = [np.arange(3000, dtype=np.uint16) for _ in range(40)]
    indexed = write(tmp_path / "a", documents)
    samples = GPTDataset(indexed, (0, 40), 10, 512, 0)
    assert len(samples[3]) == 513
    os.truncate(tmp_path / f"a{suffix}", size)
    with pytest.raises(IndexedDatasetError, match=rf"a\{suffix} has {size} bytes, but had \d+ when it was opened; put"):
        samples[3]


def test_a_cut_between_look_and_read_gives_no_zeros(tmp_path, monkeypatch):
    indexed = write(tmp_path / "a")
    monkeypatch.setattr(indexed, "check_sizes", lambda: None)
    os.truncate(tmp_path / "a.bin", 120)
    with pytest.raises(IndexedDatasetError, match=r"a.bin ends at byte 120; check its disk"):
        indexed.get(2)


def test_a_file_that_grows_or_is_replaced_is_read_on(tmp_path):
    indexed = write(tmp_path / "a")
    write(tmp_path / "a", [[1]])
    assert indexed.get(2).tolist() == [7] * 50
    with open(tmp_path / "a.bin", "ab") as stream:
        stream.write(b"more")
    assert indexed.get(1).tolist() == [*range(40, 60)]
