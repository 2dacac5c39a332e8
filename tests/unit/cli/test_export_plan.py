"""tools/export_plan.py: what it writes is read by the programs that it is for, where they run on a CPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_snip.cli.export_plan import main
from megatron_snip.config import ModelConfig
from megatron_snip.interop.exports import MEGATRON_MODULES, TARGETS
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan

BLOCKS = 12
SHAPES = LLAMA.linear_shapes(ModelConfig(num_layers=BLOCKS, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2))


@pytest.fixture
def save(tmp_path):
    """Save a plan in which linears take options in turn, or by kind -> its path."""

    def make(*options: str, **kinds: str):
        each = {s.name: kinds.get(s.kind, options[i % len(options)]) for i, s in enumerate(SHAPES)}
        plan = Plan.by_hand({name: LinearPrecision.parse(option) for name, option in each.items()}, SHAPES)
        plan.save(tmp_path / "plan.json")
        return tmp_path / "plan.json"

    return make


@pytest.fixture
def neighbours(request, monkeypatch):
    """Call it with what a test needs to have it on the path, or skip."""

    def find(*wanted: str) -> Path:
        if not (given := request.config.getoption("--neighbours")):
            pytest.skip(f"needs --neighbours DIR with {' '.join(wanted)} (tests/neighbours.sh)")
        monkeypatch.syspath_prepend(given)
        return Path(given)

    return find


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
    out = export(save("nvfp4", "mxfp8", "bf16"), "megatron", *words)
    plan = Plan.load(out.parent / "plan.json")
    assert sorted(path.name for path in out.iterdir()) == [f"stage_{stage}.yaml" for stage in range(stages)]
    seen = set()
    for stage in range(stages):
        recipe = recipes.RecipeConfig.from_yaml_file(str(out / f"stage_{stage}.yaml"))
        for local in range(lengths[stage]):
            for module in {*MEGATRON_MODULES.values()}:
                name = f"decoder.layers.{local}.{module}"
                context = recipes.MatchContext(module_path=name, layer_number=local)
                matched = [matcher.match(context) for matcher in recipe.matchers]
                (key,) = [key for key in matched if key is not None]
                block = sum(lengths[:stage]) + local
                ours = [plan.linears[s.name] for s in SHAPES if s.block == block and MEGATRON_MODULES[s.kind] == module]
                most = next(f for f in ("bf16", "mxfp8", "nvfp4") if LinearPrecision.uniform(f) in ours)
                assert key == most, "the most precise of those that are one there"
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
    """GEMMs keep their formats with Transformer Engine 2.19; linears that are one module have one precision."""
    plan = save("fp8", q="fp4/fp8/fp4", gate="fp4", up="fp8")
    fused = f"note: {2 * BLOCKS} modules of several linears in different formats take the most precise"
    share = "; make the plan with --snip-granularity fused first, which gives such linears one precision"
    gemms = f"note: {BLOCKS} linears whose GEMMs differ take their most precise format"
    export(plan, "megatron", "--for-version", "2.18")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"note: 0.00% of the FP4 GEMMs stay in FP4 (by number; name the model for FLOPs){share}"
    assert told[1:] == [
        gemms,
        fused.replace(str(2 * BLOCKS), str(BLOCKS)),
        f"note: {4 * BLOCKS} modules in fp8 become fp8_pow2: its scales are powers of two",
    ]
    export(plan, "megatron", "--for-version", "2.19")
    custom = (
        f"note: {4 * BLOCKS} modules need Transformer Engine 2.19 or newer and the folder of snip_recipes.py on "
        "PYTHONPATH; --for-version 2.18 writes one recipe for a module"
    )
    assert capsys.readouterr().err.splitlines() == [told[0], fused, custom]
    export(save("mxfp8", down="nvfp4"), "megatron")
    assert capsys.readouterr().err == ""


def test_the_share_that_is_left_counts_flops_if_the_model_is_known(save, capsys):
    """Of q, k, v, gate, up and down in FP4, k and up are lost to fusing, and q, v and gate with them."""
    path = save("fp8", **dict.fromkeys(("q", "v", "gate", "down"), "fp4"))
    plan, shapes = Plan.load(path), {shape.name: shape for shape in SHAPES}
    flops = {name: shape.gemm_flops for name, shape in shapes.items()}
    left = sum(flops[n] for n in flops if n.endswith("down_proj")) / sum(flops.values())
    model = {"num-layers": BLOCKS, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 2}
    words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    out = export(path, "megatron", *words)
    share = f"{left:.2%} of the linears' FLOPs stay in FP4, of {plan.achieved:.2%}"
    assert capsys.readouterr().err.startswith(f"note: {share}; make the plan with --snip-granularity fused first")
    head = (out / "stage_0.yaml").read_text().splitlines()[:2]
    assert head[0].endswith(f"{plan.achieved:.2%} in FP4.") and head[1] == f"# As written here, {share}."
    words[1] = "13"
    assert main([str(path), "--to", "megatron", "--output", str(out), *words]) == 2
    said = capsys.readouterr().err
    assert "leaves out linears: layers.12.mlp.down_proj" in said and said.count("\n") == 1


def test_a_plan_made_as_fused_loses_nothing(save, capsys):
    out = export(save("nvfp4", o="mxfp8", down="mxfp8"), "megatron")
    assert capsys.readouterr().err == "" and "As written here" not in (out / "stage_0.yaml").read_text()


def test_megatron_takes_a_function_for_each_precision_that_is_none_of_its_recipes(save):
    """By megatron-core's own reader of a recipe and of a function's path, and the functions' own file."""
    engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    resolve = pytest.importorskip("megatron.core.fp8_utils")
    yaml = pytest.importorskip("yaml")
    out = export(save("mxfp8", down="nvfp4/mxfp8/mxfp8", o="fp8"), "megatron")
    configs = yaml.safe_load((out / "stage_0.yaml").read_text())["configs"]
    recipes = {
        name: engine.TEQuantizationRecipe.parse_from_config(entry["training_recipe"]) for name, entry in configs.items()
    }
    assert {name: recipe.custom_recipe_factory for name, recipe in recipes.items()} == {
        "fp8": "snip_recipes.fp8",
        "mxfp8": None,
        "nvfp4__mxfp8__mxfp8": "snip_recipes.nvfp4__mxfp8__mxfp8",
    }
    module = load(out / "snip_recipes.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "snip_recipes", module)
        found = resolve._resolve_callable_from_python_import_path("snip_recipes.nvfp4__mxfp8__mxfp8")
    assert found is module.nvfp4__mxfp8__mxfp8


def test_modelopt_quantises_no_gradients(save, capsys):
    """So what counts is fprop's format, and a third of the FP4 is left."""
    out = export(save("nvfp4_plain", o="bf16", down="nvfp4_plain/mxfp8/mxfp8"), "modelopt")
    left = f"{(6 * BLOCKS) / (16 * BLOCKS):.2%} of the FP4 GEMMs stay in FP4 (by number; name the model for FLOPs)"
    assert capsys.readouterr().err.splitlines() == [
        f"note: {left}",
        f"note: {6 * BLOCKS} linears are quantised in forward only: ModelOpt has no setting for gradients",
    ]
    assert f"# As written here, {left}.\n# Forward only" in (out / "modelopt_config.py").read_text()
    export(save("bf16"), "modelopt")
    assert capsys.readouterr().err == ""


def test_torchao_s_filters_name_every_format_of_the_plan(save, capsys):
    out = export(save("nvfp4", "mxfp8", "bf16", o="fp4"), "torchao")
    said = (out / "torchao_filters.py").read_text()
    assert 'module_filter_fn=in_formats("mxfp8", "nvfp4", "fp4"))' in said
    assert 'filter_fn=in_formats("nvfp4", "fp4"))' in said
    assert capsys.readouterr().err.splitlines() == [
        f"note: {sum(s.kind != 'o' for s in SHAPES[::3])} in nvfp4: torchao's NVFP4 transforms nothing, and its "
        "weights' blocks are 1x16",
    ]
    assert "filter_fn=in_formats()" not in (export(save("bf16"), "torchao") / "torchao_filters.py").read_text()


@pytest.mark.parametrize("fuse_qkv", [True, False])
def test_torchtitan_converts_the_plan_s_linears(fuse_qkv, save, neighbours, monkeypatch):
    """By its own converters and model, of which a test needs no weights: torchtitan 0.3.0 with torchao's."""
    neighbours("torchtitan==0.3.0", "spmd_types==0.2.3")
    llama3 = importlib.import_module("torchtitan.models.llama3")
    for name in ("float8", "mx", "nvfp4"):
        module = importlib.import_module(f"torchtitan.components.quantization.{name}")
        monkeypatch.setattr(module, "has_cuda_capability", lambda major, minor: True)
    plan = save("nvfp4", down="bf16", o="mxfp8", up="fp8", gate="nvfp4/mxfp8/mxfp8")
    converters = load(export(plan, "torchtitan") / "torchtitan_converters.py").converters(model_compile_enabled=True)
    base = llama3.model_registry("debugmodel").model
    base.layers = llama3._build_llama3_layers(
        n_layers=BLOCKS, dim=256, n_heads=16, hidden_dim=768, rope=base.layers[0].attention.rope, fuse_qkv=fuse_qkv,
        attn_backend="flex",
    )  # fmt: skip
    for converter in converters:
        base = converter.build().convert(base)
    with torch.device("meta"):
        model = base.build()
    found = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    qkv = ["wqkv"] if fuse_qkv else ["wq", "wk", "wv"]
    kinds = {
        **{f"attention.qkv_linear.{name}": "NVFP4Linear" for name in qkv}, "attention.wo": "MXFP8Linear",
        "feed_forward.w1": "MXFP8Linear", "feed_forward.w2": "Linear", "feed_forward.w3": "Float8Linear",
    }  # fmt: skip
    expected = {f"layers.{block}.{name}": kind for block in range(BLOCKS) for name, kind in kinds.items()}
    assert found == {**expected, "lm_head": "Linear"}


def test_torchtitan_s_lists(save, monkeypatch):
    """Without the package: a format that no linear has is no converter, whose empty list would mean every linear."""
    made = types.ModuleType("torchtitan.components.quantization")
    for name in ("Float8", "MXFP8", "NVFP4"):
        config = types.SimpleNamespace(Config=lambda name=name, **how: (name, how))
        setattr(made, f"{name}LinearConverter", config)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    write = lambda path: load(export(path, "torchtitan") / "torchtitan_converters.py").converters  # noqa: E731
    assert write(save("bf16"))(model_compile_enabled=True) == []
    (only,) = write(save("fp8"))(model_compile_enabled=False)
    assert only == ("Float8", {"filter_fqns": ["lm_head"], "model_compile_enabled": False})
    (mx,) = write(save("bf16", o="mxfp8"))(model_compile_enabled=True)
    assert mx == (
        "MXFP8",
        {"fqns": [f"layers.{i}.attention.wo" for i in range(BLOCKS)], "model_compile_enabled": True},
    )


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
    config = load(export(save("nvfp4_plain", "mxfp8", "bf16"), "modelopt") / "modelopt_config.py").QUANT_CFG
    plan = Plan.load(save("nvfp4_plain", "mxfp8", "bf16"))
    first, *entries = config["quant_cfg"]
    assert config["algorithm"] == "max" and first == {"quantizer_name": "*", "enable": False}
    assert {entry["quantizer_name"]: entry["cfg"]["num_bits"] for entry in entries} == {
        f"model.{name}.{which}_quantizer": (2, 1) if str(p) == "nvfp4_plain" else (4, 3)
        for name, p in plan.linears.items() if str(p) != "bf16" for which in ("weight", "input")
    }  # fmt: skip


def test_modelopt_quantises_the_plan_s_linears(save, neighbours, recwarn):
    """By ModelOpt 0.47.0 itself, with no warning that the form is an old one."""
    neighbours("nvidia-modelopt==0.47.0", "omegaconf", "antlr4-python3-runtime==4.9.3", "pulp<4")
    mtq = importlib.import_module("modelopt.torch.quantization")
    recwarn.clear()
    config = load(export(save("nvfp4_plain", "mxfp8", "bf16", o="mxfp4"), "modelopt") / "modelopt_config.py").QUANT_CFG
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(BLOCKS))})})
    mtq.quantize(model, config, forward_loop=None)
    assert not [str(w.message) for w in recwarn if issubclass(w.category, DeprecationWarning)]
    found = {
        name: [(q.is_enabled, q.num_bits, q.block_sizes) for q in (m.weight_quantizer, m.input_quantizer)]
        for name, m in model.named_modules() if hasattr(m, "weight_quantizer")
    }  # fmt: skip
    plan = Plan.load(save("nvfp4_plain", "mxfp8", "bf16", o="mxfp4"))
    for name, precision in plan.linears.items():
        for enabled, bits, blocks in found.pop(f"model.{name}"):
            assert enabled == (str(precision) != "bf16"), name
            if enabled:
                sizes = {-1: 16 if str(precision) == "nvfp4_plain" else 32, "type": "dynamic"}
                assert (
                    bits == ((4, 3) if str(precision) == "mxfp8" else (2, 1)) and sizes.items() <= dict(blocks).items()
                )
    assert not found


