"""The order of a blend: a plain reference, and megatron-core's own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_snip.data.blending import blending_index
from megatron_snip.quant.kernels import cpu

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
@pytest.mark.parametrize("compiled", [True, False])
def test_against_a_plain_reference(weights, compiled, monkeypatch):
    assert cpu.library() is not None, "the kernel is built where tests run"
    if not compiled:
        monkeypatch.setattr(cpu, "library", lambda: None)
    weights = normalised(weights)
    arrays = blending_index(weights, 5003)
    pairs = list(zip(arrays["dataset_index"].tolist(), arrays["dataset_sample_index"].tolist()))
    assert pairs == slow_blend(weights, 5003)


def test_nothing_is_asked_for():
    assert all(len(array) == 0 for array in blending_index([0.5, 0.5], 0).values())


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_is_megatrons(weights):
    """megatron-core's C++ helpers are not compiled in every installation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        helpers = pytest.importorskip("megatron.core.datasets.helpers")
    size, weights = 150_001, normalised(weights)
    dataset, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset, number, weights, len(weights), size, False)
    ours = blending_index(weights, size)
    assert np.array_equal(ours["dataset_index"], dataset) and ours["dataset_index"].dtype == dataset.dtype
    assert np.array_equal(ours["dataset_sample_index"], number) and ours["dataset_sample_index"].dtype == number.dtype
