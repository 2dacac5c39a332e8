"""What options save: FP4 shares and modelled time, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.model.llama import linear_shapes
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.cost import (
    achieved,
    by_stage,
    efficiency,
    fused_ties,
    gemm_flops,
    linear_options,
    modelled_time,
    saving,
    stages,
)
from megatron_snip.snip.gemm_times import GemmTimes

SHAPES = [LinearShape("a", 2, 3, stage=0), LinearShape("b", 6, 3, stage=1)]
BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp8/fp4"))


def test_fp4_share_by_hand():
    assert SHAPES[0].gemm_flops == 12
    found = efficiency(SHAPES, [BF16, FP8, MIXED, FP4])
    assert np.allclose(found, [[0, 0, 1 / 6, 1 / 4], [0, 0, 1 / 2, 3 / 4]], rtol=1e-12)


def test_time_by_hand():
    found = efficiency(SHAPES, [BF16, FP8, FP4], "time")
    assert np.allclose(found, [[0, 1 / 6, 1 / 4], [0, 1 / 2, 3 / 4]], rtol=1e-12)
    with pytest.raises(ValueError, match="unknown measure 'joules'; known: fp4, time"):
        saving(FP4, "joules")


def gemms(fprop, dgrad, wgrad):
    return {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}


TIMES = GemmTimes(
    "a card",
    {"fp8": gemms(0.5, 0.5, 0.8), "fp4": gemms(0.3, 0.6, 0.9)},
    {"6x3": {"bf16": gemms(2.0, 2.0, 2.0), "fp8": gemms(1.0, 1.5, 1.0)}},
)


def test_flops_of_every_gemm():
    assert gemm_flops(SHAPES).tolist() == [[12, 12, 12], [36, 36, 36]]


def test_modelled_time_by_hand():
    assert modelled_time(SHAPES, [BF16, FP8, FP4]) == pytest.approx(np.array([[4, 2, 1], [12, 6, 3]]) / 16)
    found = modelled_time(SHAPES, [BF16, FP8, MIXED], TIMES)
    assert found == pytest.approx(np.array([[3, 1.8, 1.7], [18, 10.5, 8.1]]) * 12 * [[1], [1]] / 144)
    with pytest.raises(ValueError, match="no format nvfp4"):
        modelled_time(SHAPES, [LinearPrecision.parse("nvfp4")], TIMES)


def test_time_saved_by_a_table():
    """1 is what the fastest format of each GEMM saves: of "a" .3, .5, .8; of "b", a shape of its own, .3, .6, .9."""
    most = (3 - 1.6) + (18 - 3 * 1.8)
    found = efficiency(SHAPES, [BF16, FP8, FP4], "time", TIMES)
    assert found == pytest.approx(np.array([[0, 1.2, 1.2], [0, 7.5, 12.6]]) / most)
    assert efficiency(SHAPES, [FP8, FP4], "fp4", TIMES) == pytest.approx(efficiency(SHAPES, [FP8, FP4]))
    slow = GemmTimes("a slow card", {"fp8": gemms(1.0, 1.5, 1.0)})
    with pytest.raises(ValueError, match="times of a slow card no format is faster than bf16"):
        efficiency(SHAPES, [BF16, FP8], "time", slow)


def test_shares_by_stage():
    plan = {"a": FP8, "b": MIXED}
    assert by_stage(SHAPES, plan) == {0: (0.0, pytest.approx(2 / 16)), 1: (pytest.approx(2 / 3), pytest.approx(1 / 4))}
    assert by_stage(SHAPES, plan, TIMES)[1][1] == pytest.approx(8.1 / 12)


def test_achieved_is_the_sum_of_the_chosen_entries():
    options = [FP8, MIXED, FP4]
    table = efficiency(SHAPES, options)
    for first, left in enumerate(options):
        for second, right in enumerate(options):
            total = achieved(SHAPES, {"a": left, "b": right})
            assert total == pytest.approx(table[0, first] + table[1, second])
    assert achieved([], {}) == 0.0


def test_options_by_granularity():
    assert linear_options(["fp8", "fp4", "fp8"]) == [FP8, FP4]
    assert linear_options(["fp4", "fp4/fp8/fp4"], "fused") == [FP4, MIXED]
    triples = linear_options(["fp8", "fp4"], "gemm")
    assert len(set(triples)) == 8 and triples[0] == FP8 and triples[-1] == FP4 and MIXED in triples
    with pytest.raises(ValueError, match="unknown granularity 'layer'; known: linear, gemm, fused"):
        linear_options(["fp4"], "layer")
    with pytest.raises(ValueError, match="name at least one"):
        linear_options([])
    with pytest.raises(ValueError, match="single formats"):
        linear_options(["fp4/fp4/fp8"], "gemm")
    with pytest.raises(ValueError, match="fp5"):
        linear_options(["fp5"])


def test_fused_ties_and_stages():
    shapes = linear_shapes(Config().replace(num_layers=2, hidden_size=128, num_attention_heads=1).model)
    assert fused_ties(shapes).tolist() == [0, 0, 0, -1, 1, 1, -1, 2, 2, 2, -1, 3, 3, -1]
    assert stages(SHAPES).tolist() == [0, 1]
