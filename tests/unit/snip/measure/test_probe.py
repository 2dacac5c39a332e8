"""The probe against its definition, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_snip.model import attention, llama
from megatron_snip.parallel import tensor
from megatron_snip.parallel.tensor import linears_of_one_input
from megatron_snip.quant import LinearPrecision, RoundingKey, StepContext, fake_quantize, name_stream
from megatron_snip.quant.casts.cast import swiglu_product
from megatron_snip.snip.measure import linear_probe
from megatron_snip.snip.measure.linear_probe import LinearProbe, Sums, names_of_sums
from megatron_snip.snip.measure.probe import Pass, ProbeFailed
from megatron_snip.snip.measure.statistics import Statistics
from tests.unit.snip.conftest import AGE

ITERATION = 3
FORMATS = ("fp4", "fp8")
SEED, SEQUENCE, SAMPLES, CLIP = 3, 128, 2, 0.05


def batch_of(parts):
    return parts.train_loader.batch((ITERATION - 1) * SAMPLES)


def probe(parts) -> tuple[Statistics, Pass]:
    """The statistics, and the pass they come from."""
    batch, passes = batch_of(parts), []

    run_pass = parts.stepper.pass_runner(batch, ITERATION)

    def counted(*how) -> Pass:
        passes.append(run_pass(*how))
        return passes[-1]

    stats = parts.coordinator.probe.run(counted, parts.optimizer.zero_grad, ITERATION)
    assert len(passes) == 1
    return stats, passes[0]


class Seen(NamedTuple):
    """One microbatch of one linear: x [T,K], w [N,K], g [T,N], first row."""

    x: Tensor
    w: Tensor
    g: Tensor
    row0: int


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts()


@pytest.fixture(scope="module")
def probed(parts):
    return probe(parts)


@pytest.mark.parametrize("updates", [True, False])
def test_a_process_without_linears_knows_what_the_others_add_up(updates, parts):
    batch, prober = batch_of(parts), parts.coordinator.probe
    run_pass = parts.stepper.pass_runner(batch, ITERATION)
    found = prober.run(run_pass, parts.optimizer.zero_grad, ITERATION, updates=updates)
    names = names_of_sums(prober.formats, updates=updates)
    assert {name for name in names if not name.startswith("nonzero/")} == set(found.columns)
    assert {name.partition("/")[2] for name in names if name.startswith(("nonzero/", "error/"))} == {
        name.removeprefix("error/") for name in found.columns if name.startswith("error/")
    }


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_token_that_is_not_finite_is_so_on_several_ranks(value, parts, monkeypatch):
    one, name = parts.coordinator.probe, "top_token/fp4"
    monkeypatch.setattr(one, "mesh", dataclasses.replace(one.mesh, world_size=2))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    sums = Sums()
    for each in names_of_sums(one.formats, updates=False):
        sums.add(each, torch.tensor(value if each == name else 1.0))
    probes = dict.fromkeys((shape.name for shape in one.shapes), SimpleNamespace(sums=sums))
    stats = one._reduce(probes, Pass(5.0, 1.0, 1.0), ITERATION, updates=False)
    assert np.isnan(stats.column(name)).all() and (stats.column("token/fp4") == 1.0).all()


@pytest.fixture(scope="module")
def seen(parts):
    """Per linear what each microbatch shows, as torch.autograd.grad tells it, to the bit what a probe sees."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    (stage,) = parts.stages.values()

    def keep(linears, x, context, up=None):
        ys = linears_of_one_input(linears, x, context, up)
        for linear, y in zip(linears, ys, strict=True):
            inputs[linear.name], outputs[linear.name] = (x if up is None else swiglu_product(x, up)).detach(), y
        return ys

    batch = batch_of(parts)
    found: dict[str, list] = {name: [] for name in parts.linears}
    bf16 = LinearPrecision.uniform("bf16")
    context = StepContext(ITERATION, batch.tokens.numel(), bf16)
    for m in range(len(batch.tokens)):
        with ExitStack() as stack:
            for module in (attention, llama, tensor):
                stack.enter_context(mock.patch.object(module, "linears_of_one_input", keep))
            loss = stage(batch.tokens[m], batch.sample_index[m].tolist(), batch.labels[m], context)
        grads = torch.autograd.grad(loss.sum(), list(outputs.values()))
        for name, grad in zip(outputs, grads, strict=True):
            row0 = int(batch.sample_index[m, 0]) * SEQUENCE
            x, w, g = inputs[name].flatten(0, 1), parts.linears[name].weight, grad.float().flatten(0, 1)
            found[name].append(Seen(x, w, g, row0))
    return found


