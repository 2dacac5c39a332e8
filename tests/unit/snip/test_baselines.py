"""Rules: what they rank high stays in the base format when the target leaves room for some."""

from __future__ import annotations

import numpy as np

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.baselines import KINDS, layer_id_ranks, layer_type_ranks, random_ranks
from megatron_snip.snip.objectives import ObjectiveInputs, quality_loss
from megatron_snip.snip.plan.cost import efficiency
from megatron_snip.snip.plan.ilp import solve

OPTIONS = [LinearPrecision.uniform("fp8"), LinearPrecision.uniform("fp4")]
SIZES = dict.fromkeys(KINDS, (64, 64)) | {
    "gate": (192, 64),
    "up": (192, 64),
    "down": (64, 192),
}
SHAPES = [LinearShape(f"layers.{i}.{kind}", *SIZES[kind], block=i, kind=kind) for i in range(8) for kind in KINDS]


def kept(objective: str, target: float, seed: int = 0) -> list[LinearShape]:
    """Linears that stay in FP8."""
    quality = quality_loss(objective, ObjectiveInputs(SHAPES, OPTIONS, seed=seed))
    choice = solve(quality, efficiency(SHAPES, OPTIONS), target, gap=0).choice
    return [shape for shape, option in zip(SHAPES, choice) if option == 0]


def test_layer_id_keeps_the_first_and_last_blocks():
    assert {shape.block for shape in kept("layer_id", 0.75)} == {0, 7}
    assert {shape.block for shape in kept("layer_id", 0.875)} == {7}


def test_layer_type_keeps_down_proj_first():
    down = sum(shape.gemm_flops for shape in SHAPES if shape.kind == "down")
    share = down / sum(shape.gemm_flops for shape in SHAPES)
    assert {shape.kind for shape in kept("layer_type", 1 - share)} == {"down"}


def test_random_depends_on_seed_and_name_alone():
    assert kept("random", 0.5) == kept("random", 0.5) != kept("random", 0.5, seed=1)
    assert np.array_equal(random_ranks(SHAPES, 3)[5:], random_ranks(SHAPES[5:], 3))
    # Large linears are not spared for their size: the mean share kept is near that of all linears.
    large = [sum(s.kind in ("gate", "up", "down") for s in kept("random", 0.5, seed)) for seed in range(20)]
    small = [sum(s.kind in "qkvo" for s in kept("random", 0.5, seed)) for seed in range(20)]
    assert 0.6 < (np.mean(large) / 24) / (np.mean(small) / 32) < 1.6


def test_ranks_lie_in_zero_to_one():
    for ranks in (random_ranks(SHAPES, 0), layer_id_ranks(SHAPES, 0), layer_type_ranks(SHAPES, 0)):
        assert ranks.shape == (len(SHAPES),) and np.all(ranks > 0) and np.all(ranks <= 1)
