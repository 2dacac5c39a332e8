"""The .bin/.idx pair: bytes, reading back, merging, and an error for each way it can be broken."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest

from megatron_snip.data.indexed import (
    DTYPES,
    HEADER,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    MissingDatasetFileError,
    token_dtype,
)


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return IndexedDataset(prefix)


def both_files(prefix):
    return [open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx")]


@pytest.fixture
def pair(tmp_path):
    """A small pair: 3 documents, the second empty."""
    prefix = str(tmp_path / "pair")
    write(prefix, [[1, 2, 3], [], [4, 5]])
    return prefix


def edit(path, change):
    """Rewrite a file through a function of its bytes."""
    with open(path, "rb") as stream:
        data = bytearray(stream.read())
    result = change(data)
    with open(path, "wb") as stream:
        stream.write(data if result is None else result)


def test_bytes_written_by_hand(pair):
    """The layout of Megatron's .idx, spelled out."""
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6) + struct.pack("<4q", 0, 1, 1, 2)
    assert both_files(pair) == [struct.pack("<5H", 1, 2, 3, 4, 5), expected]


def test_reading(pair):
    dataset = IndexedDataset(pair)
    assert (len(dataset), dataset.num_tokens, dataset.dtype) == (2, 5, np.dtype("<u2"))
    assert dataset.sequence_lengths.tolist() == [3, 2]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2]
    assert dataset.get(0).tolist() == [1, 2, 3]
    assert dataset.get(1, 1).tolist() == [5]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(0, 3).tolist() == []
    assert not dataset.get(0).flags.writeable
    for arguments in [(2,), (-1,), (0, 4), (0, -1), (0, 1, 3), (0, 2, -1)]:
        with pytest.raises(IndexError, match="pair"):
            dataset.get(*arguments)


