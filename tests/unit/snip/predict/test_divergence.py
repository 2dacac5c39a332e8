"""Divergences and objectives against numbers computed by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.divergence import (
    NonFiniteStatistics,
    fwd_divergence,
    loss_divergence,
    prop_divergence,
    weight_divergence,
)
from megatron_snip.snip.objectives import (
    OBJECTIVES,
    ObjectiveInputs,
    base_option,
    finite_or_held,
    get_objective,
    quality_loss,
)
from megatron_snip.snip.stats import ProbeStats
from tests.unit.snip.made_up import linear_stats, probe_stats

BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp4/fp8"))
NAMES = ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]
SHAPES = [LinearShape(NAMES[0], 8, 4, 0, "up"), LinearShape(NAMES[1], 4, 4, 1, "up")]


def stats(**linear) -> ProbeStats:
    """tokens/2 = 50; sum of update norms 4 + 12 = 16."""
    first = linear_stats({"fp8": 1e-4, "fp4": 4e-3}, 4.0, {"fp8": 0.1, "fp4": 1.6})
    second = linear_stats({"fp8": 0.0, "fp4": 2e-3}, 12.0, {"fp8": 0.0, "fp4": 3.2})
    return probe_stats(7, 5.0, 100, {NAMES[0]: dataclasses.replace(first, **linear), NAMES[1]: second})


def test_loss_divergence_by_hand():
    found = loss_divergence(stats(), NAMES, [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.005, 0.2, 0.2], [0, 0, 0.1, 0.1]], rtol=1e-12, atol=0)


def test_weight_divergence_by_hand():
    found = weight_divergence(stats(), NAMES, [BF16, FP8, FP4, MIXED])
    assert np.allclose(found, [[0, 0.1 / 16, 0.1, 0.1 / 16], [0, 0, 0.2, 0]], rtol=1e-12, atol=0)
    # The norm is of all linears measured, also when only some are asked for.
    assert weight_divergence(stats(), NAMES[1:], [FP4])[0, 0] == pytest.approx(0.2)


def test_formula_on_small_tensors():
    """T/2 sum_t (sum_n G dY)^2 from tensors: the statistics' meaning, not only their arithmetic."""
    g, d_y = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([[0.1, 0.2], [0.4, -0.1]])
    per_token = (0.1 - 0.4, 0.2 - 0.3)
    measured = probe_stats(0, 1.0, 2, {"a": linear_stats({"fp4": ((g * d_y).sum(1) ** 2).sum()}, 1.0, {"fp4": 0.0})})
    assert loss_divergence(measured, ["a"], [FP4])[0, 0] == pytest.approx(2 / 2 * sum(s**2 for s in per_token))


def test_snip_objective_and_base():
    options = [FP4, FP8, BF16]
    inputs = ObjectiveInputs(SHAPES, options, stats(), update_weight=2.0)
    first = [0.2 / 5 + 0.1, 0.005 / 5 + 0.1 / 16, 0.0]
    second = [0.1 / 5 + 0.2, 0.0, 0.0]
    expected = np.array([first, second])
    assert np.allclose(quality_loss("snip", inputs), expected - expected[:, [1]], rtol=1e-12, atol=0)
    loss_only = np.array([[0.2, 0.005, 0], [0.1, 0, 0]]) / 5
    assert np.allclose(quality_loss("snip_loss", inputs), loss_only - loss_only[:, [1]], rtol=1e-12, atol=0)
    assert base_option(options) == 1 and base_option([FP4, BF16]) == 0
    assert np.all(quality_loss("snip", ObjectiveInputs(SHAPES, [FP4, BF16], stats()))[:, 0] == 0)


