"""Objectives by hand, who is held, and rules: what they rank high stays in the base format."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import efficiency, linear_options
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.objectives import (
    FIRST_TO_LEAVE,
    OBJECTIVES,
    ObjectiveInputs,
    base_option,
    get_objective,
    layer_id_ranks,
    layer_type_ranks,
    quality_loss,
    random_ranks,
)
from tests.unit.snip.made_up import changed, statistics, without_updates

BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp4/fp8"))
UP = [LinearShape("layers.0.mlp.up_proj", 8, 4, 0, "up"), LinearShape("layers.1.mlp.up_proj", 4, 4, 1, "up")]
NAMES = [shape.name for shape in UP]
MEASURED = [name for name, objective in OBJECTIVES.items() if objective.needs_stats]


def stats() -> Statistics:
    """tokens/2 = 50; sum of update norms 4 + 12 = 16."""
    token, own = {"fp8": [1e-4, 0.0], "fp4": [4e-3, 2e-3]}, {"fp8": [0.1, 0.0], "fp4": [1.6, 3.2]}
    return statistics(UP, token, [4.0, 12.0], own)


def quality(name: str, inputs: ObjectiveInputs) -> np.ndarray:
    """Q of an objective that holds nobody."""
    found, bad = quality_loss(name, inputs)
    assert bad.tolist() == [False] * len(inputs.shapes)
    return found


def test_snip_objective_and_base():
    options = [FP4, FP8, BF16]
    inputs = ObjectiveInputs(UP, options, stats(), update_weight=2.0)
    first = [0.2 / 5 + 0.1, 0.005 / 5 + 0.1 / 16, 0.0]
    second = [0.1 / 5 + 0.2, 0.0, 0.0]
    expected = np.array([first, second])
    assert np.allclose(quality("snip", inputs), expected - expected[:, [1]], rtol=1e-12, atol=0)
    loss_only = np.array([[0.2, 0.005, 0], [0.1, 0, 0]]) / 5
    inputs = ObjectiveInputs(UP, options, stats())
    assert np.allclose(quality("snip", inputs), loss_only - loss_only[:, [1]], rtol=1e-12, atol=0)
    assert base_option(options) == 1 and base_option([FP4, BF16]) == 1 and base_option([BF16, FP4]) == 0
    assert base_option([FP4, LinearPrecision.parse("fp8/fp4/fp4")]) == 1 and base_option([FP4]) == 0
    assert np.all(quality("snip", ObjectiveInputs(UP, [FP4, BF16], stats()))[:, 1] == 0)


def test_unknown_names_list_the_known():
    assert {"snip", "abs_err", "rel_err", "random", "layer_id", "layer_type"} <= OBJECTIVES.keys()
    with pytest.raises(ValueError, match=f"unknown objective 'snap'; known: {', '.join(OBJECTIVES)}$"):
        get_objective("snap")
    with pytest.raises(ValueError, match="unknown objective 'snap'; known: snip"):
        quality_loss("snap", ObjectiveInputs(UP, [FP8, FP4], stats()))


@pytest.mark.parametrize("name", MEASURED)
def test_what_measured_objectives_ask_for(name):
    with pytest.raises(ValueError, match="needs statistics; probe first"):
        quality_loss(name, ObjectiveInputs(UP, [FP8, FP4]))
    for others in (UP[::-1], UP[:1], [*UP, LinearShape("x", 8, 4)]):
        with pytest.raises(ValueError, match="statistics of iteration 7 are of other linears; probe this model"):
            quality_loss(name, ObjectiveInputs(others, [FP8, FP4], stats()))
    e3m2 = LinearPrecision.uniform("e3m2")
    with pytest.raises(
        ValueError, match="have no .*e3m2.*; measured formats: fp8, fp4, with updates; probe with the options"
    ):
        quality_loss(name, ObjectiveInputs(UP, [FP8, e3m2], stats()))


@pytest.mark.parametrize("loss", [math.nan, 0.0])
def test_the_loss_must_be_above_0(loss):
    broken = dataclasses.replace(stats(), loss=loss)
    with pytest.raises(ValueError, match="must be above 0"):
        quality_loss("snip", ObjectiveInputs(UP, [FP8, FP4], broken))


@pytest.mark.parametrize(("column", "value"), [("token/fp4", math.nan), ("own/fp8", math.inf), ("update", math.nan)])
def test_non_finite_linears_are_held(column, value):
    broken = changed(stats(), NAMES[0], column, value)
    assert broken.not_finite == (NAMES[0],)
    found, bad = quality_loss("snip", ObjectiveInputs(UP, [FP4, FP8], broken, update_weight=1.0))
    assert bad.tolist() == [True, False] and np.isfinite(found).all()
    total = 12.0 if column == "update" else 16.0
    assert found[1, 0] == pytest.approx(0.1 / 5 + 3.2 / total / 2)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("options", [[FP4, FP8, BF16], [FP4, BF16]])
def test_every_objective_holds_them_with_a_row_of_zeros(name, options):
    """A rule too, which would not look; the other linear is judged as if nothing had happened."""
    broken = changed(stats(), NAMES[1], "underflow/fp4/wgrad/input", math.nan)
    found, bad = quality_loss(name, ObjectiveInputs(UP, options, broken))
    assert bad.tolist() == [False, True] and np.all(found[1] == 0.0)
    assert np.array_equal(found[0], quality(name, ObjectiveInputs(UP, options, stats()))[0]) and found[0].any()


@pytest.mark.parametrize("name", MEASURED)
def test_an_objective_gives_nan_for_them_itself(name):
    broken = changed(stats(), NAMES[1], "underflow/fp4/wgrad/input", math.nan)
    found = get_objective(name).compute(ObjectiveInputs(UP, [FP8, FP4], broken))
    assert np.isnan(found[1]).all() and np.isfinite(found[0]).all()


@pytest.mark.parametrize("name", MEASURED)
def test_an_objective_says_what_it_needs(name):
    """Of statistics of the loss divergence alone there are plans by that."""
    inputs = ObjectiveInputs(UP, [FP8, FP4], without_updates(stats()))
    if get_objective(name).needs_operands:
        with pytest.raises(ValueError, match="have no .* without updates; probe with .*megatron-snip probe"):
            quality(name, inputs)
    else:
        assert np.array_equal(quality(name, inputs), quality(name, ObjectiveInputs(UP, [FP8, FP4], stats())))


def test_a_weight_needs_updates():
    inputs = ObjectiveInputs(UP, [FP8, FP4], without_updates(stats()), update_weight=1.0)
    with pytest.raises(ValueError, match="have no update; .* without updates; probe .* --snip-weight above 0"):
        quality("snip", inputs)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_keeps_its_promises(name):
    """Shape, finiteness, zero at the base, and FP4 never cheaper than FP8 on sane statistics."""
    options = [FP8, MIXED, FP4]
    given = stats() if get_objective(name).needs_stats else None
    found = quality(name, ObjectiveInputs(UP, options, given))
    assert found.shape == (2, 3) and np.isfinite(found).all() and np.all(found[:, 0] == 0)
    assert np.all(found[:, 2] > 0) and np.all(found[:, 1] <= found[:, 2])
    assert np.array_equal(found, quality(name, ObjectiveInputs(UP, options, given)))


def test_error_objectives_by_hand():
    """One linear of 8 x 4; errors and norms that differ by operand."""
    errors = {"fprop/input": 4.0, "fprop/weight": 9.0, "dgrad/grad_output": 0.25, "dgrad/weight": 16.0,
              "wgrad/grad_output": 0.36, "wgrad/input": 25.0}  # fmt: skip
    more = {f"error/fp4/{operand}": [value] for operand, value in errors.items()}
    more |= {"norm/X": [100.0], "norm/W": [400.0], "norm/G": [4.0]}
    given = statistics(UP[:1], {"fp4": [0.0]}, [16.0], {"fp4": [1.0]}, more)

    def value(objective: str, given: Statistics, option: LinearPrecision = FP4) -> float:
        return quality(objective, ObjectiveInputs(UP[:1], [BF16, option], given))[0, 1]

    assert value("abs_err", given) == pytest.approx(2 + 3 + 0.5 + 4 + 0.6 + 5)
    assert value("rel_err", given) == pytest.approx(0.2 + 0.15 + 0.25 + 0.2 + 0.3 + 0.5)
    dgrad_alone = LinearPrecision.parse("bf16/fp4/bf16")
    assert value("abs_err", given, dgrad_alone) == pytest.approx(0.5 + 4)
    nothing = changed(given, NAMES[0], "norm/G", 0.0)
    assert value("rel_err", nothing) == pytest.approx(0.2 + 0.15 + 0.2 + 0.5), "no error of what is nothing"


OPTIONS = [FP8, FP4]
SIZES = dict.fromkeys(FIRST_TO_LEAVE, (64, 64)) | {
    "gate": (192, 64),
    "up": (192, 64),
    "down": (64, 192),
}
SHAPES = [
    LinearShape(f"layers.{i}.{kind}", *SIZES[kind], block=i, kind=kind) for i in range(8) for kind in FIRST_TO_LEAVE
]


def kept(objective: str, target: float, seed: int = 0) -> list[LinearShape]:
    """Linears that stay in FP8."""
    costs = quality(objective, ObjectiveInputs(SHAPES, OPTIONS, seed=seed))
    choice = SolveRequest(costs, efficiency(SHAPES, OPTIONS), target, gap=0).solve().choice
    return [shape for shape, option in zip(SHAPES, choice) if option == 0]


def test_layer_id_keeps_the_first_and_last_blocks():
    assert {shape.block for shape in kept("layer_id", 0.75)} == {0, 7}
    assert {shape.block for shape in kept("layer_id", 0.875)} == {7}


def test_by_gemm_a_rule_is_about_fprop():
    options = linear_options(["fp8", "fp4"], "gemm")
    quality, _ = quality_loss("layer_id", ObjectiveInputs(SHAPES, options))
    found = [options[i] for i in SolveRequest(quality, efficiency(SHAPES, options, "fp4"), 0.75).solve().choice]
    assert {(option.dgrad, option.wgrad) for option in found} == {("fp4", "fp4")}
    assert {shape.block for shape, option in zip(SHAPES, found) if option.fprop == "fp4"} == {3, 4}, "a quarter of 8"


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
