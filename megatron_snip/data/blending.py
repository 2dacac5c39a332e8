"""Order of a blend: which dataset each sample comes from.

Source: Megatron-LM core 0.16.1, build_blending_indices of helpers.cpp.  Sample i comes from the dataset whose count is
furthest below weight * max(i, 1), in double precision; the first dataset wins a tie.  A compiled kernel walks the
samples.  If it was not built, ``blending_reference`` gives the same order, about 500 times as slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def blending_index(weights: Sequence[float], size: int) -> dict[str, Array]:
    """Dataset of each of ``size`` samples, int16 [size], and the sample's number in it, int64 [size].

    ``weights`` must sum to 1.
    """
    from megatron_snip.quant.kernels import cpu  # imported here: torch, which data workers do not need

    library = cpu.library()
    if library is None:
        chosen, number = blending_reference(weights, size)
    else:
        chosen, number = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
        shares, counts = np.array(weights, dtype=np.float64), np.zeros(len(weights), dtype=np.int64)
        library.megatron_snip_blend(
            shares.ctypes.data, len(weights), size, counts.ctypes.data, chosen.ctypes.data, number.ctypes.data
        )
    return {"dataset_index": chosen, "dataset_sample_index": number}


def blending_reference(weights: Sequence[float], size: int) -> tuple[Array, Array]:
    """The arrays of ``blending_index``, in plain Python."""
    chosen, number = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts = [0] * len(weights)
    for i in range(size):
        errors = [weight * max(i, 1) - count for weight, count in zip(weights, counts)]
        best = errors.index(max(errors))
        chosen[i], number[i] = best, counts[best]
        counts[best] += 1
    return chosen, number