def test_no_update_yet_has_no_weight_divergence():
    still = probe_stats(0, 5.0, 100, {n: linear_stats({"fp4": 1.0}, 0.0, {"fp4": 0.0}) for n in NAMES})
    assert np.all(weight_divergence(still, NAMES, [FP4]) == 0)


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError, match="unknown objective 'snap'; known: snip, snip_loss, ggn, norms, paper, abs_err"
    ):
        get_objective("snap")
    with pytest.raises(ValueError, match="no such linears: \\['x'\\]"):
        loss_divergence(stats(), ["x"], [FP4])
    with pytest.raises(ValueError, match="lack a format of option e3m2"):
        weight_divergence(stats(), NAMES, [LinearPrecision.uniform("e3m2")])
    with pytest.raises(ValueError, match="needs statistics"):
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4]))
    with pytest.raises(ValueError, match="must be above 0"):
        broken = probe_stats(1, math.nan, 100, stats().linears)
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], broken))


@pytest.mark.parametrize(
    "linear",
    [
        {"token_square_sum": {"fp8": 0.0, "fp4": math.nan}},
        {"own_sq": {"fp8": math.inf, "fp4": 0.0}},
        {"update_norm_sq": math.nan},
    ],
)
def test_non_finite_linears_are_named_and_held(linear):
    broken = stats(**linear)
    with pytest.raises(NonFiniteStatistics, match="not finite") as caught:
        quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], broken))
    assert caught.value.names == (NAMES[0],)
    quality, fixed, held = finite_or_held("snip", ObjectiveInputs(SHAPES, [FP4, FP8], broken))
    assert held == (NAMES[0],) and fixed.tolist() == [1, -1] and np.isfinite(quality).all()
    total = 12.0 if "update_norm_sq" in linear else 16.0
    assert quality[1, 0] == pytest.approx(0.1 / 5 + 3.2 / total / 2)
    quality, fixed, held = finite_or_held("snip", ObjectiveInputs(SHAPES, [FP8, FP4], stats()), np.array([-1, 1]))
    assert held == () and fixed.tolist() == [-1, 1]
    assert np.array_equal(quality, quality_loss("snip", ObjectiveInputs(SHAPES, [FP8, FP4], stats())))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_keeps_its_promises(name):
    """Shape, finiteness, zero at the base, and FP4 never cheaper than FP8 on sane statistics."""
    options = [FP8, MIXED, FP4]
    given = stats() if get_objective(name).needs_stats else None
    found = quality_loss(name, ObjectiveInputs(SHAPES, options, given))
    assert found.shape == (2, 3) and np.isfinite(found).all() and np.all(found[:, 0] == 0)
    assert np.all(found[:, 2] > 0) and np.all(found[:, 1] <= found[:, 2])
    assert np.array_equal(found, quality_loss(name, ObjectiveInputs(SHAPES, options, given)))


def test_prop_by_hand():
    """Two blocks: what comes before a linear, in its own half of the block, and the first block's attention."""
    up, down, q, o = ("layers.1.mlp.up_proj", "layers.1.mlp.down_proj", "layers.0.self_attn.q_proj",
                      "layers.0.self_attn.o_proj")  # fmt: skip
    numbers = {
        q: {"noise_update_sq": 3.0, "residual_noise_sq": 7.0,
            "error_sq": {"fp4/wgrad/grad_output": 0.4, "fp4/wgrad/input": 0.2},
            "norm_sq": {"G": 2.0, "X": 4.0, "dW": 3.0}},
        o: {"noise_update_sq": 5.0, "residual_noise_sq": 7.0, "dgrad_signal_sq": 4.0},
        up: {"noise_update_sq": 11.0, "residual_noise_sq": 2.0, "dgrad_signal_sq": 20.0,
             "error_sq": {"fp4/wgrad/grad_output": 0.5, "fp4/wgrad/input": 0.9},
             "norm_sq": {"G": 10.0, "X": 3.0, "dW": 9.0}},
        down: {"noise_update_sq": 13.0, "residual_noise_sq": 2.0, "dgrad_signal_sq": 4.0,
               "error_sq": {"fp4/dgrad/grad_output": 0.6, "fp4/dgrad/weight": 0.5},
               "norm_sq": {"G": 2.0, "W": 5.0}},
    }  # fmt: skip
    linears = {
        name: linear_stats({"fp4": 0.0}, 2.5, {"fp4": 0.6}, dgrad_error_sq={"fp4": 0.8}, **fields)
        for name, fields in numbers.items()
    }
    found = prop_divergence(probe_stats(1, 1.0, 8, linears), [q, o, up, down], [FP4, BF16])
    before = (3.0 + 5.0) / 2.0  # per squared noise in the residual stream
    near = 0.6 * (0.8 / 4.0) / (0.5 / 10.0 + 0.9 / 3.0)
    # a quarter of the error is the weight's, and 8 tokens' products add up to 2.4 times what random signs would give
    near *= 0.75 + 0.25 * 9.0 * 8 / (10.0 * 3.0)
    # nothing is before the first attention; 8 tokens' products in q add up to 3 times what random signs would give
    of_o = 0.6 * (0.8 / 4.0) / (0.4 / 2.0 + 0.2 / 4.0) / (3.0 * 8 / (2.0 * 4.0))
    expected = [0.0, of_o, 0.8 * before, 0.8 * 20.0 / 4.0 * before + near]
    assert np.allclose(found[:, 0], np.array(expected) / (4 * 2.5), rtol=1e-12, atol=0)
    assert np.all(found[:, 1] == 0)


