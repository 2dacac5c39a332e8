"""The order of a blend: a plain reference, megatron-core's own, and chunks that begin wrong."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_snip.data import blending
from megatron_snip.data.blending import blending_index

#: Ties at every step, at some, and none; weights that are no sums of powers of two; rare datasets.
WEIGHTS = {
    "one": [1.0],
    "equal": [1.0] * 3,
    "powers of two": [4.0, 2.0, 1.0, 1.0],
    "two": [0.3, 0.7],
    "hundred": [1.0] * 100,
    "rare": [1.0, 5000.0, 300.0, 1.0],
    "many": [float(3 + 7 * i % 23) for i in range(45)],
}


def normalised(weights: list[float]) -> list[float]:
    return (np.array(weights) / np.sum(weights)).tolist()


def slow_blend(weights, size):
    chosen, counts = [], [0] * len(weights)
    for i in range(size):
        errors = [w * max(float(i), 1.0) - c for w, c in zip(weights, counts)]
        best = max(range(len(weights)), key=lambda k: (errors[k], -k))
        chosen.append((best, counts[best]))
        counts[best] += 1
    return chosen


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("chunks", [1, 2, 7, 50])
def test_against_a_plain_reference(weights, chunks, monkeypatch):
    monkeypatch.setattr(blending, "CHUNKS", chunks)
    monkeypatch.setattr(blending, "SHORTEST_CHUNK", 10)
    weights = normalised(weights)
    arrays = blending_index(weights, 503)
    pairs = list(zip(arrays["dataset_index"].tolist(), arrays["dataset_sample_index"].tolist()))
    assert pairs == slow_blend(weights, 503)


@pytest.mark.parametrize("weights", [WEIGHTS["rare"], WEIGHTS["many"]], ids=["rare", "many"])
def test_chunks_that_begin_wrong_are_made_anew(weights, monkeypatch):
    """Guesses off by many samples, and no stretch in which to forget them."""
    walks, walk = [], blending._walk
    monkeypatch.setattr(blending, "_walk", lambda *args: walks.append(args[1].shape[1]) or walk(*args))
    weights = np.array(normalised(weights))

    def off(weights, places, warm_up):
        counts = np.floor(np.outer(weights, places))
        counts[0] += 9
        counts[:, 0] = 0
        return counts

    monkeypatch.setattr(blending, "_guess", off)
    chosen, number = blending._in_chunks(weights, 3000, 20)
    assert len(walks) > 1 and walks[0] == 20
    whole = blending._one_walk(weights.tolist(), 3000)
    assert np.array_equal(chosen, whole[0]) and np.array_equal(number, whole[1])


def test_nothing_is_asked_for():
    assert all(len(array) == 0 for array in blending_index([0.5, 0.5], 0).values())


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_is_megatrons(weights):
    """A length at which the walk is in chunks; megatron-core's C++ helpers are not compiled in every installation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        helpers = pytest.importorskip("megatron.core.datasets.helpers")
    size, weights = 150_001, normalised(weights)
    assert size // blending.SHORTEST_CHUNK > 2
    dataset, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset, number, weights, len(weights), size, False)
    ours = blending_index(weights, size)
    assert np.array_equal(ours["dataset_index"], dataset) and ours["dataset_index"].dtype == dataset.dtype
    assert np.array_equal(ours["dataset_sample_index"], number) and ours["dataset_sample_index"].dtype == number.dtype
