"""What `check` refuses before anything is built, and what `build` makes."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.formats.element import E2M1
from megatron_snip.formats.format import _FORMATS, Format
from megatron_snip.model.llama import LLAMA
from megatron_snip.model.spec import MODELS
from megatron_snip.quant import LINEAR_IMPLS, LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train import setup
from megatron_snip.train.setup import build, check


@pytest.fixture
def config(tiny):
    return Config().replace(**tiny)


def refused(config: Config, world: int = 1) -> str:
    with pytest.raises(ValueError) as info:
        check(config, world)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_good_options_pass_and_get_their_vocabulary(config, tmp_path):
    assert check(config, 1) == (config, None)
    assert "--tokenizer-type NullTokenizer needs --vocab-size" in refused(config.replace(vocab_size=None))
    small = tokenizer(tmp_path, 40)
    filled, _ = check(config.replace(vocab_size=None, **small), 1)
    assert filled.model.vocab_size == 40 and filled.model.padded_vocab_size == 128
    roomy, _ = check(config.replace(vocab_size=100, **small), 1)
    assert roomy.model.vocab_size == 100, "a model may have more ids than the tokenizer"


def tokenizer(folder, size: int) -> dict[str, str]:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"</s>": 0} | {f"w{i}": i for i in range(1, size)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="</s>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "snip"])
def test_a_gpu_that_is_not_there(config, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = config.replace(precision=precision, distributed_backend="nccl", device="auto")
    assert refused(asked) == "--distributed-backend nccl needs a GPU, and there is none; use gloo"


def test_a_tokenizer_with_more_ids_than_the_model(config, tmp_path):
    said = refused(config.replace(vocab_size=39, **tokenizer(tmp_path, 40)))
    assert said == "the tokenizer has 40 tokens, but --vocab-size is 39; raise it or drop it"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name": "qwen9"}, ["--model-name qwen9 is unknown; known: ", *MODELS]),  # in any order
        ({"tokenizer_type": "Other"}, ["--tokenizer-type Other is unknown; use one of", "NullTokenizer"]),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, ["needs --tokenizer-model"]),
        ({"precision": "fp5"}, ["--precision fp5 is unknown; known: bf16", "fp4", "fp8", "plan, snip"]),
        ({"precision": "fp4/fp8"}, ["--precision fp4/fp8 is unknown"]),
        ({"linear_impl": "magic"}, ["--linear-impl magic is unknown; known: auto", "emulated"]),
        ({"linear_impl": "scaled_mm", "precision": "fp8"}, ["--linear-impl scaled_mm cannot run fp8", "or emulated"]),
        (
            {"linear_impl": "transformer_engine", "precision": "bf16", "compile": True},
            ["--compile does not go with --linear-impl transformer_engine; use --linear-impl auto or emulated"],
        ),
        ({"precision": "snip", "snip_objective": "luck"}, ["unknown objective 'luck'; known: snip"]),
        ({"precision": "snip", "snip_options": "fp8,fp5"}, ["fp5", "fp8"]),
        ({"precision": "snip", "snip_warmup_precision": "fp5"}, ["--snip-warmup-precision fp5: ", "fp8"]),
        ({"precision": "snip", "snip_options": "fp8"}, ["--snip-target 0.75 is more than the options fp8 can save"]),
        (
            {"precision": "snip", "snip_options": "fp8,fp4/fp8/fp8"},
            ["--snip-target 0.75", "(0.333)", "lower it or add an option"],
        ),
        ({"precision": "snip", "snip_fix": "layers.1.*=fp8"}, ["--snip-fix pattern 'layers.1.*' matches no linear"]),
        ({"precision": "snip", "snip_fix": "layers.0.*=fp8"}, ["--snip-fix 'layers.0.*=fp8': target 0.75 is out of"]),
        ({"precision": "snip", "gemm_times": "none.json"}, ["none.json: cannot read the table of GEMM times"]),
        (
            {"linear_impl": "scaled_mm", "precision": "snip", "snip_target": 0.1, "snip_fix": "*.up_proj=nvfp4_plain"},
            ["--linear-impl scaled_mm cannot run", "or emulated"],
        ),
        ({"precision": "plan", "precision_plan": "none.json"}, ["none.json: cannot read the plan"]),
        ({"global_batch_size": 0}, ["--global-batch-size is missing or 0"]),
        ({"optimizer_impl": "apex"}, ["--optimizer-impl apex"]),
    ],
)
def test_choices_that_do_not_exist(changes, said, config):
    line = refused(config.replace(**changes))
    assert all(part in line for part in said), line


def test_a_vocabulary_that_tensor_parallel_cannot_split(config):
    odd = config.replace(vocab_size=129, make_vocab_size_divisible_by=1, tensor_model_parallel_size=2)
    assert refused(odd, 2) == (
        "the padded vocabulary 129 is not a multiple of tensor parallel 2; change --make-vocab-size-divisible-by"
    )
    loaded = refused(odd.replace(load="llama"), 2)
    assert "change --tensor-model-parallel-size" in loaded and "resize_token_embeddings" in loaded


def test_wandb_that_is_not_installed(config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--wandb-project needs wandb" in refused(config.replace(wandb_project="p"))


def test_plans_of_another_model_and_damaged_ones(config, tmp_path):
    path = tmp_path / "plan.json"
    planned = config.replace(precision="plan", precision_plan=str(path))
    names = LLAMA.linear_names(1)
    Plan.uniform(names, "fp4").save(path)
    assert check(planned, 1)[1] == Plan.load(path)
    Plan.uniform(LLAMA.linear_names(2), "fp4").save(path)
    assert "names no such linear: layers.1.mlp.down_proj" in refused(planned)
    Plan.uniform(names[1:], "fp4").save(path)
    assert "leaves out linears: layers.0.self_attn.q_proj" in refused(planned)
    Plan.uniform(names, "fp4").save(path)
    path.write_text(path.read_text().replace('"wgrad": "fp4"', '"wgrad": "fp5"', 1))
    assert f"{path}: field linears['layers.0.self_attn.q_proj']: wgrad" in refused(planned)
    path.write_text(path.read_text().replace("fp5", "fp8", 1))
    assert f"{path}: field hash" in refused(planned)


def parts_of(config: Config) -> setup.Parts:
    config, plan = check(config, 1)
    return build(config, runtime.start("gloo", 1.0), plan)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp4", "fp8/fp4/bf16"])
def test_a_precision_is_every_linears(precision, config, lone_mesh):
    parts = parts_of(config.replace(precision=precision))
    assert parts.linears.keys() == set(LLAMA.linear_names(1)) and parts.coordinator is None
    assert {linear.precision for linear in parts.linears.values()} == {LinearPrecision.parse(precision)}
    assert {linear.impl for linear in parts.linears.values()} <= set(LINEAR_IMPLS)


def test_a_plan_is_its_linears_and_snip_begins_with_its_warm_up(config, lone_mesh, tmp_path):
    names = LLAMA.linear_names(1)
    linears = {name: LinearPrecision.parse(["fp4", "fp8/fp4/bf16"][i % 2]) for i, name in enumerate(names)}
    plan = Plan.by_hand(linears, setup.snip_shapes(config))
    plan.save(tmp_path / "plan.json")
    parts = parts_of(config.replace(precision="plan", precision_plan=str(tmp_path / "plan.json")))
    assert {name: linear.precision for name, linear in parts.linears.items()} == plan.linears
    parts = parts_of(config.replace(precision="snip", snip_warmup_precision="fp8", snip_options="fp8,fp4"))
    assert {str(linear.precision) for linear in parts.linears.values()} == {"fp8"}
    assert parts.coordinator is not None and parts.coordinator.probe.formats == ["fp4", "fp8"]
    assert [shape.name for shape in parts.coordinator.shapes] == names


def test_auto_options_are_resolved_where_plans_are_made(config, monkeypatch):
    assert check(config, 1)[0].snip.snip_options == "auto"
    planned = config.replace(precision="snip")
    assert check(planned, 1)[0].snip.snip_options == "fp8,fp4"
    assert check(planned.replace(snip_options="mxfp8,fp4"), 1)[0].snip.snip_options == "mxfp8,fp4"
    monkeypatch.setattr(setup, "_device", lambda config: torch.device("cuda", 7))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert check(planned, 1)[0].snip.snip_options == "mxfp8,nvfp4"


def test_the_start_tells_once_who_multiplies(config, lone_mesh, caplog):
    with caplog.at_level(logging.INFO, "megatron_snip"):
        parts_of(config.replace(precision="snip", snip_warmup_precision="bf16"))
    lines = [line for line in caplog.messages if line.startswith(("GEMMs in", "plans choose"))]
    assert [line.split(" (")[0] for line in lines] == [
        "plans choose from fp8,fp4", "GEMMs in bf16: torch", "GEMMs in fp4: emulated", "GEMMs in fp8: emulated",
    ]  # fmt: skip
    assert "tensor cores need a Hopper GPU, the device is cpu" in lines[2]


def test_a_gather_of_codes_without_shards_is_told(config, lone_mesh, caplog):
    parts = parts_of(config.replace(precision="fp8", fp8_param_gather=True))
    (line,) = (line for line in caplog.messages if "--fp8-param-gather" in line)
    assert line.startswith("--fp8-param-gather has no effect: weights are not sharded")
    assert parts.stepper.pipeline.gathers is None


def test_stages_of_linears_are_pipeline_processes(config):
    deep = config.replace(num_layers=8, pipeline_model_parallel_size=2)
    stages = [shape.stage for shape in setup.snip_shapes(deep)[::7]]
    assert stages == [0, 0, 0, 0, 1, 1, 1, 1]
    chunked = deep.replace(num_layers_per_virtual_pipeline_stage=2)
    stages = [shape.stage for shape in setup.snip_shapes(chunked)[::7]]
    assert stages == [0, 0, 1, 1, 0, 0, 1, 1]
    uneven = deep.replace(decoder_first_pipeline_num_layers=6, num_virtual_stages_per_pipeline_rank=2)
    stages = [shape.stage for shape in setup.snip_shapes(uneven)[::7]]
    assert stages == [0, 0, 0, 1, 0, 0, 0, 1]


def test_the_output_layer_is_counted_where_it_is(config):
    """Though the last stage has no blocks: with its process's last linear, or with none where that has none."""
    cut = config.replace(num_layers=3, pipeline_model_parallel_size=2, account_for_loss_in_pipeline_split=True)
    attention, *_ = found = [
        [shape.other_flops for shape in setup.snip_shapes(each)[6::7]]
        for each in (
            cut.replace(vocab_size=None), cut, cut.replace(num_virtual_stages_per_pipeline_rank=2),
            cut.replace(pipeline_model_parallel_size=4),
        )
    ]  # fmt: skip
    assert attention[0] > 0 and len(set(attention)) == 1
    output = 2 * config.model.padded_vocab_size * config.model.hidden_size
    beyond = [[flops - attention[0] for flops in each] for each in found]
    assert beyond == [[0, 0, 0], [0, 0, output], [0, output, 0], [0, 0, 0]]