def test_transformer_engine_before_2_19_gets_a_recipe_by_name(save, monkeypatch):
    """With a stand-in for the package, which needs a GPU."""
    recipe = types.SimpleNamespace(Float8BlockScaling=dict, MXFP8BlockScaling=list, NVFP4BlockScaling=set)
    common = types.ModuleType("transformer_engine.common")
    common.recipe = recipe
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    out = export(save("fp8", down="fp4", o="bf16", up="mxfp8"), "transformer-engine", "--for-version", "2.18")
    found = load(out / "te_recipes.py")
    name = "model.layers.3.{}".format
    assert [found.recipe_of(name(n)) for n in ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")] == [set(), [], {}]
    assert found.recipe_of(name("self_attn.o_proj")) is found.recipe_of("lm_head") is None


@pytest.mark.parametrize("target", ["megatron", "transformer-engine"])
def test_our_casts_keep_a_plan_s_formats(target, save, capsys):
    """All FP4 is left, and the files call our quantizer for it."""
    path = save("fp8", q="fp4", k="fp4", v="fp4", down="fp4/fp8/fp4")
    out = export(path, target, "--own-casts")
    said = capsys.readouterr().err
    modules = BLOCKS * (4 if target == "transformer-engine" else 2)
    assert f"note: {modules} modules need megatron_snip where they train" in said
    assert "stay in FP4" not in said and "become nvfp4" not in said
    text = (out / ("te_recipes.py" if target == "transformer-engine" else "snip_recipes.py")).read_text()
    assert "('fp4', 'fp8', 'fp4')" in text and "te_own_quantizer" in text
    export(path, target)
    assert "become nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["torchtitan"], "--own-casts does not go with --to torchtitan"),
        (["megatron", "--for-version", "2.18"], "--own-casts needs Transformer Engine 2.19 or newer, not 2.18"),
    ],
)
def test_our_casts_are_for_transformer_engine(words, why, save, capsys, tmp_path):
    assert main([str(save("fp4")), "--own-casts", "--output", str(tmp_path / "out"), "--to", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {why}") and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_version_that_is_not_known_is_refused(target, save, capsys, tmp_path):
    """Of the range's ends, those inside are written for."""
    path, known = save("mxfp8"), TARGETS[target]
    words = [str(path), "--to", target, "--output", str(tmp_path / "out"), "--for-version"]
    dotted = ["{}.{}".format(*version) for version in (known.first, known.last)]
    for version in (f"{known.last[0]}.{known.last[1] + 1}", f"{known.first[0] - 1}.99", "new"):
        assert main([*words, version]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --for-version {version}: this tool knows {known.distribution} {dotted[0]}")
        assert f"give --for-version {dotted[1]}" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert all(main([*words, f"{version}.1"]) == 0 for version in dotted)


def test_the_installed_version_counts(save, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"torchtitan": "0.2.2"}[name])
    words = [str(save("mxfp8")), "--to", "torchtitan", "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        "error: torchtitan 0.2.2 is installed: this tool knows torchtitan 0.3; install"
    )
    assert main([*words, "--for-version", "0.3"]) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_errors_are_one_line(target, save, capsys, tmp_path):
    path = save("mxfp6_e2m3")
    assert main([str(path), "--to", target, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: mxfp6_e2m3 has no counterpart there; make a plan of bf16, fp8")
        and said.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_of_another_model_is_one_line(target, capsys, tmp_path):
    """As `megatron_snip.attach` makes of any model."""
    Plan.uniform(["layers.0.attention.wq"], "fp8").save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--to", target, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "plan.json: 'layers.0.attention.wq' is not a linear of a Llama or Qwen3; give" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_stages_divide_the_blocks(save, capsys):
    path = save("mxfp8")
    assert main([str(path), "--to", "megatron", "--output", "x", "--pipeline-model-parallel-size", "5"]) == 2
    assert "--num-layers by pipeline parallel: 12 is not a multiple of 5; change one" in capsys.readouterr().err
