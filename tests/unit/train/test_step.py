"""The step runner: what an iteration casts, and its forward in BF16."""

from __future__ import annotations

import pytest

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.kernels import op
from megatron_snip.train import step
from megatron_snip.train.setup import build, check


@pytest.fixture
def parts(lone_mesh, tiny):
    config, plan = check(Config().replace(**{**tiny, "precision": "fp4/fp8/fp4"}), 1)
    made = build(config, runtime.start("gloo", 1.0), plan)
    yield made
    made.train_loader.close()


def test_the_loss_in_bf16(parts):
    batch = parts.train_loader.batch(0)
    low, plain = parts.stepper.evaluate(batch, 1), parts.stepper.bf16_loss(batch, 1)
    assert low != plain and parts.stepper.evaluate(batch, 1) == low
    for linear in parts.linears.values():
        linear.precision = LinearPrecision.uniform("bf16")
    assert parts.stepper.evaluate(batch, 1) == plain


def test_the_loss_is_read_after_the_norms_kernels_are_queued(parts, monkeypatch):
    """A GPU has nothing to do from the moment that the host has read the loss."""
    run, norm, order = parts.stepper.pipeline.forward_backward, step.gradient_square_sum, []

    def watched(*args):
        read = run(*args)
        return lambda: order.append("loss") or read()

    monkeypatch.setattr(parts.stepper.pipeline, "forward_backward", watched)
    monkeypatch.setattr(step, "gradient_square_sum", lambda *args: order.append("norm") or norm(*args))
    found, _ = parts.stepper.gradients(parts.train_loader.batch(0), 1)
    assert order == ["norm", "loss"] and found.loss > 0 < found.grad_norm


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_left(breaks, parts, monkeypatch):
    before = {name: linear.precision for name, linear in parts.linears.items()}
    if breaks:
        evaluate = parts.stepper.evaluate
        monkeypatch.setattr(parts.stepper, "evaluate", lambda *args: evaluate(*args) and [][0])
        with pytest.raises(IndexError):
            parts.stepper.bf16_loss(parts.train_loader.batch(0), 1)
    else:
        parts.stepper.bf16_loss(parts.train_loader.batch(0), 1)
    assert {name: linear.precision for name, linear in parts.linears.items()} == before
    assert all(not linear.weight_casts._made for linear in parts.linears.values()), "copies of all weights"
    assert all(p.grad is None for p in parts.optimizer.parameters.values())


def test_an_iteration_casts_each_weight_once_and_each_input_once_a_microbatch(lone_mesh, tiny, monkeypatch):
    """Two microbatches; q, k, v share their input, as gate and up do.  The next iteration casts the new weights."""
    config, plan = check(Config().replace(**{**tiny, "precision": "fp8"}), 1)
    parts = build(config, runtime.start("gloo", 1.0), plan)
    real, seen = op.run, []
    monkeypatch.setattr(
        op, "run", lambda x, forms, *rest, **more: seen.append(forms[0].role) or real(x, forms, *rest, **more)
    )
    for iteration in (1, 2):
        seen.clear()
        assert not parts.stepper.step(parts.train_loader.batch(0), iteration).skipped
        assert {role: seen.count(role) for role in seen} == {"weight": 7, "input": 2 * 4, "grad_output": 2 * 7}
        assert not any(linear.weight_casts._made for linear in parts.linears.values())
    parts.train_loader.close()
