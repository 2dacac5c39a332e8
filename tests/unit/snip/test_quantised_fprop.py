"""The pass with every fprop quantised: the change of all updates, and what a NaN in one linear does to it."""

from __future__ import annotations

import math

import pytest

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.divergence import non_finite_linears, update_change_by_nat
from megatron_snip.snip.probes import Pass
from tests.unit.snip.test_probes import ITERATION, adam, batch_of

BF16 = LinearPrecision.uniform("bf16")


@pytest.fixture
def parts(snip_parts):
    return snip_parts()


def test_quantised_fprop_sees_the_change_of_all_updates(parts):
    """By hand: the gradients with every fprop in the format of fewest bits, dgrad and wgrad in BF16."""
    measured = parts.coordinator.probe
    batch, before = batch_of(parts), {name: linear.precision for name, linear in parts.linears.items()}
    run_pass, zero_grad = parts.stepper.pass_runner(batch, ITERATION), parts.optimizer.zero_grad
    stats = measured.run(run_pass, zero_grad, ITERATION, ("quantised_fprop",))
    assert {name: linear.precision for name, linear in parts.linears.items()} == before
    gradients, clips = [], []
    for precision in (BF16, LinearPrecision("fp4", "bf16", "bf16")):
        for linear in parts.linears.values():
            linear.precision = precision
        clips.append(parts.stepper.gradients(batch, ITERATION)[0].clip)
        gradients.append({name: parts.optimizer.gradient(f"{name}.weight").double() for name in parts.linears})
        zero_grad()
    for name, linear in stats.linears.items():
        m, v = parts.optimizer.moments(f"{name}.weight")
        plain, quantised = (adam(clips[0] * grads[name], m, v, ITERATION) for grads in gradients)
        expected = float((quantised - plain).square().sum())
        assert expected > 0 and linear.fprop_update_sq == {"fp4": pytest.approx(expected, rel=1e-2)}, name
    assert stats.has("quantised_fprop") and not stats.has("backward_noise")


def test_a_linear_with_a_nan_stays_in_bf16_and_leaves_the_others_alone(parts):
    name = "layers.1.self_attn.k_proj"
    linear, run_pass = parts.linears[name], parts.stepper.pass_runner(batch_of(parts), ITERATION)
    plain, made = linear._local_linear, []

    def spoilt(*args: object) -> object:
        return plain(*args) * (math.nan if linear.precision.fprop == "fp4" else 1.0)

    def run(*how: object) -> Pass:
        made.append(run_pass(*how))
        if len(made) == 1:
            linear.observer.token_sums["fp4"][0][5] = math.nan
        return made[-1]

    linear._local_linear = spoilt
    stats = parts.coordinator.probe.run(run, parts.optimizer.zero_grad, ITERATION, ("quantised_fprop",))
    assert len(made) == 2 and all(math.isfinite(result.grad_norm) for result in made)
    assert non_finite_linears(stats, list(stats.linears)) == (name,)
    others = [other for other in stats.linears if other != name]
    nats = stats.tokens / 2 * sum(stats.linears[other].token_square_sum["fp4"] for other in others)
    change = sum(linear.fprop_update_sq["fp4"] for linear in stats.linears.values())
    assert update_change_by_nat(stats) == pytest.approx(change / nats) and change > 0


def test_a_nan_that_nobody_saw_before_is_told(parts):
    linear, run_pass = parts.linears["layers.1.self_attn.k_proj"], parts.stepper.pass_runner(batch_of(parts), ITERATION)
    plain = linear._local_linear
    linear._local_linear = lambda *args: plain(*args) * (math.nan if linear.precision.fprop == "fp4" else 1.0)
    stats = parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, ITERATION, ("quantised_fprop",))
    assert non_finite_linears(stats, list(stats.linears)) == ()
    with pytest.raises(ValueError, match="every update with quantised fprop is NaN .*; plan by --snip-objective"):
        update_change_by_nat(stats)
