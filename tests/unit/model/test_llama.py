"""The model's parts; equality of the whole with transformers is in tests/unit/interop/test_huggingface.py."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from megatron_snip.config import ModelConfig
from megatron_snip.model.attention import Attention
from megatron_snip.model.build import Build, RMSNorm
from megatron_snip.model.initial import draw_weights, fill_normal
from megatron_snip.model.llama import LLAMA, LlamaStage, build_stages
from megatron_snip.model.offload import Offload
from megatron_snip.model.recompute import NOTHING, Recompute
from megatron_snip.model.rotary import rotary_frequencies, rotary_tables, rotate
from megatron_snip.parallel.tags import Tags, tags_of
from megatron_snip.parallel.tensor import Region
from megatron_snip.quant import KINDS, LinearPrecision, StepContext
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears import matmul

MODEL = ModelConfig(
    num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, seq_length=128,
    vocab_size=100,
)  # fmt: skip


@pytest.fixture
def make(lone_mesh):
    """Call it for the stages of a model."""

    def stages(
        m: ModelConfig = MODEL,
        *,
        num_stages: int = 1,
        tied: bool = False,
        recompute: Recompute = NOTHING,
        seed: int = 1,
    ) -> dict[int, LlamaStage]:
        region, cpu = Region(lone_mesh.tp, False), torch.device("cpu")
        build = Build(m, lone_mesh, region, seed, torch.float32, cpu, recompute, offload=Offload(cpu))
        each = m.num_layers // num_stages
        blocks = [range(s * each, (s + 1) * each) for s in range(num_stages)]
        made = build_stages(build, blocks, tied=tied, of=lambda s: True)
        for stage in made.values():
            stage.allocate()
        draw_weights(made.values())
        return made

    return stages


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(100, (2, 128), generator=torch.Generator().manual_seed(seed))


SAMPLES = [0, 1]


def test_names_and_shapes():
    assert LLAMA.linear_names(1) == [
        *(f"layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    m = dataclasses.replace(MODEL, kv_channels=48)
    shapes = LLAMA.linear_shapes(m)
    assert [shape.name for shape in shapes] == LLAMA.linear_names(4)
    assert [(shape.out_features, shape.in_features) for shape in shapes[:7]] == [
        (192, 128), (96, 128), (96, 128), (128, 192), (256, 128), (256, 128), (128, 256),
    ]  # fmt: skip
    assert [shape.kind for shape in shapes[:7]] == list(KINDS)
    assert [shape.block for shape in shapes[::7]] == [
        0,
        1,
        2,
        3,
    ]
    first = [shape.reads for shape in shapes[:7]]
    assert first[0] == first[1] == first[2] and first[4] == first[5] and len({shape.reads for shape in shapes}) == 16


def test_parameters_are_named_as_hugging_faces_whatever_the_cut(make):
    (whole,) = make().values()
    names = dict(whole.named_parameters())
    assert len(names) == 4 * 9 + 3 and {"embed_tokens.weight", "norm.weight", "lm_head.weight"} < names.keys()
    assert all(f"{name}.weight" in names for name in LLAMA.linear_names(4))
    cut: dict[str, torch.Tensor] = {}
    for s, stage in make(num_stages=4).items():
        assert list(stage.linears()) == [name for name in LLAMA.linear_names(4) if name.startswith(f"layers.{s}.")]
        assert not cut.keys() & dict(stage.named_parameters()).keys()
        cut.update(stage.named_parameters())
    assert cut.keys() == names.keys() and all(torch.equal(cut[name], p) for name, p in names.items())


def test_tags(make):
    (stage,) = make().values()
    tags = tags_of(stage)
    assert list(tags) == list(dict(stage.named_parameters()))
    assert {tag.kind for tag in tags.values()} == {"linear", "norm", "embedding", "output"}
    assert tags["embed_tokens.weight"] == Tags("embedding", 0) and tags["lm_head.weight"] == Tags("output", 0)
    for name, tag in tags.items():
        norm = name.rsplit(".", 2)[-2].endswith("norm")
        assert norm == tag.replicated == (not tag.weight_decay) == (tag.kind == "norm"), name
        assert tag.is_summed(True) == norm and not tag.is_summed(False)
    rows = [name for name, tag in tags.items() if tag.split_dim == 1]
    assert rows == [f"layers.{i}.{name}_proj.weight" for i in range(4) for name in ("self_attn.o", "mlp.down")]
    stage.norm.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match=r"norm.extra has no tags; make it by add_parameter"):
        tags_of(stage)


@pytest.mark.parametrize("lacks", [True, False])
def test_attention_is_computed_in_float32_where_bf16_is_slow(lone_mesh, monkeypatch, lacks):
    """On CPUs without instructions for BF16, and rounded once; elsewhere it is torch's in bf16."""
    monkeypatch.setattr(matmul, "_lacks_bf16", lambda: lacks)
    build = Build(MODEL, lone_mesh, Region(lone_mesh.tp, False), 1, torch.bfloat16, torch.device("cpu"))
    attention = Attention(build, "layers.0.self_attn")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 128, width, generator=generator).bfloat16() for width in (128, 64, 64))
    cos, sin = rotary_tables(MODEL, torch.bfloat16, torch.device("cpu"))
    made = attention.attend(q, k, v, cos, sin)
    q, k, v = (x.unflatten(-1, (-1, 32)).transpose(1, 2) for x in (q, k, v))
    operands_ = (
        x.to(torch.float32 if lacks else torch.bfloat16) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v)
    )
    expected = F.scaled_dot_product_attention(*operands_, is_causal=True, enable_gqa=True)
    assert made.dtype == torch.bfloat16 and torch.equal(made, expected.bfloat16().transpose(1, 2).flatten(2))