def test_fwd_by_hand():
    """kappa = (0.5 + 1.5) / (50 * 6e-3) squared change a nat, measured in FP4 and used for FP8 too."""
    measured = stats()
    for name, change in zip(NAMES, (0.5, 1.5), strict=True):
        measured.linears[name] = dataclasses.replace(measured.linears[name], fprop_update_sq={"fp4": change})
    kappa = 2.0 / 0.3
    found = fwd_divergence(measured, NAMES, [BF16, FP8, FP4, MIXED])
    nats = np.array([[0, 0.005, 0.2, 0.2], [0, 0, 0.1, 0.1]])
    assert np.allclose(found, kappa * nats / 16, rtol=1e-12, atol=0)
    others = weight_divergence(stats(), NAMES, [FP4]) - fwd_divergence(stats(), NAMES, [FP4])
    assert np.allclose(weight_divergence(measured, NAMES, [FP4]) - found[:, [2]], others, rtol=1e-12, atol=0)
    nothing = {name: dataclasses.replace(one, token_square_sum={"fp4": 0.0}) for name, one in measured.linears.items()}
    assert np.all(fwd_divergence(dataclasses.replace(measured, linears=nothing), NAMES, [FP4]) == 0)
    nan = dataclasses.replace(measured.linears[NAMES[1]], own_sq={"fp4": math.nan})
    broken = dataclasses.replace(measured, linears={**measured.linears, NAMES[1]: nan})
    assert fwd_divergence(broken, NAMES[:1], [FP4])[0, 0] == pytest.approx(2.0 / 0.2 * 0.2 / 16), (
        "a linear in BF16 makes no error, but its updates feel that of others"
    )


def test_weight_divergence_asks_for_the_quantised_fprop():
    without = {name: dataclasses.replace(linear, fprop_update_sq=None) for name, linear in stats().linears.items()}
    with pytest.raises(ValueError, match="no quantised fprop, which the weight divergence needs, for layers.0.mlp.up"):
        weight_divergence(dataclasses.replace(stats(), linears=without), NAMES, [FP4])


def test_weight_divergence_asks_for_the_backward_noise():
    without = {name: dataclasses.replace(linear, noise_update_sq=None) for name, linear in stats().linears.items()}
    with pytest.raises(ValueError, match="have no backward noise, which the weight divergence needs"):
        weight_divergence(dataclasses.replace(stats(), linears=without), NAMES, [FP4])


