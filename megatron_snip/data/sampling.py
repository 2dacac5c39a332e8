"""Datasets of samples: one corpus, a blend of several, or mock tokens.

Source: Megatron-LM core 0.16.1 (GPTDataset, BlendedDataset, BlendedMegatronDatasetBuilder); sample_index.py has the
order.  Convention: sample i is int64 [seq_length + 1]; inputs are all but the last token, labels all but the first.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

import numpy as np
import numpy.typing as npt

from megatron_snip.data.blending import blending_index
from megatron_snip.data.index_cache import array_hash, cached
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetError, outside
from megatron_snip.data.sample_index import SPLITS, gpt_index, shuffled_together, split_ranges
from megatron_snip.errors import UserError

TRAINING, VALIDATION = 0, 1
# Megatron requests this share more samples of each dataset of a blend than its weight requires.  The number of
# samples decides the number of epochs and thus the order, so we do the same.
BLEND_SURPLUS = 0.005
MOCK_JUMP_ODDS = 8  # One in this many mock tokens starts a new run; the others continue the count.

Tokens = npt.NDArray[np.int64]
PathLike = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class Source:
    """Files that samples are made of.

    rounds: how many epochs are shuffled together; other numbers mean another order.  sequences: the range [first, last)
    that is used.  weight: share of a blend.
    """

    files: IndexedDataset
    rounds: list[int]
    sequences: tuple[int, int]
    weight: float = 1.0


class Dataset(Protocol):
    """Samples by number.  Reading has no side effects, so several threads may read."""

    @property
    def sources(self) -> Sequence[Source]:
        """The files of the samples; empty for mock data."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tokens: ...


def _check_index(index: int, size: int, what: str) -> None:
    if not 0 <= index < size:
        raise IndexError(f"{what} has {size} samples, none is number {index}")


