"""What goes from stage to stage: activations and their gradients in the compute dtype, once a microbatch."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.sharding import an_iteration

#: (processes, chunks of each, options); two microbatches of 128 tokens and 256 channels, or four.
CASES = {
    "float32": (2, 1, {}),
    "bf16": (2, 1, {"bf16": True}),
    "bf16, fp4": (2, 1, {"bf16": True, "precision": "fp4"}),
    "interleaved": (2, 2, {"bf16": True, "num_virtual_stages_per_pipeline_rank": 2}),
    "sequence parallel, unequal": (
        4,
        1,
        {
            "bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "decoder_last_pipeline_num_layers": 1,
        },
    ),
    "recompute": (2, 1, {"bf16": True, "recompute_granularity": "full"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "interleaved" else pytest.mark.slow) for c in CASES]
)
def test_activations_and_gradients_travel_once_in_the_compute_dtype(case):
    world, chunks, options = CASES[case]
    options = {"pipeline_model_parallel_size": 2, **options}
    microbatches, boundaries = 4, 2 * chunks - 1  # of the whole pipeline, each crossed in both directions
    one = 128 * 256 * (2 if options.get("bf16") else 4) // options.get("tensor_model_parallel_size", 1)
    ranks = run_ranks(an_iteration, world, options)
    for found in (ranks[0]["collectives"], ranks[-1]["collectives"]):
        assert found["count", "pp", "send"] == found["count", "pp", "recv"] == microbatches * boundaries
        assert found["bytes", "pp", "send"] == found["bytes", "pp", "recv"] == microbatches * boundaries * one
