"""Order of a blend: which dataset each sample comes from.

Source: Megatron-LM core 0.16.1, build_blending_indices of helpers.cpp.  Sample i comes from the dataset whose count is
furthest below weight * max(i, 1), in double precision; the first dataset wins a tie.
Long orders are built in chunks that advance together, one step of all chunks at a time.  The counts at the start of a
chunk depend on the previous chunk, but the greedy choice forgets its start within a few turns of the rarest dataset.
So each chunk starts a few turns early, with counts in proportion to the weights.  Afterwards, each chunk's first counts
are compared with the previous chunk's last counts, and chunks that differ are built again.
When all agree, the order equals that of a sequential walk, whatever the initial counts were.
Convention: D datasets, K chunks of C samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNKS = 8192  # at most
SHORTEST_CHUNK = 2048  # a plain loop is as fast below two chunks of this size
WARM_UP_TURNS = 8  # turns of the rarest dataset
AT_ONCE = 64  # steps buffered before they are written to the result

Array = npt.NDArray[Any]


def blending_index(weights: Sequence[float], size: int) -> dict[str, Array]:
    """Dataset of each of ``size`` samples, int16 [size], and the sample's number in it, int64 [size].

    ``weights`` must sum to 1.
    """
    chunks = min(CHUNKS, size // SHORTEST_CHUNK)
    if chunks < 2:
        chosen, number = _one_walk(list(weights), size)
    else:
        chosen, number = _in_chunks(np.array(weights, dtype=np.float64), size, chunks)
    return {"dataset_index": chosen, "dataset_sample_index": number}


def _one_walk(weights: list[float], size: int) -> tuple[Array, Array]:
    chosen, number = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts = [0] * len(weights)
    others = list(enumerate(weights))[1:]
    first = weights[0]
    for i in range(size):
        step = i or 1
        best, largest = 0, first * step - counts[0]
        for dataset, weight in others:
            error = weight * step - counts[dataset]
            if error > largest:
                best, largest = dataset, error
        chosen[i], number[i] = best, counts[best]
        counts[best] += 1
    return chosen, number


def _in_chunks(weights: Array, size: int, chunks: int, turns: int = WARM_UP_TURNS) -> tuple[Array, Array]:
    length = -(-size // chunks)
    chosen = np.empty((chunks, length), dtype=np.int16)
    number = np.empty((chunks, length), dtype=np.int64)
    places = np.arange(chunks) * length
    began = _guess(weights, places, min(length, int(turns / weights.min())))
    ended = began.copy()
    wrong = np.arange(chunks)
    while len(wrong):
        counts = np.ascontiguousarray(began[:, wrong])
        _walk(weights, counts, places[wrong], length, (chosen, number, wrong))
        ended[:, wrong] = counts
        wrong = 1 + np.flatnonzero((began[:, 1:] != ended[:, :-1]).any(axis=0))
        began[:, wrong] = ended[:, wrong - 1]
    return chosen.reshape(-1)[:size], number.reshape(-1)[:size]


def _guess(weights: Array, places: Array, warm_up: int) -> Array:
    """Likely counts [D, K] at the start of each chunk.  Those of the first chunk are exact."""
    before = np.maximum(places - warm_up, 0)
    shares = weights[:, None] * before
    counts = np.floor(shares)
    missing = before - counts.sum(axis=0)  # samples lost to rounding down: one each for the largest fractions, in order
    turn = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0, kind="stable")
    counts += turn < missing
    _walk(weights, counts, before, warm_up)
    counts[:, 0] = 0.0
    return counts


def _walk(
    weights: Array, counts: Array, places: Array, steps: int, into: tuple[Array, Array, Array] | None = None
) -> None:
    """Walk ``steps`` samples on from ``places`` [K].  Updates ``counts`` [D, K], whole numbers in float64, in place.

    into: dataset and number of each sample, [all chunks, C], and the rows [K] of these chunks.
    """
    assert counts.flags.c_contiguous, "its flat view must not be a copy"
    datasets, chunks = counts.shape
    first, flat = np.arange(chunks), counts.reshape(-1)
    step, error, largest = (np.empty(chunks) for _ in range(3))
    best, larger = np.empty(chunks, dtype=np.int64), np.empty(chunks, dtype=bool)
    kept = [np.empty((AT_ONCE, chunks), dtype) for dtype in (np.int16, np.int64)]
    for i in range(steps):
        np.maximum(places + i, 1, out=step, casting="unsafe")
        np.subtract(np.multiply(step, weights[0], out=largest), counts[0], out=largest)
        best[:] = first
        for dataset in range(1, datasets):
            np.subtract(np.multiply(step, weights[dataset], out=error), counts[dataset], out=error)
            np.greater(error, largest, out=larger)
            np.copyto(best, first + dataset * chunks, where=larger)
            np.maximum(error, largest, out=largest)
        taken = flat[best]
        flat[best] = taken + 1.0
        if into is None:
            continue
        row = i % AT_ONCE
        kept[0][row], kept[1][row] = best // chunks, taken
        if row == AT_ONCE - 1 or i == steps - 1:
            for whole, part in zip(into, kept):
                whole[into[2], i - row : i + 1] = part[: row + 1].T
