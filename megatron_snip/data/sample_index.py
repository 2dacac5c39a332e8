"""Which tokens form which sample: pure functions of lengths, counts and a seed.

Source: Megatron-LM core 0.16.1, gpt_dataset.py, blended_megatron_dataset_config.py and helpers.cpp.  The arrays equal
Megatron's, so the same seed gives the same samples in the same order.
Convention: documents are concatenated in shuffled order.  A sample is seq_length + 1 tokens, and the next sample starts
at its last token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_snip.errors import UserError

# If less than this share of the last epoch is needed, it is shuffled separately, so that only samples of the last
# epoch are left out.
LAST_EPOCH_SHARE = 0.80
SPLITS = ("training", "validation", "test")

Array = npt.NDArray[Any]
Range = tuple[int, int]


def split_ranges(split: str, num_sequences: int) -> tuple[Range | None, ...]:
    """The ranges [first, last) of sequences for training, validation and test; None for a share of zero.

    ``split`` is up to three comma-separated shares, such as "99,1,0", possibly quoted.  Raises UserError otherwise.
    """
    try:
        shares = [float(share) for share in split.strip(" '\"").split(",")]
    except ValueError:
        shares = []
    finite = all(np.isfinite(share) and share >= 0 for share in shares)
    if not 1 <= len(shares) <= len(SPLITS) or not finite or not sum(shares) > 0:
        raise UserError(f"--split is {split!r}; give up to three shares, not all 0, such as 99,1,0")
    shares += [0.0] * (len(SPLITS) - len(shares))
    # Added in Megatron's order, so that a bound near the midpoint of two integers rounds the same way.
    weights = (np.array(shares) / np.sum(np.array(shares))).tolist()
    bounds = [0.0]
    for weight in weights:
        bounds.append(bounds[-1] + weight)
    edges = [round(bound * float(num_sequences)) for bound in bounds]
    return tuple((edges[i], edges[i + 1]) if bounds[i + 1] > bounds[i] else None for i in range(len(SPLITS)))


def epochs_needed(tokens_per_epoch: int, num_samples: int, seq_length: int) -> int:
    """Number of epochs with enough tokens for ``num_samples`` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def shuffled_together(per_epoch: int, num_samples: int, seq_length: int) -> list[int]:
    """How many epochs are shuffled together, for each group.  With the seed, this determines the order."""
    epochs = epochs_needed(per_epoch, num_samples, seq_length)
    without_last = ((epochs - 1) * per_epoch - 1) // seq_length
    in_one_epoch = (per_epoch - 1) // seq_length
    apart = epochs > 1 and num_samples - without_last < int(LAST_EPOCH_SHARE * in_one_epoch)
    return [epochs - 1, 1] if apart else [epochs]


def gpt_index(
    sequence_lengths: Array, sequences: Range, num_samples: int, seq_length: int, seed: int
) -> dict[str, Array]:
    """The order of the samples, as three arrays.

    document_index int32 [epochs * documents]: sequences in the order of their tokens;
    sample_index int32 or int64 [samples + 1, 2]: start of each sample, as (position in document_index, offset in
    tokens); shuffle_index uint32 or int64 [samples]: the sample to read at each step.
    ``sequence_lengths`` [S] are the dataset's; ``sequences`` is the range [first, last) to use.
    """
    lengths = np.asarray(sequence_lengths[sequences[0] : sequences[1]])
    per_epoch = int(lengths.sum(dtype=np.int64))
    assert per_epoch > seq_length and num_samples > 0, "fewer tokens than one sample; callers refuse that"
    rounds = shuffled_together(per_epoch, num_samples, seq_length)
    random = np.random.RandomState(seed)
    documents = np.arange(sequences[0], sequences[1], dtype=np.int32)
    parts = [np.tile(documents, count) for count in rounds]
    for part in parts:
        random.shuffle(part)
    document_index = np.concatenate(parts) if len(parts) > 1 else parts[0]
    starts = _sample_starts(lengths, document_index - np.int32(sequences[0]), seq_length)
    total = len(starts) - 1
    shuffle_index = _shuffled((rounds[0] * per_epoch - 1) // seq_length if len(parts) > 1 else total, total, random)
    return {"document_index": document_index, "sample_index": starts, "shuffle_index": shuffle_index}


def _sample_starts(lengths: Array, document_order: Array, seq_length: int) -> Array:
    """(document, offset) of each sample's first token, and of the token after the last whole sample.

    Megatron walks over the documents.  Here the k-th start is looked up as token k * seq_length of the stream.  Empty
    documents are skipped, except that the very first start is always (0, 0).
    """
    ends = np.cumsum(lengths[document_order], dtype=np.int64)
    num_samples = (int(ends[-1]) - 1) // seq_length
    tokens = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    document = np.searchsorted(ends, tokens, side="right")
    offset = tokens - (ends[document] - lengths[document_order[document]])
    document[0], offset[0] = 0, 0
    largest = max(len(document_order), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([document, offset], axis=1).astype(dtype)


def _shuffled(first: int, total: int, random: np.random.RandomState) -> Array:
    """[0, first) shuffled, then [first, total) shuffled."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype)]
    if first != total:
        parts.append(np.arange(first, total, dtype=dtype))
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)
