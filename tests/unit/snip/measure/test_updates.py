"""AdamW's update against torch's own optimiser, and changes of it against their definition."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.snip.updates import AdamSettings, adam_update

ITERATION, SAMPLES, CLIP = 3, 2, 0.05


def test_adams_update_is_what_the_optimiser_does(snip_parts):
    """The weight moves by -lr u(clip g), up to decay."""
    parts = snip_parts()
    name = "layers.1.mlp.up_proj.weight"
    found, _ = parts.stepper.gradients(parts.train_loader.batch((ITERATION - 1) * SAMPLES), ITERATION)
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


def test_changes_by_hand(snip_parts):
    """Of a parameter of several chunks, two errors at once, clipped alike."""
    parts = snip_parts()
    updates, name = parts.coordinator.probe.updates, "layers.1.mlp.up_proj"
    m, v = parts.optimizer.moments(f"{name}.weight")
    grad, *errors = (torch.randn(m.shape, generator=torch.Generator().manual_seed(i)) * 1e-3 for i in range(3))

    def u(g: torch.Tensor) -> torch.Tensor:
        return adam_update(0.5 * g, m, v, ITERATION, updates.adam).double()

    expected = [float(u(grad).square().sum()), *(float((u(grad + e) - u(grad)).square().sum()) for e in errors)]
    assert updates.changes(name, grad, errors, 0.5) == pytest.approx(expected, rel=1e-4)
