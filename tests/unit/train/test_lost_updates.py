"""optim/edq and optim/lost: known values, for every precision, and that measuring changes no bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_snip.config import TrainingConfig
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.train.bf16_adamw import LOW_PARTS
from megatron_snip.train.lost_updates import LostUpdates, groups
from megatron_snip.train.optim import Optimizer
from megatron_snip.train.report import sections

PRECISIONS = ("fp32", *LOW_PARTS)


def model_of(precision: str, values: torch.Tensor) -> nn.Module:
    """A weight of a block that decays, and a norm outside of blocks."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    block, model = nn.Module(), nn.Module()
    block.up_proj, model.norm = nn.Module(), nn.Module()
    model.layers = nn.ModuleDict({"3": block})
    add_parameter(block.up_proj, "weight", nn.Parameter(values.clone().to(dtype)), Tags("linear", 0))
    add_parameter(model.norm, "weight", nn.Parameter(torch.ones(64, dtype=dtype)), Tags("norm", weight_decay=False))
    return model


def measured(precision: str, mesh, lr: float, steps: int = 1, last_only: bool = True):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=draw).bfloat16()
    model = model_of(precision, values)
    t = TrainingConfig(adam_beta2=0.95, weight_decay=0.1, optimizer_precision=precision)
    optimizer = Optimizer([model], t, mesh=mesh)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    for i in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        lost = LostUpdates(optimizer.tags, mesh) if i == steps - 1 or not last_only else None
        if i == steps - 1:
            before = {name: p.detach().double() for name, p in model.named_parameters()}
            before = {name: whole_of(optimizer, name) for name in before}
        optimizer.step(lr, 0.5, lost=lost)
    after = {name: whole_of(optimizer, name) for name in before}
    return lost.metrics(), before, after, optimizer


def whole_of(optimizer: Optimizer, name: str) -> torch.Tensor:
    low = optimizer.low_parts().get(name)
    return optimizer.parameters[name].detach().double() + (0 if low is None else low.double())


def test_an_update_that_no_weight_takes_is_lost_and_one_that_all_take_is_whole(lone_mesh):
    for precision in PRECISIONS:
        row, *_ = measured(precision, lone_mesh, 1e-5)
        if precision == "bf16":
            assert row["optim/lost/norm"] == 1 and row["optim/edq/norm"] == 0, "1 + 1e-5 is 1"
        elif precision != "bf16-stochastic":
            assert row["optim/lost/norm"] == 0 and row["optim/edq/norm"] == pytest.approx(1, abs=5e-3)
    row, *_ = measured("bf16", lone_mesh, 1.0)
    assert row["optim/edq"] == pytest.approx(1, abs=0.01) and row["optim/lost"] < 0.01


@pytest.mark.parametrize("precision", PRECISIONS)
def test_they_are_what_the_formulas_say(precision, lone_mesh):
    """From the weights before and after in float64; u again from the moments."""
    lr, steps = 1e-3, 4
    row, before, after, optimizer = measured(precision, lone_mesh, lr, steps)
    product = square = still = 0.0
    for name in before:
        m, v = (part.double() for part in optimizer.moments(name)[:2])
        u = -lr * m / (1 - 0.9**steps) / ((v / (1 - 0.95**steps)).sqrt() + 1e-8)
        u -= 0 if "norm" in name else lr * 0.1 * before[name]
        d = after[name] - before[name]
        product, square, still = product + (d * u).sum(), square + (u * u).sum(), still + (d == 0).sum()
    assert row["optim/edq"] == pytest.approx(float(product / square), abs=2e-3)
    assert row["optim/lost"] == pytest.approx(float(still) / (64 * 65), abs=1e-6)
    assert set(row) == {
        f"optim/{what}{group}" for what in ("edq", "lost") for group in ("", "/block_03", "/norm", "/up_proj")
    }
    if precision == "bf16":
        assert 0.1 < row["optim/lost"] < 0.9, "or nothing is told apart"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_measuring_changes_no_bit(precision, lone_mesh):
    plain, watched = (measured(precision, lone_mesh, 1e-3, 3, last_only=last)[3] for last in (True, False))
    assert plain.steps == watched.steps == 3
    for name, tensor in plain.tensors().items():
        assert torch.equal(tensor, watched.tensors()[name])
    for name, p in plain.parameters.items():
        assert torch.equal(p, watched.parameters[name])


def test_a_weight_counts_in_its_block_and_its_kind():
    assert list(groups("layers.3.mlp.up_proj.weight")) == ["block_03", "up_proj"]
    assert list(groups("layers.11.input_layernorm.weight")) == ["block_11", "input_layernorm"]
    assert list(groups("embed_tokens.weight")) == ["embed_tokens"]


def test_metrics_have_them_every_n_iterations(train_here):
    rows = train_here(bf16=True, optimizer_precision="bf16", log_edq_interval=2, lr=1e-5)
    assert [row["iteration"] for row in rows if "optim/edq" in row] == [2, 4]
    assert 0 <= rows[1]["optim/edq/block_00"] < 0.9 and 0 < rows[1]["optim/lost"] <= 1
    assert {"optim/edq/q_proj", "optim/lost/down_proj", "optim/edq/embed_tokens"} <= rows[1].keys()
    with pytest.raises(ValueError, match="--log-edq-interval is 2, but --optimizer-impl apex updates all weights"):
        train_here(log_edq_interval=2, optimizer_impl="apex")


def test_the_report_shows_them():
    rows = [{"iteration": i, "grad-norm": 1.0, "optim/edq": 0.4, "optim/lost": 0.6} for i in (1, 2)]

    def column(key: str) -> tuple[list[int], list[float]]:
        there = [row for row in rows if key in row]
        return [row["iteration"] for row in there], [row[key] for row in there]

    run = SimpleNamespace(column=column)
    section = sections._optimisation(run)
    (figure,) = [one for one in section.figures if one["title"] == "Updates that reach the weights"]
    assert [(one["name"], list(one["y"])) for one in figure["data"]] == [
        ("descent", [0.4, 0.4]), ("lost elements", [0.6, 0.6])
    ]  # fmt: skip
    rows = [{"iteration": 1, "grad-norm": 1.0}]
    assert [one["title"] for one in sections._optimisation(run).figures] == ["Gradient norm"]