def test_tokens_are_not_pickled(pair):
    dataset = IndexedDataset(pair)
    data = pickle.dumps(dataset)
    assert len(data) < 300
    assert pickle.loads(data).get(1).tolist() == [4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_random_round_trip(tmp_path, seed):
    """Random dtypes, lengths (empty ones too) and splits into merged parts."""
    random = np.random.RandomState(seed)
    dtype = DTYPES[[1, 2, 3, 4, 5, 8][random.randint(6)]]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    documents = [
        random.randint(low, high, size=random.randint(0, 30), dtype=dtype) for _ in range(random.randint(0, 40))
    ]
    whole = write(tmp_path / "whole", documents, dtype)
    cut = random.randint(0, len(documents) + 1)
    write(tmp_path / "first", documents[:cut], dtype)
    write(tmp_path / "second", documents[cut:], dtype)
    with IndexedDatasetBuilder(tmp_path / "merged", dtype) as builder:
        builder.merge(tmp_path / "first")
        builder.merge(tmp_path / "second")
        assert builder.num_tokens == whole.num_tokens and builder.num_documents == len(documents)
    with IndexedDatasetBuilder(tmp_path / "encoded", dtype) as builder:
        builder.add_encoded(b"".join(d.tobytes() for d in documents), [len(d) for d in documents])
    assert both_files(tmp_path / "whole") == both_files(tmp_path / "merged") == both_files(tmp_path / "encoded")
    full = [d for d in documents if len(d)]
    assert len(whole) == len(full) and whole.num_tokens == sum(map(len, full))
    for number, document in enumerate(full):
        assert np.array_equal(whole.get(number), document)


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(2, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")]
)
def test_token_dtype(vocab_size, name):
    assert token_dtype(vocab_size).name == name


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_file_is_named(pair, tmp_path, suffix):
    (tmp_path / f"pair{suffix}").unlink()
    with pytest.raises(MissingDatasetFileError, match=rf"pair\{suffix}") as caught:
        IndexedDataset(pair)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, FileNotFoundError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_prefix_with_a_suffix_gets_a_hint(pair, suffix):
    with pytest.raises(MissingDatasetFileError, match=rf"without \{suffix}"):
        IndexedDataset(pair + suffix)


def put(offset, form, value):
    return lambda data: struct.pack_into(form, data, offset, value)


DOCUMENTS = HEADER.size + 12 * 2
BROKEN = {
    "magic": (".idx", put(0, "<B", 0), "no Megatron .idx"),
    "empty": (".idx", lambda data: b"", "no Megatron .idx"),
    "version": (".idx", put(9, "<Q", 2), "format version 2"),
    "dtype": (".idx", put(17, "<B", 9), "dtype code 9"),
    "cut header": (".idx", lambda data: data[:20], "truncated"),
    "cut": (".idx", lambda data: data[:-1], "truncated"),
    "huge count": (".idx", put(18, "<Q", 2**63), "truncated"),
    "longer": (".idx", lambda data: data + b"\0", "multimodal"),
    "negative length": (".idx", put(HEADER.size, "<i", -3), "do not fit its lengths"),
    "offset": (".idx", put(HEADER.size + 16, "<q", 4), "do not fit its lengths"),
    "shorter bin": (".bin", lambda data: data[:-1], "has 9 bytes, shorter than the 10"),
    "longer bin": (".bin", lambda data: data + b"\0\0", "has 12 bytes, longer than the 10"),
    "first document": (".idx", put(DOCUMENTS, "<q", 1), "document indices: the first is 1"),
    "last document": (".idx", put(DOCUMENTS + 24, "<q", 3), "document indices: the last is 3"),
    "document order": (".idx", put(DOCUMENTS + 8, "<q", 2), "do not ascend"),
    "no documents": (".idx", lambda data: data[:26] + bytes(8) + data[34:DOCUMENTS], "there are none"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_gets_one_clear_line(pair, case):
    suffix, change, message = BROKEN[case]
    edit(pair + suffix, change)
    with pytest.raises(IndexedDatasetError, match=message) as caught:
        IndexedDataset(pair)
    assert f"{pair}{suffix}" in str(caught.value) and "\n" not in str(caught.value)


def test_offsets_are_checked_beyond_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_snip.data.indexed.CHECKED_AT_ONCE", 4)
    prefix = str(tmp_path / "a")
    assert write(prefix, [[1] * (1 + i % 3) for i in range(11)]).num_tokens == 21
    edit(prefix + ".idx", put(HEADER.size + 4 * 11 + 8 * 9, "<q", 0))
    with pytest.raises(IndexedDatasetError, match="offsets"):
        IndexedDataset(prefix)
    assert IndexedDataset(prefix, checked=True).num_tokens == 21, "what another process has read through"


def test_a_checked_index_has_as_many_tokens(tmp_path):
    for name, documents in {"a": [[1, 2], [], [3]], "b": [], "c": [[]]}.items():
        prefix = str(tmp_path / name)
        assert write(prefix, documents).num_tokens == IndexedDataset(prefix, checked=True).num_tokens


def test_ids_outside_the_dtype_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(ValueError, match=r"document 1 .*\[7, 70000\], outside uint16"):
        write(tmp_path / "a", [[1], [70000, 7]])
    with pytest.raises(ValueError, match="outside uint16"):
        write(tmp_path / "a", [[-1]])
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_the_older_pair(pair, tmp_path):
    before = both_files(pair)
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(pair, np.uint16) as builder:
        builder.add_document([9])
        raise RuntimeError
    assert both_files(pair) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pair.bin", "pair.ids.json", "pair.idx"]


def test_a_new_pair_replaces_the_older(pair):
    assert write(pair, [[8]]).get(0).tolist() == [8]


def test_merging_other_dtypes_and_unknown_dtypes_is_refused(pair, tmp_path):
    with (
        pytest.raises(ValueError, match="holds uint16, .* as int32"),
        IndexedDatasetBuilder(tmp_path / "b", "i4") as builder,
    ):
        builder.merge(pair)
    with pytest.raises(ValueError, match="uint32 has no code"):
        IndexedDatasetBuilder(tmp_path / "b", np.uint32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # their numpy.array of a tensor
class TestWithMegatron:
    """Against megatron-core's own reader and builder."""

    @pytest.fixture(autouse=True)
    def megatron(self):
        pytest.importorskip("megatron.core")
        self.theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")

    @pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
    def test_bytes_both_ways(self, tmp_path, dtype):
        import torch

        random = np.random.RandomState(3)
        documents = [random.randint(0, 200, size=random.randint(0, 50)) for _ in range(30)]
        assert any(len(d) == 0 for d in documents) or documents.append(np.empty(0, int)) is None
        write(tmp_path / "ours", documents, dtype)
        builder = self.theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
        for document in documents:
            builder.add_document(torch.tensor(document), [len(document)] if len(document) else [])
        builder.finalize(str(tmp_path / "theirs.idx"))
        assert both_files(tmp_path / "ours") == both_files(tmp_path / "theirs")
        ours, theirs = IndexedDataset(tmp_path / "theirs"), self.theirs.IndexedDataset(str(tmp_path / "ours"))
        assert np.array_equal(ours.sequence_lengths, theirs.sequence_lengths)
        assert np.array_equal(ours.document_indices, theirs.document_indices)
        for number in range(len(theirs)):
            assert np.array_equal(ours.get(number), theirs.get(number))

    def test_documents_of_several_sequences_merge_alike(self, tmp_path):
        import torch

        builder = self.theirs.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
        builder.add_document(torch.arange(6), [2, 4])
        builder.add_document(torch.arange(3), [3])
        builder.finalize(str(tmp_path / "a.idx"))
        theirs = self.theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
        with IndexedDatasetBuilder(tmp_path / "ours", np.int32) as ours:
            for _ in range(2):
                ours.merge(tmp_path / "a")
                theirs.add_index(str(tmp_path / "a"))
        theirs.finalize(str(tmp_path / "theirs.idx"))
        assert both_files(tmp_path / "ours") == both_files(tmp_path / "theirs")
