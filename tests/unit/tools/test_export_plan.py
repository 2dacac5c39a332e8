"""tools/export_plan.py: what it writes is read by the programs that it is for, where they run on a CPU."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
import types

import pytest
from torch import nn

from megatron_snip.config import ModelConfig
from megatron_snip.model.spec import linear_shapes
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan import Plan
from tools.export_plan import MEGATRON, TARGETS, TITAN, main

BLOCKS = 12
SHAPES = linear_shapes(ModelConfig(num_layers=BLOCKS, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2))


@pytest.fixture
def save(tmp_path):
    """Save a plan in which linears take options in turn, or by kind -> its path."""

    def make(*options: str, **kinds: str):
        each = {s.name: kinds.get(s.kind, options[i % len(options)]) for i, s in enumerate(SHAPES)}
        plan = Plan.by_hand({name: LinearPrecision.parse(option) for name, option in each.items()}, SHAPES)
        plan.save(tmp_path / "plan.json")
        return tmp_path / "plan.json"

    return make


def export(path, target: str, *more: str):
    assert main([str(path), "--to", target, "--output", str(path.parent / "out"), *more]) == 0
    return path.parent / "out"


def load(path) -> types.ModuleType:
    """A written Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lengths", [[12], [6, 6], [9, 3]])
def test_megatron_matches_each_module_exactly_once(lengths, save):
    """By megatron-core's own reader, on the names that its modules have in a stage."""
    recipes = pytest.importorskip("megatron.core.quantization.quant_config")
    stages = len(lengths)
    uneven = ["--decoder-last-pipeline-num-layers", str(lengths[-1])] if len({*lengths}) > 1 else []
    words = ["--pipeline-model-parallel-size", str(stages), *uneven]
    out = export(save("nvfp4_rht", "mxfp8", "bf16"), "megatron", *words)
    plan = Plan.load(out.parent / "plan.json")
    assert sorted(path.name for path in out.iterdir()) == [f"stage_{stage}.yaml" for stage in range(stages)]
    seen = set()
    for stage in range(stages):
        recipe = recipes.RecipeConfig.from_yaml_file(str(out / f"stage_{stage}.yaml"))
        for local in range(lengths[stage]):
            for module in {*MEGATRON.values()}:
                name = f"decoder.layers.{local}.{module}"
                context = recipes.MatchContext(module_path=name, layer_number=local)
                matched = [matcher.match(context) for matcher in recipe.matchers]
                (key,) = [key for key in matched if key is not None]
                block = sum(lengths[:stage]) + local
                ours = [plan.linears[s.name] for s in SHAPES if s.block == block and MEGATRON[s.kind] == module]
                most = next(f for f in ("bf16", "mxfp8", "nvfp4_rht") if LinearPrecision.uniform(f) in ours)
                assert key == most.removesuffix("_rht"), "the most precise of those that are one there"
                config = recipe.match(context).config
                assert config["transformer_engine_config_type"] == "TEQuantizationParams" and len(config) == 2
                assert config["training_recipe"] == {
                    "bf16": {},
                    "mxfp8": {"fp8_quantization_recipe": "mxfp8", **OVERRIDE},
                    "nvfp4": {"fp4_quantization_recipe": "nvfp4", **OVERRIDE},
                }[key]  # fmt: skip
                seen.add((block, module))
        assert recipe.match(recipes.MatchContext(module_path="decoder.layers.0.mlp", layer_number=0)) is None
    assert len(seen) == BLOCKS * 4


OVERRIDE = {"override_quantized_autocast": True, "override_nonquantized_autocast": True}


def test_what_cannot_be_said_is_told(save, capsys):
    export(save("fp8", q="fp4/fp8/fp4", gate="fp4", up="fp8"), "megatron")
    assert capsys.readouterr().err.splitlines() == [
        f"note: {BLOCKS} linears whose GEMMs differ take their most precise format",
        f"note: {BLOCKS} modules of several linears in different formats take the most precise",
        f"note: {4 * BLOCKS} modules in fp8 become blockwise: its scales are powers of two",
    ]
    export(save("mxfp8", down="nvfp4_rht"), "megatron")
    assert capsys.readouterr().err == ""


def test_modelopt_quantises_no_gradients(save, capsys):
    """And a linear in FP4 in fprop alone loses it."""
    out = export(save("nvfp4", o="bf16", down="nvfp4/mxfp8/mxfp8"), "modelopt")
    assert capsys.readouterr().err.splitlines() == [
        f"note: {BLOCKS} linears whose GEMMs differ take their most precise format",
        f"note: {6 * BLOCKS} linears are quantised in forward only: ModelOpt has no setting for gradients",
    ]
    assert "# Forward only" in (out / "modelopt_config.py").read_text()
    export(save("bf16"), "modelopt")
    assert capsys.readouterr().err == ""


