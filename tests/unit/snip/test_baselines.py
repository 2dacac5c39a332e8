"""Rules: what they rank high stays in the base format when the target leaves room for some."""

from __future__ import annotations

import numpy as np

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.baselines import KINDS, layer_id_ranks, layer_type_ranks, random_ranks
from megatron_snip.snip.cost import LinearShape, block_of, efficiency
from megatron_snip.snip.ilp import solve
from megatron_snip.snip.objectives import ObjectiveInputs, quality_loss

OPTIONS = [LinearPrecision.uniform("fp8"), LinearPrecision.uniform("fp4")]
SIZES = dict.fromkeys(KINDS, (64, 64)) | {
    "gate_proj": (192, 64),
    "up_proj": (192, 64),
    "down_proj": (64, 192),
}
SHAPES = [LinearShape(f"layers.{i}.mlp.{kind}", *SIZES[kind]) for i in range(8) for kind in KINDS]
NAMES = [shape.name for shape in SHAPES]


def kept(objective: str, target: float, seed: int = 0) -> list[str]:
    """Linears that stay in FP8."""
    quality = quality_loss(objective, ObjectiveInputs(SHAPES, OPTIONS, seed=seed))
    choice = solve(quality, efficiency(SHAPES, OPTIONS), target, gap=0).choice
    return [name for name, option in zip(NAMES, choice) if option == 0]


def test_layer_id_keeps_the_first_and_last_blocks():
    blocks = {block_of(name) for name in kept("layer_id", 0.75)}
    assert blocks == {0, 7}
    assert {block_of(name) for name in kept("layer_id", 0.875)} == {7}


def test_layer_type_keeps_down_proj_first():
    flops = {name: shape.gemm_flops for name, shape in zip(NAMES, SHAPES)}
    share = sum(flops[n] for n in NAMES if n.endswith("down_proj")) / sum(flops.values())
    assert {name.rpartition(".")[2] for name in kept("layer_type", 1 - share)} == {"down_proj"}


def test_random_depends_on_seed_and_name_alone():
    assert kept("random", 0.5) == kept("random", 0.5) != kept("random", 0.5, seed=1)
    assert np.array_equal(random_ranks(NAMES, 3)[5:], random_ranks(NAMES[5:], 3))
    # Large linears are not spared for their size: the mean share kept is near that of all linears.
    large = [sum("gate" in n or "up" in n or "down" in n for n in kept("random", 0.5, s)) for s in range(20)]
    small = [sum("self" in n or n[-6] in "qkvo" for n in kept("random", 0.5, s)) for s in range(20)]
    assert 0.6 < (np.mean(large) / 24) / (np.mean(small) / 32) < 1.6


def test_ranks_lie_in_zero_to_one():
    for ranks in (random_ranks(NAMES, 0), layer_id_ranks(NAMES, 0), layer_type_ranks(NAMES, 0)):
        assert ranks.shape == (len(NAMES),) and np.all(ranks > 0) and np.all(ranks <= 1)
    odd = ["lm_head", "layers.0.x"]
    assert np.all(layer_id_ranks(odd, 0) <= 1) and np.all(layer_type_ranks(odd, 0) <= 1)