class GPTDataset:
    """Samples of one corpus in Megatron's order.  Only the index is in memory, never the tokens.

    ``split_range`` is the range [first, last) of sequences to use.  The corpus is repeated, in a new order, until it
    has ``num_samples`` samples.  ``vocab_size`` enables a check of each sample's ids as it is read.
    Raises UserError if the range has less than one sample, or if the file does not hold integers.  Reading a sample
    raises IndexedDatasetError for an id outside the vocabulary and for a file that was cut short.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        split_range: tuple[int, int],
        num_samples: int,
        seq_length: int,
        seed: int,
        *,
        vocab_size: int | None = None,
        cache_path: PathLike | None = None,
    ) -> None:
        self.indexed, self.seq_length, self.vocab_size = indexed, seq_length, vocab_size
        if indexed.dtype.kind not in "iu":
            raise UserError(f"dataset {indexed.prefix} holds {indexed.dtype.name}, which are not token ids")
        first, last = split_range
        lengths = np.asarray(indexed.sequence_lengths[first:last])
        if (tokens := int(lengths.sum(dtype=np.int64))) <= seq_length:
            raise UserError(
                f"dataset {indexed.prefix} has {tokens} tokens in sequences [{first}, {last}), less than one "
                f"sample of {seq_length + 1}; add data, change --split or shorten --seq-length"
            )
        description = {
            "kind": "GPTDataset, as Megatron-LM core 0.16.1",
            "sequences": [first, last],
            "sequence_lengths": array_hash(lengths),
            "num_samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
        }
        arrays = cached(
            cache_path,
            description,
            lambda: gpt_index(indexed.sequence_lengths, (first, last), num_samples, seq_length, seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]
        self.sources = [Source(indexed, shuffled_together(tokens, num_samples, seq_length), split_range)]

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def __getitem__(self, index: int) -> Tokens:
        """Sample ``index``, int64 [seq_length + 1]."""
        _check_index(index, len(self), f"dataset {self.indexed.prefix}")
        self.indexed.check_sizes()
        slot = int(self.shuffle_index[index])
        first, offset = (int(value) for value in self.sample_index[slot])
        last, stop = (int(value) for value in self.sample_index[slot + 1])
        parts = []
        for position in range(first, last + 1):
            sequence = int(self.document_index[position])
            begin = offset if position == first else 0
            length = stop + 1 - begin if position == last else None
            parts.append(self.indexed.get(sequence, begin, length))
            self._check_ids(parts[-1], sequence)
        sample: Tokens = np.concatenate(parts).astype(np.int64, copy=False)
        assert len(sample) == self.seq_length + 1, "the sample index does not fit the tokens"
        return sample

    def _check_ids(self, tokens: npt.NDArray[np.integer], sequence: int) -> None:
        if self.vocab_size is None or not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise IndexedDatasetError(
                f"sequence {sequence} of dataset {self.indexed.prefix} holds token id {low if low < 0 else high}, "
                f"{outside(self.vocab_size)}"
            )


class BlendedDataset:
    """``size`` samples of several datasets in proportion to ``weights``, in Megatron's greedy order.

    Raises UserError if a dataset has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        size: int,
        *,
        cache_path: PathLike | None = None,
    ) -> None:
        assert len(datasets) == len(weights) > 0 and all(weight > 0 for weight in weights)
        self.datasets, self.weights = list(datasets), _normalised(weights)
        description = {
            "kind": "BlendedDataset, as Megatron-LM core 0.16.1",
            "weights": [weight.hex() for weight in self.weights],
            "size": size,
        }
        arrays = cached(cache_path, description, lambda: blending_index(self.weights, size))
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self.sources = [replace(source, weight=w) for w, one in zip(self.weights, datasets) for source in one.sources]
        taken = np.bincount(self.dataset_index, minlength=len(datasets))
        for number, dataset in enumerate(datasets):
            if taken[number] > len(dataset):
                raise UserError(
                    f"the blend takes {taken[number]} samples from its dataset {number} (weight "
                    f"{weights[number]}), which has {len(dataset)}; lower its weight or ask for fewer samples"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Tokens:
        _check_index(index, len(self), "the blend")
        dataset = self.datasets[int(self.dataset_index[index])]
        return dataset[int(self.dataset_sample_index[index])]


class MockDataset:
    """Synthetic tokens that a model can learn: counting runs that start at random ids, more often at low ids.

    A token is its predecessor plus one, modulo ``vocab_size``.  One in eight starts a new run at vocab_size * u1 * u2 *
    u3 with uniform u.  Sample i depends only on (seed, stream, i), and is the same on every machine and numpy version
    (raw Philox words and integer arithmetic).
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, *, stream: int = TRAINING) -> None:
        if vocab_size < 2:
            raise UserError(f"--mock-data with a vocabulary of {vocab_size}; give --vocab-size 2 or more")
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self.sources: list[Source] = []
        self._key = np.array([seed, stream], dtype=np.uint64)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Tokens:
        """Sample ``index``, int64 [seq_length + 1]."""
        _check_index(index, len(self), "the mock dataset")
        length = self.seq_length + 1
        counter = np.array([0, 0, index, 0], dtype=np.uint64)
        words = np.random.Philox(counter=counter, key=self._key).random_raw(4 * length).reshape(4, length)
        jumps = words[0] % np.uint64(MOCK_JUMP_ODDS) == 0
        first, second, third = (words[1:] % np.uint64(self.vocab_size)).astype(np.int64)
        starts = first * second // self.vocab_size * third // self.vocab_size
        position = np.arange(length)
        run_start = np.maximum.accumulate(np.where(jumps, position, 0))
        tokens: Tokens = (starts[run_start] + position - run_start) % self.vocab_size
        return tokens


class Repeated:
    """A dataset that starts over at its end, without limit.

    The order does not depend on how many samples are read.  After a rewind that skips samples, a run reads more than
    planned.  Earlier samples stay the same, and the dataset's first samples come again at the end.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.sources = dataset, dataset.sources

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Tokens:
        """Sample ``index`` modulo the dataset's length, int64 [seq_length + 1]."""
        _check_index(index, len(self), "the repeated dataset")
        return self.dataset[index % len(self.dataset)]


def _normalised(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    result: list[float] = (array / np.sum(array)).tolist()
    return result


def parse_blend(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """``[prefix]`` -> ([prefix], None); ``[w1, p1, w2, p2, ...]`` -> (prefixes, weights).

    Raises UserError for anything else.
    """
    if len(paths) == 1:
        return [paths[0]], None
    way_out = "give one prefix, or weight prefix weight prefix ..."
    if not paths or len(paths) % 2:
        raise UserError(f"--data-path has {len(paths)} items, {list(paths)}; {way_out}")
    weights = []
    for text in paths[::2]:
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"--data-path has {text!r} where a positive weight should be; {way_out}")
        weights.append(weight)
    return list(paths[1::2]), weights


class _Builder:
    """Settings shared by all datasets of one `build_datasets` call."""

    def __init__(self, seq_length: int, seed: int, vocab_size: int | None, cache_path: PathLike | None) -> None:
        self.seq_length, self.seed = seq_length, seed
        self.vocab_size, self.cache_path = vocab_size, cache_path
        self.opened: dict[str, IndexedDataset] = {}

    def corpus(self, prefix: str, split: str | None, part: int, num_samples: int) -> GPTDataset | None:
        """The samples of one corpus; None if the split gives this part a share of zero."""
        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix, checked=True)
        indexed = self.opened[prefix]
        chosen = (0, len(indexed)) if split is None else split_ranges(split, len(indexed))[part]
        if chosen is None:
            return None
        if split is not None and chosen[0] == chosen[1]:
            raise UserError(
                f"--split {split} leaves no sequence of dataset {prefix} ({len(indexed)} sequences) for "
                f"{SPLITS[part]}; raise that share, or give 0 to do without"
            )
        return GPTDataset(
            indexed,
            chosen,
            num_samples,
            self.seq_length,
            self.seed,
            vocab_size=self.vocab_size,
            cache_path=self.cache_path,
        )

    def blend(self, paths: Sequence[str], split: str | None, part: int, num_samples: int) -> Dataset | None:
        """One corpus, or a weighted blend of several, with Megatron's sizes.  Without a split, all sequences are used.

        Under --data-path, a single prefix with a weight is a blend of one, with a blend's surplus.  If each part has
        its own paths, it is a plain corpus.  Megatron does the same, and the order depends on it.
        """
        prefixes, raw_weights = parse_blend(paths)
        if raw_weights is None or (split is None and len(prefixes) == 1):
            return self.corpus(prefixes[0], split, part, num_samples)
        weights = _normalised(raw_weights)
        targets = [math.ceil(num_samples * weight) for weight in weights]
        corpora = []
        for prefix, target in zip(prefixes, targets):
            corpus = self.corpus(prefix, split, part, math.ceil(target * (1 + BLEND_SURPLUS)))
            if corpus is None:
                return None
            corpora.append(corpus)
        return BlendedDataset(corpora, weights, sum(targets), cache_path=self.cache_path)


def check_data(*path_lists: Sequence[str], whole: bool = True) -> None:
    """Open and close every corpus of the path lists.  Raises UserError for the first that cannot be read.

    whole: also read the whole indices, as one rank per node does.
    """
    for paths in path_lists:
        for prefix in parse_blend(paths)[0] if paths else ():
            IndexedDataset(prefix, checked=not whole)


def build_datasets(
    train_paths: Sequence[str],
    valid_paths: Sequence[str],
    data_path: Sequence[str],
    split: str,
    mock: bool,
    num_train_samples: int,
    num_valid_samples: int,
    seq_length: int,
    seed: int,
    vocab_size: int | None,
    cache_path: PathLike | None,
) -> tuple[Dataset, Dataset | None]:
    """The training and the validation dataset, each with at least the requested number of samples.

    Sources are ``mock``, ``data_path`` cut by ``split``, or ``train_paths`` with optional ``valid_paths``.  A path
    list is ``[prefix]`` or ``[w1, p1, w2, p2, ...]``; `check_data` must have read its indices.  Validation is None if
    no validation sample is requested, if its share is 0, or if there are only ``train_paths``.
    Raises UserError for data that cannot be read or is too small.
    """
    if mock:
        assert vocab_size is not None, "the tokenizer gives it"
        mock_valid = MockDataset(vocab_size, seq_length, seed, stream=VALIDATION)
        return MockDataset(vocab_size, seq_length, seed), mock_valid if num_valid_samples else None
    builder = _Builder(seq_length, seed, vocab_size, cache_path)
    shares = split if data_path else None
    train = builder.blend(data_path or train_paths, shares, TRAINING, num_train_samples)
    if train is None:
        raise UserError(f"--split {split} gives training a share of 0; raise its first number")
    valid_paths = data_path or valid_paths
    if not num_valid_samples or not valid_paths:
        return train, None
    return train, builder.blend(valid_paths, shares, VALIDATION, num_valid_samples)