def test_shapes_of_the_coordinator_are_the_weights(config, lone_mesh):
    parts = parts_of(config.replace(precision="snip", num_query_groups=1, ffn_hidden_size=384))
    assert parts.coordinator is not None
    for shape in parts.coordinator.shapes:
        weight = parts.linears[shape.name].weight
        assert (shape.out_features, shape.in_features) == tuple(weight.shape), shape.name


def test_weights_depend_on_seed_and_name_alone(config, lone_mesh):
    one = parts_of(config.replace(num_layers=2)).optimizer.parameters
    other = parts_of(config.replace(num_layers=2, lr=0.5, global_batch_size=8, precision="fp4")).optimizer.parameters
    assert all(torch.equal(one[name], other[name]) for name in one)
    deeper = parts_of(config.replace(num_layers=3)).optimizer.parameters
    assert torch.equal(one["layers.1.mlp.up_proj.weight"], deeper["layers.1.mlp.up_proj.weight"])
    seeded = parts_of(config.replace(num_layers=2, seed=5)).optimizer.parameters
    assert not torch.equal(one["layers.1.mlp.up_proj.weight"], seeded["layers.1.mlp.up_proj.weight"])
    assert not torch.equal(one["layers.0.mlp.up_proj.weight"], one["layers.1.mlp.up_proj.weight"])


