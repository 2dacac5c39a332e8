"""Ends of documents on several processes: losses and gradients, statistics and plans are one process's."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, losses, plan_from, save_after, world_of

OPTIONS = {
    "vocab_size": 16, "hidden_size": 128, "ffn_hidden_size": 256, "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True,
    "calculate_per_token_loss": True,
}  # fmt: skip
SLOW = ("pp2 interleaved", "tp2 x dp2", "tp2 x pp2 x dp2")
#: Processes that share sequences of 512 tokens, and what they are beside.
SHARED = {"cp2": (2, {"num_layers": 2}), "tp2 x pp2 x cp2": (8, {**LAYOUTS["tp2 x pp2 interleaved"], "calculate_per_token_loss": False})}

four_losses = functools.partial(losses, iterations=4)


def run(layout: str, function, *args, **more):
    return run_ranks(function, world_of(layout) if layout else 1, {**OPTIONS, **LAYOUTS.get(layout, {}), **more}, *args)


def agree(ranks, alone):
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], alone["losses"], rtol=1e-4)
        for name, gradient in rank["gradients"].items():
            if gradient.shape == alone["gradients"][name].shape:  # tp shows each process's own part
                torch.testing.assert_close(gradient, alone["gradients"][name], rtol=2e-4, atol=1e-6)


@pytest.fixture(scope="module")
def alone():
    return run("", four_losses)[0]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["pp2 x dp2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_layouts_agree(layout, alone):
    agree(run(layout, four_losses), alone)


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["cp2", pytest.param("tp2 x pp2 x cp2", marks=pytest.mark.slow)])
def test_pieces_of_sequences_agree_with_the_whole(layout):
    """Documents reach from one process's pieces into another's, and the pieces' positions are those of documents."""
    world, options = SHARED[layout]
    options = {**OPTIONS, "seq_length": 512, "micro_batch_size": 2, **options}
    alone = {**options, **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1)}
    alone |= {"num_layers_per_virtual_pipeline_stage": None, "sequence_parallel": False}
    agree(run_ranks(four_losses, world, {**options, "context_parallel_size": 2}), run_ranks(four_losses, 1, alone)[0])


@pytest.mark.dist
@pytest.mark.slow
def test_statistics_and_plans_agree(tmp_path):
    whole = {"hidden_size": 256, "ffn_hidden_size": 512}  # blocks of 128 that tensor parallelism does not cut
    run_ranks(save_after, 1, {**OPTIONS, **whole}, tmp_path, 3)
    (one,) = run_ranks(plan_from, 1, {**OPTIONS, **whole}, tmp_path, 3)
    for layout in ("tp2 x pp2 x dp2", "pp2 interleaved"):
        for rank in run(layout, plan_from, tmp_path, 3, snip_stage_constraint="none", **whole):
            assert rank["stats"].columns == one["stats"].columns
            np.testing.assert_allclose(rank["stats"].values, one["stats"].values, rtol=1e-3, atol=1e-12)