def test_objectives_that_lack_their_pass_say_so():
    without = {name: dataclasses.replace(linear, sampled_square_sum=None) for name, linear in stats().linears.items()}
    with pytest.raises(ValueError, match="no sampled labels for layers.0.mlp.up_proj; collect them with ggn"):
        quality_loss("ggn", ObjectiveInputs(SHAPES, [FP8, FP4], dataclasses.replace(stats(), linears=without)))
    with pytest.raises(ValueError, match="no forward_noise; collect them with paper"):
        silent = dataclasses.replace(stats(), noise_sq={"backward_noise": 1.0})
        quality_loss("paper", ObjectiveInputs(SHAPES, [FP8, FP4], silent))


def test_error_and_norm_objectives_by_hand():
    """One linear of 8 x 4, T = 100; errors and norms that differ by operand."""
    errors = {"fp4/fprop/input": 4.0, "fp4/fprop/weight": 9.0, "fp4/dgrad/grad_output": 0.25, "fp4/dgrad/weight": 16.0,
              "fp4/wgrad/grad_output": 0.36, "fp4/wgrad/input": 25.0}  # fmt: skip
    norms = {"X": 100.0, "W": 400.0, "Y": 1.0, "G": 4.0, "dX": 9.0, "dW": 49.0}
    linear = linear_stats({"fp4": 0.0}, 16.0, {"fp4": 1.0}, error_sq=errors, norm_sq=norms,
                          dgrad_error_sq={"fp4": 0.09}, noise_update_sq=4.0, forward_update_sq=9.0)  # fmt: skip
    given = dataclasses.replace(
        probe_stats(1, 5.0, 100, {NAMES[0]: linear}), noise_sq={"backward_noise": 0.5, "forward_noise": 0.1}
    )

    def value(objective: str) -> float:
        return quality_loss(objective, ObjectiveInputs(SHAPES[:1], [BF16, FP4], given))[0, 1]

    assert value("abs_err") == pytest.approx(2 + 3 + 0.5 + 4 + 0.6 + 5)
    assert value("rel_err") == pytest.approx(0.2 + 0.15 + 0.25 + 0.2 + 0.3 + 0.5)
    assert value("norms") == pytest.approx(100 / 2 * (9 * 4 / (100 * 4) + 49 * 9 / (8 * 4)) / 5)
    loss = 3 * 2 / math.sqrt(400) + 7 * 3 / math.sqrt(32)
    at_output = math.sqrt(4 * 400 / 4 + 9 * 100 / 4)
    far = 0.3 * math.sqrt(4 / 0.5) + at_output * math.sqrt(9 / 0.1)
    assert value("paper") == pytest.approx(loss + math.sqrt(1 / 16) + far / 4)


def test_a_linear_that_is_not_finite_leaves_the_others_alone():
    """q_proj's statistics are NaN: o_proj's prop counts k and v alone."""
    block = "layers.1.self_attn"
    before = linear_stats({"fp4": 0.0}, 1.0, {"fp4": 0.1}, noise_update_sq=2.0)
    linears = {"layers.0.mlp.up_proj": before}
    for kind in ("q_proj", "k_proj", "o_proj"):
        linears[f"{block}.{kind}"] = linear_stats({"fp4": 0.0}, 1.0, {"fp4": 0.1}, dgrad_error_sq={"fp4": 0.5})
    linears[f"{block}.q_proj"] = dataclasses.replace(linears[f"{block}.q_proj"], dgrad_signal_sq=math.nan)
    shapes = [LinearShape(name, 8, 4) for name in linears]
    quality, _, held = finite_or_held("snip", ObjectiveInputs(shapes, [FP8, FP4], probe_stats(1, 5.0, 8, {
        name: dataclasses.replace(
            linear,
            token_square_sum={"fp8": 0.0, "fp4": 0.0}, own_sq={"fp8": 0.0, "fp4": 0.1},
            dgrad_error_sq={"fp8": 0.0, "fp4": 0.5},
            error_sq={f"{f}/wgrad/{role}": 0.2 for f in ("fp8", "fp4") for role in ("input", "grad_output")},
        ) for name, linear in linears.items()
    })))  # fmt: skip
    assert held == (f"{block}.q_proj",) and np.isfinite(quality).all()