def test_initial_weights(make):
    """Normal with init-method-std; o and down by another 1 / sqrt(2 L), as Megatron's; norms of one."""
    (stage,) = make(dataclasses.replace(MODEL, init_method_std=0.05)).values()
    for name, parameter in stage.named_parameters():
        p = parameter.detach()
        if "norm" in name:
            assert p.eq(1).all()
            continue
        std = 0.05 / (math.sqrt(8) if "o_proj" in name or "down_proj" in name else 1)
        assert float(p.std()) == pytest.approx(std, rel=0.05) and abs(float(p.mean())) < std / 20, name


def test_a_weight_depends_on_seed_and_place_alone():
    whole, part, other = torch.empty(300, 400), torch.empty(150, 7), torch.empty(300, 400)
    fill_normal(whole, 2**63 - 1, 0, 0)
    fill_normal(part, 2**63 - 1, 120, 250)
    fill_normal(other, 2**63 - 2, 0, 0)
    assert torch.equal(part, whole[120:270, 250:257])
    assert len(torch.cat([whole, other]).unique()) > 0.99 * 2 * 300 * 400
    assert abs(float(whole.std()) - 1) < 0.01


def test_threads_draw_the_same_weights(monkeypatch):
    made = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        made.append(torch.full((700, 130), torch.nan))
        fill_normal(made[-1], 5, 120, 250)
    assert torch.equal(*made) and made[0].isfinite().all()


