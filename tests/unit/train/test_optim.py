"""AdamW on named parameters, and apex, which must be NVIDIA's."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
import torch
from torch import nn

from megatron_snip.config import TrainingConfig
from megatron_snip.parallel.data import clip_coefficient
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.train import optim
from megatron_snip.train.optim import Optimizer, check_optimizer_impl


class Small(nn.Module):
    """Two weights and a norm, with the tags that a stage's have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = nn.Linear(5, 7, bias=False)
        self.input_layernorm = nn.RMSNorm(5)
        self.down_proj = nn.Linear(7, 3, bias=False)
        add_parameter(self.up_proj, "weight", self.up_proj.weight, Tags("linear", 0))
        add_parameter(self.input_layernorm, "weight", self.input_layernorm.weight, Tags("norm", weight_decay=False))
        add_parameter(self.down_proj, "weight", self.down_proj.weight, Tags("linear", 1))

    def forward(self, x):
        return self.down_proj(torch.tanh(self.up_proj(self.input_layernorm(x))))


def train(model: Small, step, zero_grad, steps: int = 6) -> None:
    generator = torch.Generator().manual_seed(1)
    for i in range(1, steps + 1):
        x, target = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
        ((model(x) - target) ** 2).mean().backward()
        step(i)
        zero_grad()