def q(x: Tensor, fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Tensor:
    return fake_quantize(x.detach(), fmt, role=role, dim=dim, key=key).double()


def direct_token_squares(microbatches, fmt: str) -> Tensor:
    """Squares of the token sums [T] of all microbatches."""
    found = []
    for x, w, g, _ in microbatches:
        dy = q(x, fmt, "input", 1) @ q(w, fmt, "weight", 1).T - x.double() @ w.detach().double().T
        found.append((g.double() * dy).sum(dim=1) ** 2)
    return torch.cat(found)


def gradient_and_error(name: str, microbatches, fmt: str) -> tuple[Tensor, Tensor]:
    """The weight's gradient G^T X and E_w = Q(G)^T Q(X) - G^T X, summed over microbatches."""
    gradient = error = 0.0
    for x, _, g, row0 in microbatches:
        key = RoundingKey(SEED, ITERATION, name_stream(name), row0=row0).for_operand("grad_output")
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
    assert stats.names == list(parts.linears) and stats.iteration == ITERATION
    assert stats.tokens == SAMPLES * SEQUENCE and stats.loss == found.loss
    assert stats.formats == list(FORMATS) and stats.finite.all() and (stats.column("norm/G") > 0).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_token_square_sum_is_its_definition(fmt, probed, seen):
    """And so are spread and top token, of the same squares."""
    stats = probed[0]
    columns = [stats.column(f"{kind}/{fmt}") for kind in ("token", "spread", "top_token")]
    for shape, *found in zip(stats.shapes, *columns, strict=True):
        if shape.kind in ("q", "k", "v"):
            continue  # test_block_probe.py
        squares = direct_token_squares(seen[shape.name], fmt)
        expected = [float(value) for value in (squares.sum(), squares.square().sum(), squares.max())]
        assert expected[0] > expected[2] > 0 and found == pytest.approx(expected, rel=1e-3), shape.name
        assert found[0] == pytest.approx(expected[0], rel=1e-4), shape.name


def own_by_hand(
    parts, name: str, microbatches, fmt: str, clip: float, rows: slice = slice(None)
) -> tuple[float, float]:
    """|u(g)|^2 and |u(g + E) - u(g)|^2 over some output channels."""
    m, v = parts.optimizer.moments(f"{name}.weight")
    assert m.abs().max() > 0 and v.max() > 0
    gradient, error = gradient_and_error(name, microbatches, fmt)
    plain, noisy = (adam(clip * g, m, v, AGE + 1)[rows] for g in (gradient, gradient + error))
    return float((plain**2).sum()), float(((noisy - plain) ** 2).sum())


@pytest.mark.parametrize("fmt", FORMATS)
def test_own_is_the_change_of_adams_update(fmt, parts, probed, seen):
    stats, found = probed
    assert 0 < found.clip < 0.9 and found.clip == pytest.approx(CLIP / found.grad_norm, rel=1e-3), "clipping must bite"
    for name, update, own in zip(stats.names, stats.column("update"), stats.column(f"own/{fmt}"), strict=True):
        expected = own_by_hand(parts, name, seen[name], fmt, found.clip)
        assert expected[1] > 0 and (update, own) == pytest.approx(expected, rel=1e-4), name


def test_of_a_large_weight_some_rows_stand_for_all(parts, probed, seen, monkeypatch):
    """Every fourth of 128 output channels, every eighth of 256; the update itself is of all of them."""
    monkeypatch.setattr(linear_probe, "ENOUGH_ROWS", 32)
    stats, found = probe(parts)
    whole = probed[0]
    for shape, own in zip(stats.shapes, stats.column("own/fp4"), strict=True):
        step = shape.out_features // 32
        _, expected = own_by_hand(parts, shape.name, seen[shape.name], "fp4", found.clip, slice(None, None, step))
        assert step > 1 and own == pytest.approx(step * expected, rel=1e-4), shape.name
    assert stats.column("update").tolist() == whole.column("update").tolist()
    assert 0.7 < np.median(stats.column("own/fp4") / whole.column("own/fp4")) < 1.4
    assert stats.column("token/fp4").tolist() == whole.column("token/fp4").tolist()


def assert_close(one: Statistics, other: Statistics, rel: float) -> None:
    assert one.shapes == other.shapes and one.loss == pytest.approx(other.loss, rel=1e-6)
    for column in ("update", *(f"{kind}/{fmt}" for kind in ("token", "own") for fmt in FORMATS)):
        assert one.column(column).tolist() == pytest.approx(other.column(column).tolist(), rel=rel), column


def assert_equal(one: Statistics, other: Statistics) -> None:
    assert one.shapes == other.shapes and one.columns == other.columns and one.loss == other.loss
    assert one.values.tolist() == other.values.tolist()


def test_the_cut_into_microbatches_does_not_matter(snip_parts, parts, probed):
    """From equal weights: two updates of another cut leave others, by a bit, which moves codes at ties by a step."""
    whole = snip_parts(micro_batch_size=2)
    with torch.no_grad():
        for name, tensor in whole.tensors().items():
            tensor.copy_(parts.tensors()[name])
    assert batch_of(whole).tokens.shape[:2] == (1, 2)
    assert_close(probe(whole)[0], probed[0], 1e-4)


def test_several_batches_give_the_mean(parts, probed):
    def later(ahead: int):
        return parts.train_loader.make((ITERATION - 1 + ahead) * SAMPLES)

    run_pass, zero = parts.stepper.pass_runner(batch_of(parts), ITERATION, later), parts.optimizer.zero_grad
    both = parts.coordinator.probe.run(run_pass, zero, ITERATION, 2)
    second = parts.coordinator.probe.run(parts.stepper.pass_runner(later(1), ITERATION), zero, ITERATION)
    assert second.column("token/fp4").tolist() != probed[0].column("token/fp4").tolist()
    assert both.tokens == probed[0].tokens and both.loss == pytest.approx((probed[0].loss + second.loss) / 2)
    assert parts.coordinator.probe.seen == both.tokens, "of the last run"
    means = ((probed[0].values + second.values) / 2).T
    for name, found, mean in zip(both.columns, both.values.T, means, strict=True):
        if name.startswith("spread/"):
            mean = mean / 2  # each token's part of the mean is half of what it is of its batch
        elif name.startswith("top_token/"):
            mean = np.maximum(probed[0].column(name), second.column(name)) / 2
        assert found.tolist() == mean.tolist(), name


def test_a_probe_goes_on_until_there_is_enough(parts, probed):
    asked = []

    def enough(stats: Statistics, tokens: int) -> bool:
        asked.append((stats.tokens, tokens))
        return len(asked) == 2

    def later(ahead: int):
        return parts.train_loader.make((ITERATION - 1 + ahead) * SAMPLES)

    run_pass, zero = parts.stepper.pass_runner(batch_of(parts), ITERATION, later), parts.optimizer.zero_grad
    found = parts.coordinator.probe.run(run_pass, zero, ITERATION, 5, enough=enough)
    assert asked == [(256, 256), (256, 512)] and parts.coordinator.probe.seen == 512
    expected = parts.coordinator.probe.run(run_pass, zero, ITERATION, 2)
    assert found.values.tolist() == expected.values.tolist()
    parts.coordinator.probe.run(run_pass, zero, ITERATION, 1, enough=lambda *_: False)
    assert parts.coordinator.probe.seen == 256, "no more than there are"


def test_recomputation_counts_once(snip_parts, probed):
    assert_equal(probe(snip_parts(recompute_granularity="full"))[0], probed[0])


def test_formats_that_do_not_quantise_are_not_measured(snip_parts):
    stats, _ = probe(snip_parts(snip_options="bf16", snip_target=0.0))
    assert stats.formats == [] and set(stats.columns) == names_of_sums([], updates=True)
    assert (stats.column("update") > 0).all()
    with pytest.raises(ValueError, match="have no token/fp4; measured formats: none, with updates; probe"):
        stats.column("token/fp4")


def state(parts) -> dict[str, object]:
    """What a probe must leave alone."""
    tensors = {name: tensor.clone() for name, tensor in parts.tensors().items()}
    plain = {name: (linear.precision, linear.impl) for name, linear in parts.linears.items()}
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
    assert before["grads"] == []


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory\nwith a long tail")


@pytest.mark.parametrize("where", ["__init__", "measure", "add_updates"])
def test_a_probe_that_fails_leaves_no_trace_either(where, parts, monkeypatch):
    before, run_pass = state(parts), parts.stepper.pass_runner(batch_of(parts), ITERATION)
    monkeypatch.setattr(LinearProbe, where, fail)
    with pytest.raises(ProbeFailed, match=r"^the probe failed on rank 0: RuntimeError: out of memory$"):
        parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, ITERATION)
    assert_same(before, state(parts))