def test_stages_are_made_without_memory(lone_mesh):
    build = Build(MODEL, lone_mesh, Region(lone_mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    (stage,) = build_stages(build, [range(build.model.num_layers)], tied=False, of=lambda s: True).values()
    assert all(p.is_meta for p in stage.parameters())


def test_rotary_angles_and_llama_3s_stretching():
    plain = rotary_frequencies(dataclasses.replace(MODEL, kv_channels=64))
    expected = [10000.0 ** (-i / 32) for i in range(32)]
    assert plain.tolist() == pytest.approx(expected, rel=1e-5)
    m = dataclasses.replace(
        MODEL, kv_channels=64, use_rope_scaling=True, rope_scaling_factor=8.0, rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0, rope_original_max_position_embeddings=8192,
    )  # fmt: skip
    for got, frequency in zip(rotary_frequencies(m).tolist(), expected, strict=True):
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < 8192 / 4:
            wanted = frequency
        elif wavelength > 8192:
            wanted = frequency / 8
        else:
            wanted = (1 - smooth) * frequency / 8 + smooth * frequency
        assert got == pytest.approx(wanted, rel=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    cos, sin = rotary_tables(dataclasses.replace(MODEL, kv_channels=16), torch.float32, torch.device("cpu"))
    assert cos.shape == sin.shape == (128, 16)
    q, k = (torch.randn(16, generator=torch.Generator().manual_seed(i)).expand(1, 1, 128, 16) for i in (0, 1))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(q.norm(dim=-1), q[..., :1, :].norm(dim=-1).expand(1, 1, 128))
    scores = (q @ k.transpose(-1, -2))[0, 0]
    for distance in (0, 5, 60):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-3, atol=1e-4)
    assert scores.diagonal(5)[0] != scores.diagonal(60)[0]


def test_rms_norm(make, lone_mesh):
    build = Build(MODEL, lone_mesh, Region(lone_mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    norm = RMSNorm(build).to_empty(device="cpu")
    x = torch.randn(2, 3, 128)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(128))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)


def test_attention_sees_the_past_alone(make):
    (stage,) = make().values()
    one = tokens()
    other = one.clone()
    other[:, 70] = (other[:, 70] + 1) % 100
    with torch.no_grad():
        a, b = (stage.logits(stage.hidden(x, SAMPLES)) for x in (one, other))
    assert torch.equal(a[:, :70], b[:, :70]) and not torch.equal(a[:, 70], b[:, 70])
    assert not torch.equal(a[:, 71:], b[:, 71:])


def gradients(stage: LlamaStage, precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    for linear in stage.linears().values():
        linear.precision = LinearPrecision.parse(precision)
    loss = stage(tokens(), SAMPLES, tokens(1), StepContext(3, 256))
    loss.sum().backward()
    return loss.item(), {name: p.grad for name, p in stage.named_parameters()}


RECOMPUTED = {
    "blocks": Recompute("full"),
    "three blocks as one": Recompute("full", "uniform", 3),
    "the first three": Recompute("full", "block", 3),
    "attention": Recompute("selective"),
    "attention and mlp": Recompute("selective", modules=("core_attn", "mlp")),
    "a plan": Recompute(plan=("selective", "full", "keep", "selective", "full", "keep", "full", "keep")),
    "a plan with the host": Recompute(plan=("offload", "offload", "full", "offload")),
}


@pytest.mark.parametrize("how", RECOMPUTED)
@pytest.mark.parametrize("precision", ["bf16", "fp4"])
def test_recomputation_changes_no_bit(precision, how, make):
    (plain,), (recomputed,) = make().values(), make(recompute=RECOMPUTED[how]).values()
    loss, grads = gradients(plain, precision)
    other_loss, other = gradients(recomputed, precision)
    assert loss == other_loss and all(torch.equal(grads[name], other[name]) for name in grads)


STAGE = range(3, 8)


def test_what_runs_again():
    """By Megatron-LM's meanings, of a stage of five blocks."""
    one_by_one = [range(i, i + 1) for i in range(5)]
    assert Recompute().runs(STAGE) == Recompute("selective").runs(STAGE) == [(block, False) for block in one_by_one]
    assert Recompute("full").runs(STAGE) == [(block, True) for block in one_by_one]
    assert Recompute("full", "uniform", 2).runs(STAGE) == [
        (range(2), True),
        (range(2, 4), True),
        (range(4, 5), True),
    ]
    assert Recompute("full", "block", 2).runs(STAGE) == [(block, block.start < 2) for block in one_by_one]
    assert Recompute("full", "block", 9).runs(STAGE) == [(block, True) for block in one_by_one]


def test_a_plan_s_choices_are_those_of_the_model_s_blocks():
    plan = Recompute(plan=("full", "keep", "selective", "full"))
    assert plan.runs(range(2, 4)) == [(range(1), False), (range(1, 2), True)]
    parts = [[plan.of_block(i).of_part(part) for part in ("core_attn", "mlp")] for i in range(4)]
    assert parts == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert Recompute("selective").of_block(3).of_part("core_attn"), "without a plan, all blocks are alike"


def saved_bytes(stage: LlamaStage) -> int:
    """What a forward keeps for backward beside parameters and tables."""
    own = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers())}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            found[address] = tensor.untyped_storage().nbytes()
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), keep(t))[1], lambda t: t):
        stage.hidden(tokens(), SAMPLES)
    return sum(found.values())


def test_each_way_keeps_less_than_the_one_before(make):
    ways = ["attention", "attention and mlp", "the first three", "blocks", "three blocks as one"]
    kept = [saved_bytes(next(iter(make(recompute=how).values()))) for how in (NOTHING, *map(RECOMPUTED.get, ways))]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_stages_in_a_row_are_the_whole(make):
    (whole,) = make().values()
    loss, grads = gradients(whole, "fp8")
    stages = list(make(num_stages=2).values())
    for stage in stages:
        for linear in stage.linears().values():
            linear.precision = LinearPrecision.uniform("fp8")
    context = StepContext(3, 256)
    out = stages[1](stages[0](tokens(), SAMPLES, context=context), SAMPLES, tokens(1), context)
    out.sum().backward()
    assert out.item() == loss
    for stage in stages:
        for name, p in stage.named_parameters():
            assert torch.equal(p.grad, grads[name]), name