def test_torchao_s_filters_name_every_format_of_the_plan(save, capsys):
    out = export(save("nvfp4_rht", "mxfp8", "bf16", o="fp4"), "torchao")
    said = (out / "torchao_filters.py").read_text()
    assert 'module_filter_fn=in_formats("mxfp8", "nvfp4_rht", "fp4"))' in said
    assert 'filter_fn=in_formats("nvfp4_rht", "fp4"))' in said
    assert capsys.readouterr().err.splitlines() == [
        f"note: {sum(s.kind != 'o' for s in SHAPES[::3])} in nvfp4_rht: torchao's NVFP4 transforms nothing, and its "
        "weights' blocks are 1x16",
    ]
    assert "filter_fn=in_formats()" not in (export(save("bf16"), "torchao") / "torchao_filters.py").read_text()


def test_torchtitan_skips_what_another_converter_takes(save):
    """As its filter does: a name is skipped if an entry is a part of it."""
    found = tomllib.loads((export(save("fp8", down="bf16", o="mxfp8"), "torchtitan") / "torchtitan.toml").read_text())
    for converter, kinds in (("float8", "q k v gate up"), ("mx", "o")):
        entries = found["quantize"]["linear"][converter]["filter_fqns"]
        names = {f"layers.{s.block}.{TITAN[s.kind]}": s.kind for s in SHAPES}
        taken = {name: kind for name, kind in names.items() if not any(entry in name for entry in entries)}
        assert {*taken.values()} == {*kinds.split()} and len(taken) == BLOCKS * len(kinds.split())
        assert any(entry in "output" for entry in entries)


def test_torchao_converts_the_plan_s_linears(save):
    """By its own converter for training, on a model with Hugging Face's names."""
    float8 = pytest.importorskip("torchao.float8")
    filters = load(export(save("fp4", "fp8", "bf16"), "torchao") / "torchao_filters.py")
    plan = Plan.load(save("fp4", "fp8", "bf16"))
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(BLOCKS))})})
    float8.convert_to_float8_training(model, module_filter_fn=filters.in_formats("fp8", "fp4"))
    converted = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert converted == {f"model.{name}" for name, p in plan.linears.items() if str(p) != "bf16"} and converted


def block() -> nn.Module:
    def linears(names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names.split()})

    return nn.ModuleDict(
        {"self_attn": linears("q_proj k_proj v_proj o_proj"), "mlp": linears("gate_proj up_proj down_proj")}
    )


def test_modelopt_names_both_quantisers(save):
    config = load(export(save("nvfp4", "mxfp8", "bf16"), "modelopt") / "modelopt_config.py").QUANT_CFG
    plan = Plan.load(save("nvfp4", "mxfp8", "bf16"))
    assert config["algorithm"] == "max" and config["quant_cfg"].pop("default") == {"enable": False}
    bits = {name: entry["num_bits"] for name, entry in config["quant_cfg"].items()}
    assert bits == {
        f"model.{name}.{which}_quantizer": (2, 1) if str(p) == "nvfp4" else (4, 3)
        for name, p in plan.linears.items() if str(p) != "bf16" for which in ("weight", "input")
    }  # fmt: skip


def test_transformer_engine_gets_a_recipe_by_name(save, monkeypatch):
    """With a stand-in for the package, which needs a GPU."""
    recipe = types.SimpleNamespace(Float8BlockScaling=dict, MXFP8BlockScaling=list, NVFP4BlockScaling=set)
    common = types.ModuleType("transformer_engine.common")
    common.recipe = recipe
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    found = load(export(save("fp8", down="fp4", o="bf16", up="mxfp8"), "transformer-engine") / "te_recipes.py")
    name = "model.layers.3.{}".format
    assert [found.recipe_of(name(n)) for n in ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")] == [set(), [], {}]
    assert found.recipe_of(name("self_attn.o_proj")) is found.recipe_of("lm_head") is None


@pytest.mark.parametrize("target", TARGETS)
def test_errors_are_one_line(target, save, capsys, tmp_path):
    path = save("mxfp6_e2m3")
    assert main([str(path), "--to", target, "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mxfp6_e2m3 has no counterpart there; make a plan of bf16, fp8") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_of_another_model_is_one_line(target, capsys, tmp_path):
    """As `megatron_snip.attach` makes of any model."""
    Plan.uniform(["layers.0.attention.wq"], "fp8").save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--to", target, "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "plan.json: 'layers.0.attention.wq' is no linear of a Llama's or Qwen3's blocks; give" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_stages_divide_the_blocks(save, capsys):
    path = save("mxfp8")
    assert main([str(path), "--to", "megatron", "--output", "x", "--pipeline-model-parallel-size", "5"]) == 1
    assert "--num-layers by pipeline parallel: 12 is not a multiple of 5; change one" in capsys.readouterr().err
