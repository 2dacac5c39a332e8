"""The statistics pass against its definition, and that it leaves no trace."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import LinearPrecision, RoundingKey, fake_quantize, name_stream
from megatron_snip.snip.objectives import get_objective
from megatron_snip.snip.probes import Pass
from megatron_snip.snip.stats import ProbeStats

ITERATION = 3
FORMATS = ("fp4", "fp8")
SEED, SEQUENCE, SAMPLES, CLIP = 3, 128, 2, 0.05


def batch_of(parts):
    return parts.train_loader.batch((ITERATION - 1) * SAMPLES)


def probe(parts) -> tuple[ProbeStats, Pass]:
    """The statistics, and the pass they come from."""
    batch, passes = batch_of(parts), []

    run_pass = parts.stepper.pass_runner(batch, ITERATION)

    def counted(*how: object) -> Pass:
        passes.append(run_pass(*how))
        return passes[-1]

    stats = parts.coordinator.probe.run(counted, parts.optimizer.zero_grad, ITERATION)
    assert len(passes) == 2
    return stats, passes[0]


class Seen(NamedTuple):
    """One microbatch of one linear: x [T,K], w [N,K], g [T,N], first row, a / rms(h) [T,H] of its half's norm, y."""

    x: Tensor
    w: Tensor
    g: Tensor
    row0: int
    to_residual: Tensor
    y: Tensor


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts()


@pytest.fixture(scope="module")
def probed(parts):
    return probe(parts)


@pytest.fixture(scope="module")
def seen(parts):
    """Per linear what each microbatch shows, by hooks and torch.autograd.grad, in float32."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    (stage,) = parts.stages.values()
    before = {name: linear.precision for name, linear in parts.linears.items()}
    hooks = []
    norms: dict[str, Tensor] = {}
    for index, block in stage.blocks().items():
        for half, norm in (("self_attn", block.input_layernorm), ("mlp", block.post_attention_layernorm)):

            def keep_norm(module, args, key=f"layers.{index}.{half}"):
                h = args[0].detach().double().flatten(0, 1)
                norms[key] = module.weight.detach().double() / (h.square().mean(1, keepdim=True) + 1e-5).sqrt()

            hooks.append(norm.register_forward_pre_hook(keep_norm))
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
            x, w, g = inputs[name].flatten(0, 1), parts.linears[name].weight, grad.flatten(0, 1)
            found[name].append(Seen(x, w, g, row0, norms[name.rpartition(".")[0]], outputs[name].detach()))
    for hook in hooks:
        hook.remove()
    for name, linear in parts.linears.items():
        linear.precision = before[name]
    return found


def q(x: Tensor, fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Tensor:
    return fake_quantize(x.detach(), fmt, role=role, dim=dim, key=key).double()


def direct_token_square_sum(microbatches, fmt: str) -> float:
    total = 0.0
    for x, w, g, *_ in microbatches:
        dy = q(x, fmt, "input", 1) @ q(w, fmt, "weight", 1).T - x.double() @ w.detach().double().T
        total += float(((g.double() * dy).sum(dim=1) ** 2).sum())
    return total


def gradient_and_error(name: str, microbatches, fmt: str) -> tuple[Tensor, Tensor]:
    """The weight's gradient G^T X and E_w = Q(G)^T Q(X) - G^T X, summed over microbatches."""
    gradient = error = 0.0
    for x, _, g, row0, *_ in microbatches:
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
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            continue  # test_attention_probe.py
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
    plain = {name: (linear.precision, linear.impl, linear.observer) for name, linear in parts.linears.items()}
    grads = [name for name, p in parts.optimizer.parameters.items() if p.grad is not None]
    wide = parts.coordinator.probe.region.wide
    others = {"linears": plain, "steps": parts.optimizer.steps, "grads": grads, "rng": torch.get_rng_state()}
    return {**tensors, **others, "wide": wide}


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


@pytest.mark.parametrize("failing", [1, 2, 3], ids=["statistics", "backward noise", "quantised fprop"])
def test_a_probe_that_fails_leaves_no_trace_either(failing, parts):
    before, made = state(parts), []
    run_pass = parts.stepper.pass_runner(batch_of(parts), ITERATION)

    def fail(*how: object) -> Pass:
        made.append(run_pass(*how))
        if len(made) == failing:
            raise RuntimeError("out of memory")
        return made[-1]

    with pytest.raises(RuntimeError, match="out of memory"):
        parts.coordinator.probe.run(fail, parts.optimizer.zero_grad, ITERATION, get_objective("snip").passes)
    assert_same(before, state(parts))