def test_passes_in_flight_keep_their_own_context(make):
    """Forwards of a stage before their backwards, which run everything once more: each gives what it gives alone."""
    passes = [StepContext(3, 256), StepContext(4, 256), StepContext(3, 128, LinearPrecision.uniform("bf16"))]

    def grads(contexts: list[StepContext]) -> list[torch.Tensor]:
        (stage,) = make(dataclasses.replace(MODEL, num_layers=1), recompute=Recompute("full")).values()
        for linear in stage.linears().values():
            linear.precision = LinearPrecision.parse("fp8/fp8/fp4")
        weight, found = stage.layers["0"].mlp.up_proj.weight, []
        losses = [stage(tokens(), SAMPLES, tokens(1), context) for context in contexts]
        for loss in losses:
            found += torch.autograd.grad(loss.sum(), weight)
        return found

    alone = [grads([context])[0] for context in passes]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(alone, 2))
    assert all(torch.equal(a, b) for a, b in zip(grads(passes), alone, strict=True))


def test_a_tied_head_is_the_embedding(make):
    (tied,), (untied,) = make(tied=True).values(), make().values()
    assert tied.lm_head is None and not any("lm_head" in name for name, _ in tied.named_parameters())
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.embed_tokens.weight)
    loss, grads = gradients(tied, "bf16")
    other_loss, other = gradients(untied, "bf16")
    assert loss == other_loss
    total = other["embed_tokens.weight"] + other["lm_head.weight"]
    torch.testing.assert_close(grads["embed_tokens.weight"], total, rtol=1e-5, atol=1e-8)
    assert tied.logits(tied.hidden(tokens(), SAMPLES)).shape == (2, 128, 128), "the padded vocabulary"


def test_random_bits_follow_the_global_sample(make):
    """The same sequence at another place in the run rounds otherwise; at the same place in another cut it does not."""

    def grads_at(samples: list[int], rows: slice) -> torch.Tensor:
        (stage,) = make(dataclasses.replace(MODEL, num_layers=1)).values()
        for linear in stage.linears().values():
            linear.precision = LinearPrecision.parse("bf16/bf16/fp4")
        stage(tokens()[rows], samples, tokens(1)[rows], StepContext(1)).sum().backward()
        return stage.layers["0"].mlp.down_proj.weight.grad

    both = grads_at([6, 7], slice(0, 2))
    apart = grads_at([6], slice(0, 1)) + grads_at([7], slice(1, 2))
    torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-4 * float(both.abs().max()))
    elsewhere = grads_at([6], slice(0, 1)) + grads_at([8], slice(1, 2))
    assert (both - elsewhere).abs().max() > 0.01 * both.abs().max()


@pytest.mark.parametrize(("how", "again"), [(Recompute("full"), 4), (Recompute("selective", modules=("mlp",)), 2)])
@pytest.mark.parametrize("precision", ["fp8", "nvfp4_plain", "bf16/fp8/bf16"])
def test_recomputation_casts_for_wgrad_once(make, precision, how, again, monkeypatch):
    seen: list[tuple[str, int]] = []
    run = op.run

    def count(x, forms, *rest, **more):
        seen.extend((form.role, form.dim) for form in forms)
        return run(x, forms, *rest, **more)

    def grads(recompute: Recompute) -> tuple[int, int, list[torch.Tensor]]:
        (stage,) = make(dataclasses.replace(MODEL, num_layers=1), recompute=recompute).values()
        for linear in stage.linears().values():
            linear.precision = LinearPrecision.parse(precision)
        seen.clear()
        stage(tokens(), SAMPLES, tokens(1)).backward()
        return seen.count(("input", 1)), seen.count(("input", 0)), [p.grad for p in stage.parameters()]

    monkeypatch.setattr(op, "run", count)
    (fprop, wgrad, once), (fprop_again, wgrad_again, twice) = grads(NOTHING), grads(how)
    assert fprop_again == fprop * (4 + again) // 4 and wgrad_again == wgrad
    assert (fprop, wgrad) == ((0, 0) if precision.startswith("bf16") else (4, 4))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