def test_adamw_is_torchs_unfused_with_clipping_and_no_decay_of_norms():
    t = TrainingConfig(lr=0.05, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, train_iters=6,
                       clip_grad=0.1)  # fmt: skip
    ours, theirs = Small(), Small()
    optimizer = Optimizer([ours], t)

    def step(i: int) -> None:
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in ours.parameters()))
        assert norm > t.clip_grad, "or nothing is clipped"
        optimizer.step(0.05 * (1 - i / 6), clip_coefficient(norm, t.clip_grad))

    train(ours, step, optimizer.zero_grad)
    norms = [theirs.input_layernorm.weight]
    rest = [theirs.up_proj.weight, theirs.down_proj.weight]
    groups = [{"params": rest, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-6, fused=False, foreach=False)

    def reference_step(i: int) -> None:
        nn.utils.clip_grad_norm_(theirs.parameters(), t.clip_grad)
        for group in reference.param_groups:
            group["lr"] = 0.05 * (1 - i / 6)
        reference.step()

    train(theirs, reference_step, reference.zero_grad)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
        state = reference.state[q]
        m, v = optimizer.moments(name)
        torch.testing.assert_close(m, state["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-5, atol=1e-9)
    assert optimizer.steps == 6


def test_norms_do_not_decay():
    model = Small()
    optimizer = Optimizer([model], TrainingConfig(weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, 1.0)
    for name, p in model.named_parameters():
        expected = before[name] if "norm" in name else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)
    optimizer.step(0.1, 1.0, weight_decay=0.2, samples=3)  # one that grows or shrinks
    for name, p in model.named_parameters():
        expected = before[name] if "norm" in name else before[name] * (1 - 0.1 * 0.5) * (1 - 0.1 * 0.2)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)
    assert optimizer.samples == 3


@pytest.mark.parametrize(
    ("norm", "largest", "expected"),
    [(4, 1, 1 / (4 + 1e-6)), (0.5, 1, 1), (1, 1, 1), (4, 0, 1), (math.nan, 1, 1), (math.inf, 1, 1)],
)
def test_clip_coefficient(norm, largest, expected):
    assert clip_coefficient(norm, largest) == expected


def test_state_set_anew_goes_on_where_it_was():
    t = TrainingConfig(lr=0.05)
    whole, halves = Small(), Small()
    one = Optimizer([whole], t)
    train(whole, lambda i: one.step(0.05, 1.0), one.zero_grad)
    first = Optimizer([halves], t)
    generator = torch.Generator().manual_seed(1)
    for i in range(6):
        if i == 3:  # a resume: new optimiser, the saved moments, the number of updates
            saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
            first = Optimizer([halves], t)
            for name, tensor in first.tensors().items():
                tensor.copy_(saved[name])
            first.set_steps(3)
        x, target = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
        ((halves(x) - target) ** 2).mean().backward()
        first.step(0.05, 1.0)
        first.zero_grad()
    assert first.steps == one.steps == 6
    for p, q in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_is_named_after_its_parameter():
    model = Small()
    optimizer = Optimizer([model], TrainingConfig())
    tensors = optimizer.tensors()
    assert list(tensors) == [
        f"optim.{name}.{moment}"
        for name in ("up_proj.weight", "input_layernorm.weight", "down_proj.weight")
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    m, v = optimizer.moments("up_proj.weight")
    assert tensors["optim.up_proj.weight.exp_avg"] is m and tensors["optim.up_proj.weight.exp_avg_sq"] is v
    assert m.shape == model.up_proj.weight.shape and not m.any()


def test_gradients_are_seen_and_dropped():
    model = Small()
    optimizer = Optimizer([model], TrainingConfig())
    model(torch.ones(2, 5)).square().sum().backward()
    assert optimizer.gradient("up_proj.weight") is model.up_proj.weight.grad
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(AssertionError, match=r"up_proj.weight has no gradient"):
        optimizer.gradient("up_proj.weight")


def forget_apex(monkeypatch):
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


def apex_error() -> str:
    with pytest.raises(ValueError) as info:
        check_optimizer_impl(TrainingConfig(optimizer_impl="apex"))
    assert "\n" not in str(info.value)
    return str(info.value)


def put_apex(folder, files: dict[str, str], monkeypatch) -> None:
    for name, text in files.items():
        path = folder / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    forget_apex(monkeypatch)


def test_torch_needs_no_apex():
    check_optimizer_impl(TrainingConfig())


def test_absent_apex_is_refused(monkeypatch):
    forget_apex(monkeypatch)
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "apex", None)  # import raises, installed or not
    said = apex_error()
    assert said.startswith("--optimizer-impl apex: apex is not installed; build NVIDIA's from source")
    assert said.endswith("or use --optimizer-impl torch")


def test_pypis_apex_is_refused_by_name(monkeypatch, tmp_path):
    put_apex(tmp_path, {"__init__.py": "class Application: pass\n", "lib.py": ""}, monkeypatch)
    said = apex_error()
    assert f"the apex at {tmp_path}/apex/__init__.py is not NVIDIA's" in said and "unrelated web toolkit" in said
    put_apex(tmp_path, {"optimizers/__init__.py": "class Momentum: pass\n"}, monkeypatch)
    assert "is not NVIDIA's" in apex_error()


def test_nvidias_apex_is_taken_on_gpus_alone(monkeypatch, tmp_path):
    """A stand-in with FusedAdam's interface: (groups, adam_w_mode=, lr=, betas=, eps=) and a step per group."""
    files = {"__init__.py": "", "optimizers/__init__.py": FUSED_ADAM}
    put_apex(tmp_path, files, monkeypatch)
    t = TrainingConfig(optimizer_impl="apex", lr=0.05)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert apex_error() == "--optimizer-impl apex needs a GPU, and there is none; use --optimizer-impl torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_optimizer_impl(t)
    ours, theirs = Small(), Small()
    apex, plain = Optimizer([ours], t), Optimizer([theirs], TrainingConfig(lr=0.05))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # torch's Adam would ask the driver as it steps
    for optimizer, model in ((apex, ours), (plain, theirs)):
        train(model, lambda i, o=optimizer: o.step(0.05, 1.0), optimizer.zero_grad, steps=2)
        optimizer.set_steps(7)
        train(model, lambda i, o=optimizer: o.step(0.05, 1.0), optimizer.zero_grad, steps=2)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


FUSED_ADAM = """
import torch
class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            t, (b1, b2) = group["step"], group["betas"]
            for p in group["params"]:
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.lerp_(p.grad, 1 - b1)
                v.lerp_(p.grad ** 2, 1 - b2)
                update = m / (1 - b1 ** t) / ((v / (1 - b2 ** t)).sqrt() + group["eps"])
                p -= group["lr"] * (update + group["weight_decay"] * p)
"""


def test_without_moments_it_has_no_memory_for_them():
    """They are twice the weights, which a probe that leaves updates alone can spare."""
    model = Small()
    optimizer = Optimizer([model], TrainingConfig(), moments=False)
    assert optimizer.tensors() == {} and set(optimizer.parameters) == set(
        Optimizer([model], TrainingConfig()).parameters
    )
    with pytest.raises(KeyError):
        optimizer.moments("up_proj.weight")