def test_what_is_not_finite_is_found_where_it_is(parts):
    """A NaN in one weight's gradient error stays with its linear."""
    probes = {}

    def run_pass(kind: str | None = None, scale: float = 0.0, draw: int = 0) -> Pass:
        if kind is not None:
            return parts.stepper.pass_runner(batch_of(parts), ITERATION)(kind, scale, draw)
        result, _ = parts.stepper.gradients(batch_of(parts), ITERATION)
        probes.update({name: linear.observer for name, linear in parts.linears.items()})
        probes["layers.0.mlp.up_proj"].weight_error["fp4"][3, 4] = math.inf
        return result

    stats = parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, ITERATION)
    linears = stats.linears.items()
    bad = {(name, fmt) for name, linear in linears for fmt in FORMATS if not math.isfinite(linear.own_sq[fmt])}
    assert bad == {("layers.0.mlp.up_proj", "fp4")}
    assert math.isnan(stats.linears["layers.0.mlp.up_proj"].own_sq["fp4"])


def test_norms_errors_and_lost_elements_are_their_definitions(probed, seen):
    for name, linear in probed[0].linears.items():
        microbatches = seen[name]
        expected = {
            "X": sum(float(m.x.double().square().sum()) for m in microbatches),
            "W": float(microbatches[0].w.detach().double().square().sum()),
            "Y": sum(float(m.y.double().square().sum()) for m in microbatches),
            "G": sum(float(m.g.double().square().sum()) for m in microbatches),
            "dX": sum(float((m.g.double() @ m.w.detach().double()).square().sum()) for m in microbatches),
            "dW": float(sum(m.g.double().T @ m.x.double() for m in microbatches).square().sum()),
        }
        assert linear.norm_sq == pytest.approx(expected, rel=1e-3), name
        error = sum(float((q(m.x, "fp4", "input", 1) - m.x.double()).square().sum()) for m in microbatches)
        assert linear.error_sq["fp4/fprop/input"] == pytest.approx(error, rel=1e-3), name
        w = microbatches[0].w
        error = float((q(w, "fp8", "weight", 1) - w.detach().double()).square().sum())
        assert linear.error_sq["fp8/dgrad/weight"] == pytest.approx(error, rel=1e-3), name
        lost = sum(int(((q(m.x, "fp4", "input", 0) == 0) & (m.x != 0)).sum()) for m in microbatches)
        assert linear.underflow["fp4/wgrad/input"] == pytest.approx(
            lost / sum(int((m.x != 0).sum()) for m in microbatches), abs=1e-5
        )
        assert set(linear.saturated.values()) == {0.0}


@pytest.mark.parametrize("fmt", FORMATS)
def test_dgrads_error_is_its_definition_in_the_residual_stream(fmt, probed, seen):
    for name, linear in probed[0].linears.items():
        signal = error = 0.0
        for m in seen[name]:
            key = RoundingKey(SEED, ITERATION, name_stream(name), row0=m.row0).for_operand("dgrad", "grad_output")
            exact = m.g.double() @ m.w.detach().double()
            wrong = q(m.g, fmt, "grad_output", 1, key) @ q(m.w, fmt, "weight", 0) - exact
            if name.rpartition(".")[2] not in ("o_proj", "down_proj"):
                exact, wrong = exact * m.to_residual, wrong * m.to_residual
            signal, error = signal + float(exact.square().sum()), error + float(wrong.square().sum())
        assert linear.dgrad_signal_sq == pytest.approx(signal, rel=1e-3), name
        assert linear.dgrad_error_sq[fmt] == pytest.approx(error, rel=1e-3), name


@pytest.fixture
def unquantised(parts):
    """All linears in bf16, as a probe has them."""
    before = {name: linear.precision for name, linear in parts.linears.items()}
    for linear in parts.linears.values():
        linear.precision = LinearPrecision.uniform("bf16")
    yield
    for name, linear in parts.linears.items():
        linear.precision = before[name]


def gradients_of(parts, kind: str, scale: float, draw: int = 0) -> dict[str, Tensor]:
    parts.stepper.pass_runner(batch_of(parts), ITERATION)(kind, scale, draw)
    found = {name: p.grad.clone() for name, p in parts.optimizer.parameters.items() if p.grad is not None}
    parts.optimizer.zero_grad()
    return found


