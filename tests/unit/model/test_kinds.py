"""What holds for every kind of model, and what a new one is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_snip.config import ModelConfig
from megatron_snip.model.build import Build
from megatron_snip.model.flops import parameters
from megatron_snip.model.initial import draw_weights
from megatron_snip.model.llama import LLAMA, Block, LlamaStage
from megatron_snip.model.spec import MODELS, ModelSpec, register
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import Region, linears_of_one_input

MODEL = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, kv_channels=24,
    seq_length=128, vocab_size=100,
)  # fmt: skip


def stage_of(m: ModelConfig, mesh, *, tied: bool = False) -> LlamaStage:
    build = Build(m, mesh, Region(mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    return LlamaStage(build, range(m.num_layers), first=True, last=True, tied=tied)


@pytest.mark.parametrize(("groups", "tied"), [(4, True), (1, False)])
@pytest.mark.parametrize("name", MODELS)
def test_the_count_of_parameters_is_that_of_a_real_model(name, groups, tied, lone_mesh):
    m = replace(MODEL, model_name=name, num_query_groups=groups)
    assert sum(p.numel() for p in stage_of(m, lone_mesh, tied=tied).parameters()) == parameters(m, tied=tied)


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_linear_in_v(name, lone_mesh):
    """For the error of v a probe takes what the attention makes of the error alone."""
    m = replace(MODEL, model_name=name)
    stage = stage_of(m, lone_mesh)
    stage.allocate()
    for p in stage.parameters():  # biases too, which begin at 0
        nn.init.normal_(p)
    q, k, v, error = (torch.randn(128, heads * m.head_dim) for heads in (4, 2, 2, 2))
    with torch.no_grad():
        change = stage.attend(1, q, k, v + error) - stage.attend(1, q, k, v)
        torch.testing.assert_close(stage.attend(1, q, k, error), change, rtol=0.0, atol=1e-5)


class Ungated(nn.Module):
    """down(relu(up(x))^2), as Nemotron's."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj = (build.linear(f"{prefix}.{name}") for name in ("up_proj", "down_proj"))

    def forward(self, x, context):
        (up,) = linears_of_one_input([self.up_proj], x, context)
        return self.down_proj(F.relu(up).square(), context)


UNGATED = replace(
    LLAMA,
    name="ungated",
    block=lambda build, index: Block(build, index, mlp=Ungated),
    linears={module: linear for module, linear in LLAMA.linears.items() if module != "mlp.gate_proj"},
)


def known(monkeypatch, spec: ModelSpec) -> ModelConfig:
    monkeypatch.setitem(MODELS, spec.name, spec)
    return replace(MODEL, model_name=spec.name)


def test_a_block_takes_another_mlp(monkeypatch, lone_mesh):
    m = known(monkeypatch, UNGATED)
    stage = stage_of(m, lone_mesh)
    assert sum(p.numel() for p in stage.parameters()) == parameters(m, tied=False)
    stage.allocate()
    draw_weights([stage])
    mlp, x = stage.layers["1"].mlp, torch.randn(1, 128, 64)
    w = dict(stage.named_parameters())
    up, down = (w[f"layers.1.mlp.{name}_proj.weight"] for name in ("up", "down"))
    seen = []
    mlp.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    stage.hidden(torch.randint(100, (1, 128)), [0])
    ((x, y),) = seen
    torch.testing.assert_close(y, F.relu(x @ up.T).square() @ down.T)


def test_linears_of_the_spec_that_a_block_does_not_have_are_no_part_of_plans(monkeypatch, lone_mesh):
    """They would cost nothing there, and a plan's share of FP4 would be that of linears that do not exist."""
    m = known(monkeypatch, replace(UNGATED, linears=LLAMA.linears))
    with pytest.raises(AssertionError, match=r"layers.0.mlp.gate_proj is in the spec or in the block alone"):
        stage_of(m, lone_mesh)


@pytest.mark.parametrize("kind", ["up", "qkv"])
def test_a_block_has_each_kind_of_linear_once(kind):
    """A probe would take the token sums of one for the other's, or write statistics that nobody reads."""
    linears = {**LLAMA.linears, "mlp.gate_proj": replace(LLAMA.linears["mlp.gate_proj"], kind=kind)}
    with pytest.raises(AssertionError, match=f"model other: kinds .*'{kind}'.*; take each of .* once at most"):
        register(replace(LLAMA, name="other", linears=linears))


def test_biases_begin_at_zero(lone_mesh):
    stage = stage_of(MODEL, lone_mesh)
    bias = nn.Parameter(torch.empty(96, device="meta"))
    add_parameter(stage.layers["0"].self_attn.q_proj, "bias", bias, Tags("bias", 0, weight_decay=False))
    stage.allocate()
    draw_weights([stage])
    w = dict(stage.named_parameters())
    assert not w["layers.0.self_attn.q_proj.bias"].any() and w["layers.0.self_attn.q_proj.weight"].any()
