"""The order of the samples against slow, plain references and, where it is installed, megatron-core."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_snip.data.sample_index import epochs_needed, gpt_index, split_ranges


def slow_gpt_order(lengths, first, last, num_samples, seq_length, seed):
    """Samples as lists of (sequence, offset) of each token, laid out token by token."""
    per_epoch = sum(lengths[first:last])
    epochs = 1
    while epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * per_epoch - 1) // seq_length
    apart = epochs > 1 and num_samples - before < int(0.8 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    order = []
    for count in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(range(first, last)) * count, dtype=np.int32)
        random.shuffle(part)
        order += part.tolist()
    stream = [(sequence, offset) for sequence in order for offset in range(lengths[sequence])]
    total = (len(stream) - 1) // seq_length
    shuffled = []
    for low, high in [(0, before), (before, total)] if apart else [(0, total)]:
        part = np.arange(low, high, dtype=np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return [stream[k * seq_length : (k + 1) * seq_length + 1] for k in shuffled]


def tokens_of(arrays, lengths, seq_length):
    """The same lists from gpt_index's arrays, read as GPTDataset reads them."""
    samples = []
    for slot in arrays["shuffle_index"].tolist():
        (document, offset), (stop, _) = (
            arrays["sample_index"][slot].tolist(),
            arrays["sample_index"][slot + 1],
        )
        sample = []
        while len(sample) < seq_length + 1:
            sequence = int(arrays["document_index"][document])
            if offset < lengths[sequence]:
                sample.append((sequence, offset))
                offset += 1
            else:
                document, offset = document + 1, 0
        assert document == stop
        samples.append(sample)
    return samples


@pytest.mark.parametrize("case", range(40))
def test_against_a_token_by_token_reference(case):
    random = np.random.RandomState(case)
    lengths = random.randint(0, 25, size=random.randint(8, 30)).astype(np.int32)
    first = random.randint(0, 4)
    last = len(lengths) - random.randint(0, 4)
    seq_length = random.randint(1, 20)
    if lengths[first:last].sum() <= seq_length:
        lengths[first] += seq_length
    num_samples = random.randint(1, 6 * int(lengths.sum()) // seq_length + 2)
    arrays = gpt_index(lengths, (first, last), num_samples, seq_length, case)
    expected = slow_gpt_order(lengths.tolist(), first, last, num_samples, seq_length, case)
    assert len(expected) >= num_samples
    assert tokens_of(arrays, lengths, seq_length) == expected
    assert arrays["document_index"].dtype == np.int32 and arrays["shuffle_index"].dtype == np.uint32


def test_the_first_start_is_the_first_document_even_if_it_is_empty():
    lengths = np.zeros(50, dtype=np.int32)
    lengths[30] = 40
    arrays = gpt_index(lengths, (0, 50), 3, 8, 0)
    assert arrays["document_index"][0] != 30
    position = arrays["document_index"].tolist().index(30)
    assert arrays["sample_index"].tolist() == [[0, 0], *([position, 8 * k] for k in range(1, 5))]


def test_both_rules_of_the_last_epoch_are_met():
    """Below 80% of the last epoch its samples come last; from 80% on they are mixed in."""
    lengths = np.full(100, 10, dtype=np.int32)
    for num_samples, apart in [(1000 // 8 + 20, True), (1000 // 8 + 110, False)]:
        order = gpt_index(lengths, (0, 100), num_samples, 8, 0)["shuffle_index"].astype(int)
        first_epoch = 999 // 8
        assert bool(order[:first_epoch].max() < first_epoch) is apart


@pytest.mark.parametrize(
    ("tokens", "samples", "seq_length", "epochs"),
    [(101, 10, 10, 1), (100, 10, 10, 2), (50, 10, 10, 3), (11, 1, 10, 1)],
)
def test_epochs_needed(tokens, samples, seq_length, epochs):
    assert epochs_needed(tokens, samples, seq_length) == epochs


def test_split_by_hand():
    assert split_ranges("99,1,0", 1000) == ((0, 990), (990, 1000), None)
    assert split_ranges("969,30,1", 57) == ((0, 55), (55, 57), (57, 57))
    assert split_ranges("1", 10) == ((0, 10), None, None)
    assert split_ranges("0,1", 10) == (None, (0, 10), None)


@pytest.mark.parametrize("split", ["'99,1,0'", '"99,1,0"', " '99, 1, 0' "])
def test_quotes_around_a_split_are_no_part_of_it(split):
    """Megatron-LM's example for Llama 3 passes them on."""
    assert split_ranges(split, 1000) == split_ranges("99,1,0", 1000)


@pytest.mark.parametrize("split", ["''", "9'9,1", "'99','1'"])
def test_quotes_elsewhere_in_a_split_are_refused(split):
    with pytest.raises(ValueError, match="give up to three shares"):
        split_ranges(split, 10)


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1", "nan,1", "inf", "1,2,3,4", "99;1"])
def test_bad_split_is_named(split):
    with pytest.raises(ValueError, match=f"--split is '{split}'"):
        split_ranges(split, 10)


class TestWithMegatron:
    """Against megatron-core's functions; its C++ helpers are not compiled in every installation."""

    @pytest.fixture(autouse=True)
    def megatron(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("megatron.core")
            self.gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
            self.config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
            self.helpers = pytest.importorskip("megatron.core.datasets.helpers")

    @pytest.mark.parametrize("epochs", [1, 3])
    def test_sample_index(self, epochs):
        random = np.random.RandomState(epochs)
        for seq_length in (2, 16, 100):
            lengths = random.randint(0, 60, size=200).astype(np.int32)
            if seq_length == 16:
                lengths[3:190] = 0  # nearly all documents are empty
            state = np.random.RandomState(7)
            documents = self.gpt._build_document_index(np.arange(200, dtype=np.int32), epochs, state, False)
            theirs = self.helpers.build_sample_idx(
                lengths, documents, seq_length, epochs, int(lengths.sum()), True, True
            )
            needed = (epochs * int(lengths.sum()) - 1) // seq_length
            ours = gpt_index(lengths, (0, 200), needed, seq_length, 7)
            assert np.array_equal(ours["document_index"], documents)
            assert np.array_equal(ours["sample_index"], theirs) and ours["sample_index"].dtype == theirs.dtype
            shuffled = self.gpt._build_shuffle_index(len(theirs) - 1, len(theirs) - 1, state)
            assert np.array_equal(ours["shuffle_index"], shuffled)

    def test_split(self):
        for split in ("99,1,0", "969,30,1", "1,1,1", "98,2", "100", "0.7,0.2,0.1", "3,3,1", "0,1,0"):
            vector = self.config.parse_and_normalize_split(split)
            matrix = self.config.convert_split_vector_to_split_matrix(vector)
            for size in [*range(1, 60), 999, 12345]:
                expected = tuple(
                    None if b is None else (round(b[0] * float(size)), round(b[1] * float(size))) for b in matrix
                )
                assert split_ranges(split, size) == expected