def test_backward_noise_is_linear_in_its_scale_and_keyed_by_its_draw(parts, unquantised):
    """NUMERICS: gradients scale with sigma to 1%.  Here they are the noise's own, so to float32."""
    one, ten, other = (gradients_of(parts, "backward_noise", *how) for how in ((1e-3,), (1e-2,), (1e-3, 1)))
    assert "layers.0.self_attn.q_proj.weight" in one and "norm.weight" not in one
    for name, grad in one.items():
        torch.testing.assert_close(ten[name], 10 * grad, rtol=1e-3, atol=float(grad.abs().max()) * 1e-4)
        assert float((other[name] - grad).norm()) > 0.5 * float(grad.norm()), name


def test_backward_noise_sees_the_change_of_all_updates(parts, probed, unquantised):
    """By hand: u(g + D) - u(g) of the clipped gradients, and |D| in the residual stream before each half."""
    stats, found = probed
    batch = batch_of(parts)
    last = stats.linears["layers.1.mlp.down_proj"].norm_sq["G"]
    scale = 0.1 * math.sqrt(last / (SAMPLES * SEQUENCE * 128))
    assert stats.noise_sq["backward_noise"] == pytest.approx(0.01 * last, rel=1e-3)
    parts.stepper.gradients(batch, ITERATION)
    grads = {name: parts.optimizer.gradient(f"{name}.weight").clone() for name in stats.linears}
    parts.optimizer.zero_grad()
    (stage,) = parts.stages.values()
    squares: dict[str, float] = {}
    hooks = []
    for index, block in stage.blocks().items():
        for half, norm in (("self_attn", block.input_layernorm), ("mlp", block.post_attention_layernorm)):

            def watch(module, args, key=f"layers.{index}.{half}"):
                def add(grad: Tensor) -> None:
                    squares[key] = squares.get(key, 0.0) + float(grad.double().square().sum())

                args[0].register_hook(add)

            hooks.append(norm.register_forward_pre_hook(watch))
    noise = gradients_of(parts, "backward_noise", scale)
    for hook in hooks:
        hook.remove()
    for name, linear in stats.linears.items():
        m, v = parts.optimizer.moments(f"{name}.weight")
        plain = adam(found.clip * grads[name].double(), m, v, 3)
        noisy = adam(found.clip * (grads[name].double() + noise[f"{name}.weight"].double()), m, v, 3)
        assert linear.noise_update_sq == pytest.approx(float((noisy - plain).square().sum()), rel=1e-2), name
        assert linear.residual_noise_sq == pytest.approx(squares[name.rpartition(".")[0]], rel=1e-2), name


def test_sampled_labels_come_from_the_models_own_distribution(parts, unquantised):
    """Their cross entropy is the model's entropy in the mean, and each draw is another one."""
    run = parts.stepper.pass_runner(batch_of(parts), ITERATION)
    losses = [run("sampled_labels", 0.0, draw).loss for draw in range(8)]
    parts.optimizer.zero_grad()
    (stage,) = parts.stages.values()
    batch, entropies = batch_of(parts), []
    with torch.no_grad():
        for tokens, index in zip(batch.tokens, batch.sample_index, strict=True):
            log = stage.logits(stage.hidden(tokens, index)).double().log_softmax(-1)
            entropies.append(float(-(log.exp() * log).sum(-1).mean()))
    assert len(set(losses)) == 8
    mean, spread = sum(losses) / 8, max(losses) - min(losses)
    assert abs(mean - sum(entropies) / len(entropies)) < spread


def test_other_passes_are_made_where_asked_for(parts):
    run = parts.stepper.pass_runner(batch_of(parts), ITERATION)
    asked: list[tuple] = []

    def counted(*how) -> Pass:
        asked.append(how)
        return run(*how)

    stats = parts.coordinator.probe.run(
        counted, parts.optimizer.zero_grad, ITERATION, ("forward_noise", "backward_noise", "sampled_labels"), 3
    )
    kinds = [how[0] if how else None for how in asked]
    assert kinds == [None, *["backward_noise"] * 3, *["forward_noise"] * 3, "sampled_labels"]
    assert [how[2] for how in asked[1:4]] == [0, 1, 2]
    for linear in stats.linears.values():
        assert linear.sampled_square_sum["fp4"] > 0 and linear.forward_update_sq > 0
        assert linear.sampled_square_sum["fp4"] != linear.token_square_sum["fp4"]
