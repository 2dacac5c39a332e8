"""Weights without a float32 master are the same on every layout, and their checkpoints move between layouts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron_snip.checkpoint.manifest import check
from megatron_snip.checkpoint.storage import load_tensors
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.precisions import lost, moved, stepped
from tests.dist.helpers.runs import LAYOUTS, losses, world_of

SMALL = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "lr": 2e-4, "bf16": True,
    "untie_embeddings_and_output_weights": False, "train_iters": 8,
}  # fmt: skip
MORE = {
    **{name: LAYOUTS[name] for name in ("tp2", "pp2", "dp2")},
    "dp2 without sharding": {"data_parallel_sharding_strategy": "no_shard"},
    "dp2 of all": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "tp2 x pp2 x dp2": LAYOUTS["tp2 x pp2 x dp2"],
}
FEW = [name if "x" not in name else pytest.param(name, marks=pytest.mark.slow) for name in MORE]


def world(layout: str) -> int:
    return world_of(layout) if layout in LAYOUTS else 2


def tensors_of(folder, iteration: int) -> dict[str, torch.Tensor]:
    manifest = check(folder, iteration)
    found = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in manifest.tensors.items()}
    load_tensors(folder, iteration, found)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Of one process: the folder of its checkpoint and what is in it, by precision."""
    found = {}
    for precision in ("collage-plus", "bf16-stochastic"):
        folder = tmp_path_factory.mktemp(precision)
        run_ranks(stepped, 1, {**SMALL, "optimizer_precision": precision}, folder, 3)
        found[precision] = folder, tensors_of(folder, 3)
    return found


@pytest.mark.parametrize("precision", ["collage-plus", "bf16-stochastic"])
@pytest.mark.parametrize("layout", FEW)
def test_equal_gradients_give_equal_weights_on_every_layout(layout, precision, alone, tmp_path):
    """Also the random bits; both copies of the tied embedding, of which a checkpoint has one, are compared by a run."""
    run_ranks(stepped, world(layout), {**SMALL, **MORE[layout], "optimizer_precision": precision}, tmp_path, 3)
    expected, found = alone[precision][1], tensors_of(tmp_path, 3)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    assert any(name.endswith(".low") for name in found) == (precision == "collage-plus")


@pytest.mark.parametrize("layout", FEW)
def test_a_checkpoint_moves_to_another_layout(layout, alone, tmp_path):
    options = {**SMALL, "optimizer_precision": "collage-plus"}
    folder, expected = alone["collage-plus"]
    run_ranks(moved, world(layout), {**options, **MORE[layout]}, folder, tmp_path / "there", 3)
    run_ranks(moved, 1, options, tmp_path / "there", tmp_path / "back", 3)
    for one in ("there", "back"):
        found = tensors_of(tmp_path / one, 3)
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("precision", ["collage-light", pytest.param("bf16-stochastic", marks=pytest.mark.slow)])
def test_layouts_train_alike(precision):
    """Up to the order of sums, in BF16; plain BF16 weights end 2e-3 away."""
    options = {**SMALL, "micro_batch_size": 2, "optimizer_precision": precision}
    one = run_ranks(short, 1, options)[0]
    for layout in ("tp2", "pp2", "dp2"):
        found = run_ranks(short, world(layout), {**options, **MORE[layout]})[0]
        assert np.abs(np.subtract(found, one)).max() <= 1e-3, layout
    if precision == "collage-light":
        plain = run_ranks(short, 1, {**options, "optimizer_precision": "bf16"})[0]
        assert np.abs(np.subtract(plain, one)).max() > 2e-3


def short(options: dict) -> list[float]:
    return losses(options, iterations=8)["losses"]


COUNTED = {**SMALL, "optimizer_precision": "bf16", "log_edq_interval": 1}


@functools.cache
def lost_alone() -> dict[str, float]:
    """By one process."""
    return run_ranks(lost, 1, COUNTED)[0]


@pytest.mark.parametrize("layout", FEW)
def test_lost_updates_count_every_element_once(layout):
    found, *others = run_ranks(lost, world(layout), {**COUNTED, **MORE[layout]})
    assert found.keys() == lost_alone().keys() and all(other == found for other in others)
    for name, value in lost_alone().items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
