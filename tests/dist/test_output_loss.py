"""The loss of chunks of tokens is that of all at once, on every layout."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from megatron_snip.parallel import loss
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, losses

TIED = {"untie_embeddings_and_output_weights": False}
#: (processes, options): pipelines, tp with and without sequence parallelism, FSDP2, tied weights, cp, masked losses.
CASES = {
    "tp2 x pp2 interleaved": (4, LAYOUTS["tp2 x pp2 interleaved"]),
    "tp2, tied": (2, {**LAYOUTS["tp2 without sequence parallel"], **TIED}),
    "dp2, optim_grads_params, tied": (2, {"data_parallel_sharding_strategy": "optim_grads_params", **TIED}),
    "pp2 x dp2, optim_grads_params, tied": (
        4,
        {
            **LAYOUTS["pp2"], "data_parallel_sharding_strategy": "optim_grads_params", "global_batch_size": 4, **TIED,
        },
    ),
    "cp2, masked": (
        2,
        {
            "context_parallel_size": 2, "seq_length": 512, "vocab_size": 16, "eod_mask_loss": True,
            "calculate_per_token_loss": True,
        },
    ),
    "masked by microbatch, compiled": (1, {"vocab_size": 16, "eod_mask_loss": True, "compile": True}),
}  # fmt: skip
CHUNK = 32  # of 128 tokens, or 256 under cp


def in_chunks(options: dict[str, Any]) -> dict[str, Any]:
    """``losses`` with chunks of 32 tokens on every rank."""
    loss._chunk = lambda tokens, columns: CHUNK
    return losses(options, iterations=2)


#: The others meet nothing that these do not, but another partner.
FIRST = ("tp2 x pp2 interleaved", "pp2 x dp2, optim_grads_params, tied", "cp2, masked")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FIRST else pytest.mark.slow) for c in CASES])
def test_chunks_change_no_loss_and_no_gradient(case):
    world, options = CASES[case]
    options = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "global_batch_size": 2, **options}
    plain = run_ranks(functools.partial(losses, iterations=2), world, options, seconds=240.0)
    for one, other in zip(plain, run_ranks(in_chunks, world, options, seconds=240.0), strict=True):
        assert other["first"].loss == pytest.approx(one["first"].loss, rel=1e-6)
        assert np.abs(np.subtract(one["losses"], other["losses"])).max() <= 1e-4
        for name, grad in one["gradients"].items():
            assert (grad - other["gradients"][name]).abs().max() <= 1e-5 * grad.abs().max(), name
    name = next(name for name in ("lm_head.weight", "embed_tokens.weight") if name in other["gradients"])
    assert not plain[-1]["gradients"][name].equal(other["gradients"][name]), "it ran in chunks"
