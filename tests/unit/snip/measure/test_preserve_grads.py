"""What a pass beside training leaves as it was."""

from __future__ import annotations

import torch
from torch import nn

from megatron_snip.snip.measure.preserve_grads import untouched

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def test_parameters_of_no_model_of_ours_get_their_gradients_back():
    """As a head's, or an embedding's, beside the model: the update would be by their gradients and the pass's."""
    model, head, given = nn.Linear(4, 4), nn.Linear(4, 2), X.clone().requires_grad_()
    before = head.weight.grad = torch.randn(2, 4)
    values = before.clone()
    with untouched(model) as kept:
        for _ in range(2):
            loss = head(model(given)).square().mean()
            kept.note(loss)
            loss.backward()
            assert head.weight.grad is not before and model.weight.grad is not None
            kept.zero_grad()
            assert head.bias.grad is None
    assert head.weight.grad is before and torch.equal(before, values)
    assert [p.grad for p in (head.bias, given, *model.parameters())] == [None] * 4


def test_buffers_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("unused", None)

        def forward(self, x):
            self.seen = self.seen + len(x)
            return self.norm(x)

    model = Counting()
    model(X)
    seen, version = model.seen, model.norm.running_var._version
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with untouched(model):
        pass
    assert model.norm.running_var._version == version, "a graph of before could not run backward any more"
    with untouched(model):
        model(10 * X)
        assert model.seen == 16 and not torch.equal(model.norm.running_var, values["norm.running_var"])
    assert model.seen is seen and values.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffer, values[name]) for name, buffer in model.named_buffers())


def test_an_optimiser_in_backward_makes_no_update():
    model = nn.Linear(4, 4)
    calls = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.data.sub_(p.grad)))
    before = model.weight.detach().clone()
    with untouched(model):
        model(X).square().mean().backward()
    assert not calls and torch.equal(model.weight, before)
    model(X).square().mean().backward()
    assert len(calls) == 2 and not torch.equal(model.weight, before)
