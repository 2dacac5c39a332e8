"""The judge of examples/study on a toy: its rounding gives the trainer's bits, though it shares no code with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from examples.study import judge, sampled_labels
from megatron_snip.quant import LinearPrecision, fake_quantize
from megatron_snip.snip.plan.plan_file import Plan

ROOT = Path(__file__).resolve().parents[3]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """[300, 600]: outlier channels, tiny and huge rows, zeros of both signs, ties, blocks that are cut by the edge."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, 600, generator=generator) * torch.randn(600, generator=generator).exp() ** 2
    x[7] *= 1e-30
    x[8] *= 1e30
    x[9:12] = 0
    x[10] = -0.0
    x[128:256, 128:256] = 0
    x[20] = torch.arange(600) % 25 * 0.25 - 3
    x[20, ::16] = 6
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("fmt", judge.FORMATS)
def test_rounding_gives_the_trainers_bits(fmt, role, dtype):
    for x in (numbers(dtype), numbers(dtype)[10:280, 64:]):
        ours, theirs = judge.rounded(x, fmt, role), fake_quantize(x, fmt, role=role, dim=1)
        assert ours.dtype == theirs.dtype == dtype
        bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
        assert torch.equal(ours.view(bits), theirs.contiguous().view(bits))
        assert not torch.equal(ours, x)


def test_it_shares_no_code_with_the_trainer():
    code = (
        "import sys; from examples.study import judge; print([m for m in sys.modules if m.startswith('megatron_snip')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def folder(tmp_path):
    """A small model with its tokenizer and texts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for i, name in enumerate(judge.TEXTS.values()):
        drawn = torch.randint(0, 64, (900,), generator=torch.Generator().manual_seed(i))
        (tmp_path / name).write_text(" ".join(f"w{i}" for i in drawn.tolist()))
    return tmp_path


def told(folder, capsys, *plans):
    judge.main([str(folder), *map(str, plans), "--tokens", "512", "--length", "128", "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_judges_each_linear_alone(folder, capsys):
    _, *rows = told(folder, capsys, "--alone", "fp4", "--texts", "code")
    assert len(rows) == 14 and all(row["increase"].keys() == {"code", "all"} for row in rows)
    name = "layers.1.mlp.down_proj"
    (found,) = [row["increase"]["all"] for row in rows if row["plan"] == f"{name}=fp4"]
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    x = judge.sequences_of(folder, judge.TEXTS["code"], 512, 128)
    before = judge.losses(model, x)
    with judge.in_formats(model, {name: "fp4"}):
        assert found == list(judge.mean_and_error(judge.losses(model, x) - before)) and found[0] != 0


def test_drawn_labels_give_the_curvature_behind_the_last_linear(folder, capsys):
    name = "layers.1.mlp.down_proj"  # its output at a token changes no other token's logits
    sampled_labels.main([str(folder), name, "--tokens", "512", "--length", "128", "--format", "fp8"])
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    rows = line["sequences"]
    assert (line["linear"], line["format"], len(rows)) == (name, "fp8", 8)
    for row in rows:  # dY is small: the odd part is what a gradient says
        assert row["rounded"] - row["even part"] == pytest.approx(row["first order"], rel=0.02, abs=1e-7)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    x = torch.cat([judge.sequences_of(folder, file, 512, 128) for file in judge.TEXTS.values()])[:, :-1]
    with torch.no_grad():
        logits = model(x).logits
        with judge.in_formats(model, {name: "fp8"}):
            change = model(x).logits - logits
    p = logits.softmax(-1)
    variance = (p * change**2).sum(-1) - (p * change).sum(-1) ** 2
    assert sum(row["drawn labels"] for row in rows) / 8 == pytest.approx(float(variance.mean()) / 2, rel=0.25)
    assert rows[0]["drawn labels"] != rows[0]["the text's labels"] and 0 <= rows[0]["heaviest token"] < 128
    sampled_labels.main([str(folder), "--tokens", "512", "--length", "128", "--format", "fp8"])
    every = {each["linear"]: each["sequences"] for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(every) == 14 and every[name] == [
        {key: pytest.approx(value, rel=1e-4) for key, value in row.items() if key not in ("rounded", "even part")}
        for row in rows
    ]
    with pytest.raises(SystemExit):
        sampled_labels.main([str(folder), "layers.9.mlp.down_proj"])
    assert "has no linear layers.9.mlp.down_proj; it has layers.0.self_attn.q_proj" in capsys.readouterr().err


def test_it_judges_plans(folder, capsys):
    names = [f"layers.{i}.{kind}" for i in range(2) for kind in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    half = {name: LinearPrecision.parse("fp4/bf16/bf16" if "mlp" in name else "bf16/fp4/fp4") for name in names}
    for name, plan in (
        ("all", Plan.uniform(names, "fp4")),
        ("half", Plan(0, half)),
        ("none", Plan.uniform(names, "bf16")),
    ):
        plan.save(folder / f"{name}.json")
    halved = judge.formats_of(str(folder / "half.json"), names)
    assert halved == {name: "fp4" if "mlp" in name else "bf16" for name in names}
    plans = ("fp4", "fp8", folder / "all.json", folder / "half.json", folder / "none.json")
    base, fp4, fp8, every, some, none = told(folder, capsys, *plans)
    assert set(base["loss"]) == {"prose", "code"} and 3 < base["loss"]["code"][0] < 9
    assert every["increase"] == fp4["increase"]
    assert none["increase"] == {key: [0.0, 0.0] for key in ("prose", "code", "all")}
    sizes = [abs(row["increase"]["all"][0]) + row["increase"]["all"][1] for row in (fp8, some, fp4)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    prose, code, both = (fp4["increase"][name][0] for name in ("prose", "code", "all"))
    assert both == pytest.approx((prose + code) / 2)


def test_the_increase_is_that_of_rounded_operands(folder):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    x = judge.sequences_of(folder, judge.TEXTS["prose"], 256, 128)
    before = judge.losses(model, x)
    with judge.in_formats(model, {"layers.1.mlp.down_proj": "fp4"}):
        during = judge.losses(model, x)
    assert torch.equal(judge.losses(model, x), before)
    linear = model.model.layers[1].mlp.down_proj
    weight = linear.weight.detach().clone()
    linear.weight.data = fake_quantize(weight, "fp4", role="weight", dim=1)
    linear.register_forward_pre_hook(lambda _, given: fake_quantize(given[0][0], "fp4", role="input", dim=1)[None])
    assert torch.equal(judge.losses(model, x), during) and not torch.equal(during, before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "no plan file"),
        ("[", "no plan file"),
        ('{"linears": {"layers.0.x_proj": {"fprop": "fp4"}}}', "plan of 1 linears"),
    ],
)
def test_what_is_no_plan_of_the_model_is_named(folder, content, said):
    (folder / "p.json").write_text(content)
    with pytest.raises(SystemExit, match=said):
        judge.main([str(folder), str(folder / "p.json"), "--tokens", "256", "--length", "128"])


def test_too_little_text_is_named(folder):
    with pytest.raises(SystemExit, match="has 900 tokens"):
        judge.main([str(folder), "fp8", "--tokens", "2048"])
