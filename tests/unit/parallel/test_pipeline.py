"""Running a batch with one stage: microbatches add up, evaluation leaves nothing behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.train.setup import build, check

OPTIONS = {
    "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "seq_length": 128,
    "vocab_size": 128, "global_batch_size": 4, "train_iters": 4, "mock_data": True,
}  # fmt: skip


@pytest.fixture
def parts(lone_mesh):
    def make(**options):
        config, plan = check(Config().replace(**OPTIONS, **options), 1)
        return build(config, runtime.start("gloo", 1.0), plan)

    return make


def gradients(one) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in one.optimizer.parameters.items()}


def test_the_loss_is_the_mean_over_all_tokens(parts):
    one = parts(micro_batch_size=2)
    batch = one.train_loader.batch(0)
    loss = one.stepper.pipeline.forward_backward(batch, 1)()
    (stage,) = one.stages.values()
    with torch.no_grad():
        logits = torch.cat(
            [stage.logits(stage.hidden(t, i)) for t, i in zip(batch.tokens, batch.sample_index.tolist())]
        )
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_gradients_do_not_depend_on_the_cut_into_microbatches(parts):
    seen = []
    for size in (1, 2, 4):
        one = parts(micro_batch_size=size)
        one.stepper.pipeline.forward_backward(one.train_loader.batch(0), 1)
        seen.append(gradients(one))
    for name, grad in seen[0].items():
        for other in seen[1:]:
            assert (grad - other[name]).abs().max() <= 2e-5 * grad.abs().max(), name


def test_gradients_are_added_to_what_is_there(parts):
    one = parts()
    batch = one.train_loader.batch(0)
    one.stepper.pipeline.forward_backward(batch, 1)
    once = gradients(one)
    one.stepper.pipeline.forward_backward(batch, 1)
    for name, grad in gradients(one).items():
        torch.testing.assert_close(grad, 2 * once[name], rtol=1e-4, atol=1e-7)


def test_evaluation_is_the_same_loss_and_leaves_no_gradient(parts):
    one = parts()
    batch = one.train_loader.batch(0)
    loss = one.stepper.pipeline.evaluate(batch, 1)
    assert all(p.grad is None for p in one.optimizer.parameters.values())
    assert loss == one.stepper.pipeline.forward_backward(batch, 1)()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_pass_ends_with_what_it_cast_of_the_weights(breaks, parts, monkeypatch):
    """The weights may change after it, and nobody else is told of it."""
    one = parts(precision="fp8")
    (stage,) = one.stages.values()
    batch, kept = one.train_loader.batch(0), []

    def looked_at(*given):
        kept.append(sum(bool(linear.weight_casts._made) for linear in stage.linears().values()))
        if breaks:
            raise RuntimeError("broken")

    stage.norm.register_forward_hook(looked_at)
    for run in (one.stepper.pipeline.forward_backward, one.stepper.pipeline.evaluate):
        with pytest.raises(RuntimeError, match="broken") if breaks else contextlib.nullcontext():
            run(batch, 1)
        assert kept[0] == kept[-1] == 7 and not any(linear.weight_casts._made for linear in stage.linears().values())


def test_the_iteration_reaches_the_random_bits(parts):
    """FP4 rounds output gradients by iteration, so another iteration gives other gradients and no other loss."""
    one = parts(precision="fp4")
    batch = one.train_loader.batch(0)
    losses, seen = [], []
    for iteration in (1, 1, 2):
        losses.append(one.stepper.pipeline.forward_backward(batch, iteration)())
        seen.append(gradients(one)["layers.0.mlp.up_proj.weight"])
        one.optimizer.zero_grad()
    assert losses[0] == losses[1] == losses[2]
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