def test_tensors_of_a_checkpoint_are_weights_and_moments(config, lone_mesh):
    parts = parts_of(config)
    names = list(parts.optimizer.parameters)
    wanted = {f"model.{name}" for name in names}
    wanted |= {f"optim.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")}
    assert parts.tensors().keys() == wanted


def test_blocks_that_a_layout_cuts_are_told(config, caplog, monkeypatch):
    """tp 2 leaves k_proj 64 rows of 128; q_proj's 128 rows are 64 too."""
    from types import SimpleNamespace as Some

    linears = {
        f"layers.0.{name}": Some(out_features=n, in_features=k, split_dim=d)
        for name, n, k, d in [("self_attn.k_proj", 128, 512, 0), ("mlp.up_proj", 512, 512, 0),
                              ("self_attn.o_proj", 512, 384, 1)]
    }  # fmt: skip
    monkeypatch.setitem(_FORMATS, "wide", Format("wide", E2M1, tile=256, weight_block=None))

    def told(config: Config, tp: int = 2) -> list[str]:
        parts = Some(mesh=Some(tp=Some(size=tp)), linears=linears)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="megatron_snip"):
            setup._warn_about_cut_blocks(config, parts, None)
        return caplog.messages

    (line,) = told(config.replace(precision="fp4"))
    assert line.startswith("tensor parallel 2 cuts the 128-wide scale blocks of k_proj, o_proj: ")
    for quiet in (config, config.replace(precision="mxfp8"), config.replace(precision="nvfp4")):
        assert told(quiet) == []
    assert told(config.replace(precision="fp4"), tp=1) == []
    line, *more = told(config.replace(precision="wide", seq_length=512))
    assert "the 256-wide scale blocks of k_proj, o_proj:" in line and more == []
    cut = told(config.replace(precision="wide", seq_length=512, context_parallel_size=2), tp=1)
    assert [line.split(" do not")[0] for line in cut] == ["wgrad's tiles of 256 tokens in wide"]


def test_defaults_are_filled_in_for_the_record(config):
    filled = config.with_defaults()
    assert (filled.model.num_query_groups, filled.model.kv_channels) == (2, 64)
    assert config.replace(num_query_groups=1).with_defaults().model.num_query_groups == 1
