"""The statistics pass against its definition, and that it leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import LinearPrecision, RoundingKey, fake_quantize, name_stream
from megatron_snip.snip.probes import AdamSettings, Pass, adam_update
from megatron_snip.snip.stats import ProbeStats

ITERATION = 3
FORMATS = ("fp4", "fp8")
SEED, SEQUENCE, SAMPLES, CLIP = 3, 128, 2, 0.05


def batch_of(parts):
    return parts.train_loader.batch((ITERATION - 1) * SAMPLES)


def probe(parts) -> tuple[ProbeStats, Pass]:
    """The statistics, and the pass they come from."""
    batch, passes = batch_of(parts), []

    def gradients() -> Pass:
        passes.append(parts.stepper.gradients(batch, ITERATION)[0])
        return passes[-1]

    stats = parts.coordinator.probe.run(gradients, parts.optimizer.zero_grad, ITERATION)
    assert len(passes) == 1
    return stats, passes[0]


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts()


@pytest.fixture(scope="module")
def probed(parts):
    return probe(parts)


@pytest.fixture(scope="module")
def seen(parts):
    """Per linear the (x, w, g, first row) of each microbatch, by hooks and torch.autograd.grad, in float32."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    (stage,) = parts.stages.values()
    before = {name: linear.precision for name, linear in parts.linears.items()}
    hooks = []
    for name, linear in parts.linears.items():
        linear.precision = LinearPrecision.uniform("bf16")

        def keep(module, args, output, name=name):
            inputs[name], outputs[name] = args[0].detach(), output

        hooks.append(linear.register_forward_hook(keep))
    batch = batch_of(parts)
    found: dict[str, list] = {name: [] for name in parts.linears}
    stage.iteration = ITERATION
    for m in range(len(batch.tokens)):
        loss = stage(batch.tokens[m], batch.sample_index[m], batch.labels[m])
        grads = torch.autograd.grad(loss.sum(), list(outputs.values()))
        for name, grad in zip(outputs, grads, strict=True):
            row0 = int(batch.sample_index[m, 0]) * SEQUENCE
            found[name].append((inputs[name].flatten(0, 1), parts.linears[name].weight, grad.flatten(0, 1), row0))
    for hook in hooks:
        hook.remove()
    for name, linear in parts.linears.items():
        linear.precision = before[name]
    return found