def test_an_error_in_the_models_own_pass_is_that_of_any_iteration(parts):
    before, run_pass = state(parts), parts.stepper.pass_runner(batch_of(parts), ITERATION)

    def failing(*how) -> Pass:
        run_pass(*how)
        raise RuntimeError("a broken GPU")

    with pytest.raises(RuntimeError, match="^a broken GPU$"):
        parts.coordinator.probe.run(failing, parts.optimizer.zero_grad, ITERATION)
    assert_same(before, state(parts))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails(loss, parts):
    run_pass = parts.stepper.pass_runner(batch_of(parts), ITERATION)

    def failing(*how) -> Pass:
        return dataclasses.replace(run_pass(*how), loss=loss)

    with pytest.raises(ProbeFailed, match=f"rank 0: the loss is {loss}"):
        parts.coordinator.probe.run(failing, parts.optimizer.zero_grad, ITERATION)


def test_what_is_not_finite_is_found_where_it_is(parts, monkeypatch):
    """An infinity in one weight's gradient error stays with its linear."""
    name, add = "layers.0.mlp.up_proj", LinearProbe.add_updates

    def poisoned(self: LinearProbe, *how) -> None:
        if self.shape.name == name:
            self.weight_error["fp4"][3, 4] = math.inf
        add(self, *how)

    monkeypatch.setattr(LinearProbe, "add_updates", poisoned)
    stats, _ = probe(parts)
    assert stats.not_finite == (name,) and math.isnan(stats.column("own/fp4")[stats.names.index(name)])
    assert math.isfinite(stats.column("own/fp8")[stats.names.index(name)])


