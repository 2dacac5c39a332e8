"""Ends of documents on several processes: losses and gradients, statistics and plans are one process's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.runs import LAYOUTS, losses, plan_from, save_after, world_of

OPTIONS = {
    "vocab_size": 16, "hidden_size": 128, "ffn_hidden_size": 256, "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True,
    "calculate_per_token_loss": True,
}  # fmt: skip
SLOW = ("pp2 interleaved", "tp2 x dp2", "tp2 x pp2 x dp2")


def run(layout: str, function, *args, **more):
    return run_ranks(function, world_of(layout) if layout else 1, {**OPTIONS, **LAYOUTS.get(layout, {}), **more}, *args)


@pytest.fixture(scope="module")
def alone():
    return run("", losses)[0]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["pp2 x dp2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_layouts_agree(layout, alone):
    ranks = run(layout, losses)
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"][:10], alone["losses"][:10], rtol=1e-4)
        for name, gradient in rank["gradients"].items():
            if gradient.shape == alone["gradients"][name].shape:  # tp shows each process's own part
                torch.testing.assert_close(gradient, alone["gradients"][name], rtol=2e-4, atol=1e-6)


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
