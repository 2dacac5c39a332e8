"""A compiled block: one graph for all blocks, iterations and plans, without a break, and the bits of the eager one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_snip.config import ModelConfig
from megatron_snip.model.build import Build
from megatron_snip.model.initial import draw_weights
from megatron_snip.model.llama import LlamaStage, build_stages
from megatron_snip.model.offload import Offload
from megatron_snip.model.recompute import NOTHING, Recompute
from megatron_snip.parallel.tensor import Region, drop_weight_casts
from megatron_snip.quant import LinearPrecision, StepContext

MODEL = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=2, num_query_groups=1, seq_length=128,
    vocab_size=128,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def make(lone_mesh):
    """Call it for a stage of two blocks, compiled or not."""

    def stage(
        backend: str | None = None, *, recompute: Recompute = NOTHING, dtype=torch.bfloat16, name: str = "llama"
    ) -> LlamaStage:
        m = dataclasses.replace(MODEL, model_name=name)
        region, cpu = Region(lone_mesh.tp, False), torch.device("cpu")
        build = Build(m, lone_mesh, region, 1, dtype, cpu, recompute, offload=Offload(cpu))
        (made,) = build_stages(build, [range(build.model.num_layers)], tied=False, of=lambda s: True).values()
        made.allocate()
        draw_weights([made])
        for block in made.blocks().values() if backend is not None else ():
            block.compile_run(backend)
        return made

    return stage


def step(stage: LlamaStage, precisions: str, iteration: int, **how) -> list[Tensor]:
    """Loss and gradients of two sequences, with precisions dealt out in turn."""
    given = [LinearPrecision.parse(text) for text in precisions.split(",")]
    for i, linear in enumerate(stage.linears().values()):
        linear.precision = given[i % len(given)]
    tokens = torch.randint(128, (2, 129), generator=torch.Generator().manual_seed(iteration))
    stage.zero_grad()
    drop_weight_casts([stage])
    loss = stage(tokens[:, :-1], [0, 1], tokens[:, 1:], StepContext(iteration, **how))
    loss.backward()
    return [loss.detach(), *(p.grad for p in stage.parameters())]


def graphs() -> int:
    """Graphs made so far; none of them because of a break."""
    assert not counters["graph_break"], counters["graph_break"]
    return counters["stats"]["unique_graphs"]


PLANS = [
    "fp8",
    "fp8,fp4,fp4/fp8/fp4",
    "mxfp8,nvfp4_plain,nvfp4",
    "mxfp8_dequantized,mxfp4_tetrajet,fp8/bf16_dequantized/bf16_dequantized",
]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_one_graph_and_the_same_bits_whatever_the_plan(name, make):
    eager, compiled = make(name=name), make("aot_eager", name=name)
    recomputed = make("aot_eager", recompute=Recompute("full"), name=name)
    for iteration, plan in enumerate(PLANS, start=1):
        assert same(step(compiled, plan, iteration), step(eager, plan, iteration))
    assert same(step(recomputed, "fp4", 4), step(eager, "fp4", 4))
    offloaded = make("aot_eager", recompute=Recompute(plan=("offload", "offload")), name=name)
    assert same(step(offloaded, "fp4", 4), step(eager, "fp4", 4))
    assert graphs() == 1
    for iteration in (5, 6):
        assert same(step(compiled, "bf16", iteration), step(eager, "bf16", iteration))
    assert graphs() == 2, "bf16 keeps the input itself"
    step(compiled, "fp4", 7)
    assert graphs() == 2


def test_a_graph_for_each_mix_of_wgrads_in_bf16_within_a_block(make):
    compiled, eager = make("eager"), make()
    mixed = "bf16/fp8/bf16,fp4"  # the first block begins with the one, the second with the other
    assert same(step(compiled, mixed, 1), step(eager, mixed, 1))
    assert graphs() == 2


def test_evaluation_and_a_probe(make):
    compiled, eager = make("eager"), make()
    for stage in (compiled, eager):
        step(stage, "fp8", 1)
    given = torch.zeros(2, 128, dtype=torch.int64), [0, 1], torch.ones(2, 128).long()
    losses = []
    with torch.no_grad():
        for context in (StepContext(2), StepContext(3), StepContext(3, precision=LinearPrecision.uniform("bf16"))):
            losses.append(float(compiled(*given, context)))
            assert losses[-1] == float(eager(*given, context))
    assert losses[0] == losses[1] != losses[2] and graphs() == 2
    seen = []
    step(compiled, "bf16", 2, observers=dict.fromkeys(compiled.linears(), seen.append))
    assert len(seen) == 14 and graphs() == 2, "what is observed runs eagerly"
