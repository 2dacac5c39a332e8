"""The step runner's forward in BF16: what it gives, and that nothing of it is left."""

from __future__ import annotations

import pytest

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
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
