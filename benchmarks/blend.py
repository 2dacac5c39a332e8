"""The order of a blend against Megatron-LM's C++ routine: seconds of one core, and that both are equal.

    python benchmarks/blend.py [--samples 128000000] [--datasets 4 16]

Needs megatron-core with its helpers compiled.  Processor time, so that other work on the machine shows little.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np

from megatron_snip.data.blending import blending_index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128_000_000)
    parser.add_argument("--datasets", type=int, nargs="+", default=[4, 16])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers

    for count in args.datasets:
        weights = np.random.RandomState(0).rand(count) ** 2 + 0.01
        weights /= weights.sum()
        begin = time.process_time()
        ours = blending_index(weights.tolist(), args.samples)
        between = time.process_time()
        dataset, number = np.zeros(args.samples, np.int16), np.zeros(args.samples, np.int64)
        helpers.build_blending_indices(dataset, number, weights, count, args.samples, False)
        end = time.process_time()
        assert np.array_equal(ours["dataset_index"], dataset) and np.array_equal(ours["dataset_sample_index"], number)
        mine, theirs = between - begin, end - between
        print(
            f"{count} datasets, {args.samples:,} samples: ours {mine:.1f} s, Megatron-LM's {theirs:.1f} s, "
            f"{mine / theirs:.2f} of it; equal",
            flush=True,
        )


if __name__ == "__main__":
    main()