def q(x: Tensor, fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Tensor:
    return fake_quantize(x.detach(), fmt, role=role, dim=dim, key=key).double()


def direct_token_square_sum(microbatches, fmt: str) -> float:
    total = 0.0
    for x, w, g, _ in microbatches:
        dy = q(x, fmt, "input", 1) @ q(w, fmt, "weight", 1).T - x.double() @ w.detach().double().T
        total += float(((g.double() * dy).sum(dim=1) ** 2).sum())
    return total


def gradient_and_error(name: str, microbatches, fmt: str) -> tuple[Tensor, Tensor]:
    """The weight's gradient G^T X and E_w = Q(G)^T Q(X) - G^T X, summed over microbatches."""
    gradient = error = 0.0
    for x, _, g, row0 in microbatches:
        key = RoundingKey(SEED, ITERATION, name_stream(name), row0=row0).for_operand("wgrad", "grad_output")
        exact = g.double().T @ x.double()
        gradient = gradient + exact
        error = error + q(g, fmt, "grad_output", 0, key).T @ q(x, fmt, "input", 0) - exact
    return gradient, error


def adam(gradient: Tensor, m: Tensor, v: Tensor, t: int) -> Tensor:
    """AdamW's update with this run's constants, from the definition."""
    m, v = 0.9 * m.double() + 0.1 * gradient, 0.999 * v.double() + 0.001 * gradient**2
    return (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def test_the_probe_sees_every_linear(parts, probed):
    stats, found = probed
    assert list(stats.linears) == list(parts.linears) and stats.iteration == ITERATION
    assert stats.tokens == SAMPLES * SEQUENCE and stats.loss == found.loss
    for linear in stats.linears.values():
        assert sorted(linear.token_square_sum) == sorted(linear.own_sq) == list(FORMATS)


@pytest.mark.parametrize("fmt", FORMATS)
def test_token_square_sum_is_its_definition(fmt, probed, seen):
    for name, linear in probed[0].linears.items():
        expected = direct_token_square_sum(seen[name], fmt)
        assert expected > 0 and linear.token_square_sum[fmt] == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize("fmt", FORMATS)
def test_own_is_the_change_of_adams_update(fmt, parts, probed, seen):
    stats, found = probed
    assert 0 < found.clip < 0.9 and found.clip == pytest.approx(CLIP / found.grad_norm, rel=1e-3), "clipping must bite"
    for name, linear in stats.linears.items():
        m, v = parts.optimizer.moments(f"{name}.weight")
        assert m.abs().max() > 0 and v.max() > 0
        gradient, error = gradient_and_error(name, seen[name], fmt)
        plain = adam(found.clip * gradient, m, v, 3)
        noisy = adam(found.clip * (gradient + error), m, v, 3)
        assert linear.update_norm_sq == pytest.approx(float((plain**2).sum()), rel=1e-3), name
        assert linear.own_sq[fmt] == pytest.approx(float(((noisy - plain) ** 2).sum()), rel=1e-3), name


def test_adams_update_is_what_the_optimiser_does(parts):
    """The weight moves by -lr u(clip g), up to decay."""
    name = "layers.1.mlp.up_proj.weight"
    found, _ = parts.stepper.gradients(batch_of(parts), ITERATION)
    weight = parts.optimizer.parameters[name]
    m, v = (moment.clone() for moment in parts.optimizer.moments(name))
    gradient = parts.optimizer.gradient(name) * found.clip
    update = adam_update(gradient, m, v, 3, AdamSettings(0.9, 0.999, 1e-8, CLIP))
    twin = torch.nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.AdamW([twin], lr=0.5, weight_decay=0.0)
    optimizer.state[twin] = {"exp_avg": m, "exp_avg_sq": v, "step": torch.tensor(2.0)}
    twin.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close((weight.detach() - twin.detach()) / 0.5, update, rtol=1e-4, atol=1e-5)
    parts.optimizer.zero_grad()


def assert_close(one: ProbeStats, other: ProbeStats, rel: float) -> None:
    assert one.linears.keys() == other.linears.keys() and one.loss == pytest.approx(other.loss, rel=1e-6)
    for name, linear in one.linears.items():
        assert linear.update_norm_sq == pytest.approx(other.linears[name].update_norm_sq, rel=rel), name
        for kind in ("token_square_sum", "own_sq"):
            assert getattr(linear, kind) == pytest.approx(getattr(other.linears[name], kind), rel=rel), (name, kind)


def test_the_cut_into_microbatches_does_not_matter(snip_parts, probed):
    """A product over more rows sums in another order, which may move a code at a tie by a step: hence 0.5%."""
    whole = snip_parts(micro_batch_size=2)
    assert batch_of(whole).tokens.shape[:2] == (1, 2)
    assert_close(probe(whole)[0], probed[0], 5e-3)


def test_recomputation_counts_once(snip_parts, probed):
    assert probe(snip_parts(recompute_granularity="full"))[0] == probed[0]


def test_formats_that_do_not_quantise_are_not_measured(snip_parts):
    stats, _ = probe(snip_parts(snip_options="bf16", snip_target=0.0))
    assert {str(linear.token_square_sum) + str(linear.own_sq) for linear in stats.linears.values()} == {"{}{}"}
    assert all(linear.update_norm_sq > 0 for linear in stats.linears.values())


def state(parts) -> dict[str, object]:
    """What a probe must leave alone."""
    tensors = {name: tensor.clone() for name, tensor in parts.tensors().items()}
    plain = {name: (linear.precision, linear.observer) for name, linear in parts.linears.items()}
    grads = [name for name, p in parts.optimizer.parameters.items() if p.grad is not None]
    return {**tensors, "linears": plain, "steps": parts.optimizer.steps, "grads": grads, "rng": torch.get_rng_state()}


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def test_a_probe_leaves_no_trace(parts):
    for i, linear in enumerate(parts.linears.values()):
        linear.precision = LinearPrecision.parse(["fp4", "fp8/fp4/bf16"][i % 2])
    before = state(parts)
    probe(parts)
    assert_same(before, state(parts))
    assert before["grads"] == [] and all(linear.observer is None for linear in parts.linears.values())


def test_a_probe_that_fails_leaves_no_trace_either(parts):
    before = state(parts)

    def fail() -> Pass:
        parts.stepper.gradients(batch_of(parts), ITERATION)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        parts.coordinator.probe.run(fail, parts.optimizer.zero_grad, ITERATION)
    assert_same(before, state(parts))


def test_what_is_not_finite_is_found_where_it_is(parts):
    """A NaN in one weight's gradient error stays with its linear."""
    probes = {}

    def gradients() -> Pass:
        result, _ = parts.stepper.gradients(batch_of(parts), ITERATION)
        probes.update({name: linear.observer for name, linear in parts.linears.items()})
        probes["layers.0.mlp.up_proj"].weight_error["fp4"][3, 4] = math.inf
        return result

    stats = parts.coordinator.probe.run(gradients, parts.optimizer.zero_grad, ITERATION)
    linears = stats.linears.items()
    bad = {(name, fmt) for name, linear in linears for fmt in FORMATS if not math.isfinite(linear.own_sq[fmt])}
    assert bad == {("layers.0.mlp.up_proj", "fp4")}
    assert math.isnan(stats.linears["layers.0.mlp.up_proj"].own_sq["fp4"])
