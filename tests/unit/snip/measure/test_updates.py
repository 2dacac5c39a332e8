"""AdamW's update against torch's own optimiser, and changes of it against their definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_snip.snip.measure import updates as module
from megatron_snip.snip.measure.updates import AdamSettings, Updates, adam_update

ITERATION, SAMPLES, CLIP = 3, 2, 0.05
NAME = "layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts()


def test_adams_update_is_what_the_optimiser_does(parts):
    """The weight moves by -lr u(clip g), up to decay."""
    name = f"{NAME}.weight"
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


@pytest.fixture
def by_hand(parts, monkeypatch):
    """Updates whose gradient is given, on moments of a run: the updates, the gradient, u of a gradient, two errors."""
    monkeypatch.setitem(module._CHUNK, "cpu", 1000)  # several chunks, the last one smaller
    m, v = parts.optimizer.moments(f"{NAME}.weight")
    grad, *errors = (torch.randn(m.shape, generator=torch.Generator().manual_seed(i)) * 1e-3 for i in range(3))
    optimizer = SimpleNamespace(steps=parts.optimizer.steps, moments=parts.optimizer.moments, gradient=lambda _: grad)
    adam = parts.coordinator.probe.updates.adam

    def u(g: torch.Tensor) -> torch.Tensor:
        return adam_update(0.5 * g, m, v, optimizer.steps + 1, adam).double()

    return Updates(optimizer, adam), grad, u, errors


def test_changes_by_hand(by_hand):
    """Of a parameter of several chunks, two errors at once, clipped alike."""
    updates, grad, u, errors = by_hand
    expected = [float(u(grad).square().sum()), *(float((u(grad + e) - u(grad)).square().sum()) for e in errors)]
    found = updates.changes(NAME, errors, 0.5)
    assert all(one.dtype == torch.float64 and one.shape == () for one in found)
    assert list(map(float, found)) == pytest.approx(expected, rel=1e-4)
    assert float(updates.changes(NAME, [], 0.5)[0]) == pytest.approx(expected[0], rel=1e-4)


@pytest.mark.parametrize("rows", [slice(1, None, 3), slice(40, None, 64), slice(0, 0)])
def test_changes_of_some_rows(rows, by_hand):
    """The errors are of these rows alone."""
    updates, grad, u, errors = by_hand
    plain = u(grad)[rows]
    expected = [float(plain.square().sum()), *(float((u(grad + e)[rows] - plain).square().sum()) for e in errors)]
    found = updates.changes(NAME, [e[rows] for e in errors], 0.5, rows)
    assert list(map(float, found)) == pytest.approx(expected, rel=1e-4)


def test_v_may_have_a_low_part_and_everything_be_bf16(by_hand):
    """As of --optimizer-precision collage-plus: v is the sum of its parts."""
    updates, grad, _, errors = by_hand
    m, v = updates.optimizer.moments(f"{NAME}.weight")
    m, v, grad = m.bfloat16(), v.bfloat16(), grad.bfloat16()
    low = v * 0.5  # far more than a low part has, so that it shows
    optimizer = SimpleNamespace(steps=2, moments=lambda _: (m, v, low), gradient=lambda _: grad)

    def u(g: torch.Tensor) -> torch.Tensor:
        return adam_update(0.5 * g, m.float(), v.float() + low.float(), 3, updates.adam).double()

    g = grad.float()
    expected = [float(u(g).square().sum()), *(float((u(g + e) - u(g)).square().sum()) for e in errors)]
    assert list(map(float, Updates(optimizer, updates.adam).changes(NAME, errors, 0.5))) == pytest.approx(
        expected, rel=1e-4
    )