def test_norms_errors_and_lost_elements_are_their_definitions(probed, seen):
    stats = probed[0]
    for row, name in enumerate(stats.names):
        microbatches, w = seen[name], seen[name][0].w
        found = {column: stats.column(column)[row] for column in stats.columns}
        lost = sum(int(((q(m.x, "fp4", "input", 0) == 0) & (m.x != 0)).sum()) for m in microbatches)
        expected = {
            "norm/X": sum(float(m.x.double().square().sum()) for m in microbatches),
            "norm/W": float(w.detach().double().square().sum()),
            "norm/G": sum(float(m.g.double().square().sum()) for m in microbatches),
            "error/fp4/fprop/input": sum(
                float((q(m.x, "fp4", "input", 1) - m.x.double()).square().sum()) for m in microbatches
            ),
            "error/fp8/dgrad/weight": float((q(w, "fp8", "weight", 0) - w.detach().double()).square().sum()),
            "underflow/fp4/wgrad/input": lost / sum(int((m.x != 0).sum()) for m in microbatches),
        }
        assert {column: found[column] for column in expected} == pytest.approx(expected, rel=1e-4), name
        for gemm, dim in (("dgrad", 1), ("wgrad", 0)):
            error = 0.0
            for m in microbatches:
                key = RoundingKey(SEED, ITERATION, name_stream(name), row0=m.row0).for_operand("grad_output")
                error += float((q(m.g, "fp4", "grad_output", dim, key) - m.g.double()).square().sum())
            assert found[f"error/fp4/{gemm}/grad_output"] == pytest.approx(error, rel=1e-3), (name, gemm)
        assert {value for column, value in found.items() if column.startswith("saturated/")} == {0.0}
