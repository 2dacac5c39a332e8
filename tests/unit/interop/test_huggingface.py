"""Our logits are those of transformers' classes on the same weights."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.interop.huggingface import (
    attention_of,
    check_model,
    check_weights,
    hf_config,
    is_hf_folder,
    load_hf,
    model_options,
)
from megatron_snip.model.build import Build
from megatron_snip.model.llama import LLAMA, LlamaStage
from megatron_snip.model.spec import MODELS, spec_of
from megatron_snip.parallel.tensor import Region

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

BASE = {
    "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 300, "make_vocab_size_divisible_by": 4,
}  # fmt: skip
LLAMA3 = {
    "use_rope_scaling": True, "rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 64,
    "rotary_base": 500000.0,
}  # fmt: skip
QWEN3 = {
    "model_name": "qwen3", "num_query_groups": 2, "kv_channels": 32, "rotary_base": 1e6, "norm_epsilon": 1e-6,
}  # fmt: skip
CASES = {
    "multi-head": ({}, False),
    "grouped-query": ({"num_query_groups": 2}, False),
    "one group": ({"num_query_groups": 1, "kv_channels": 32}, False),
    "rope scaling": ({"num_query_groups": 2, **LLAMA3}, False),
    "tied": ({"num_query_groups": 2, **LLAMA3}, True),
    "qwen3": (QWEN3, False),
    "qwen3 tied, multi-head": ({**QWEN3, "num_query_groups": 4}, True),
}


def make_stage(m: ModelConfig, mesh, *, tied: bool) -> LlamaStage:
    build = Build(m, mesh, Region(mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    stage = LlamaStage(build, range(m.num_layers), first=True, last=True, tied=tied)
    stage.allocate()
    for parameter in stage.parameters():  # its memory may hold what is not finite
        parameter.detach().fill_(0.5)
    return stage


def their_model(m: ModelConfig, *, tied: bool, **more):
    config = transformers.AutoConfig.for_model(m.model_name, **hf_config(m, tied=tied))
    return transformers.AutoModelForCausalLM.from_config(config, **more)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, lone_mesh, tmp_path):
    options, tied = CASES[case]
    m = ModelConfig(**(BASE | options))
    torch.manual_seed(0)
    theirs = their_model(m, tied=tied, attn_implementation="eager").float().eval()
    assert type(theirs).__name__ == spec_of(m).architecture
    for p in theirs.parameters():  # transformers' own initialisation leaves logits near zero
        torch.nn.init.normal_(p, std=0.15)
    theirs.save_pretrained(tmp_path)
    check_model(tmp_path, dataclasses.replace(m, untie_embeddings_and_output_weights=not tied))
    stage = make_stage(m, lone_mesh, tied=tied)
    load_hf(tmp_path, dict(stage.named_parameters()), spec_of(m))
    tokens = torch.randint(0, 300, (2, 128))
    with torch.no_grad():
        expected = theirs(tokens).logits
        got = stage.logits(stage.hidden(tokens, [0, 1]))
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["grouped-query", "qwen3"])
def test_attention_makes_of_q_k_and_v_what_o_reads(case):
    m = ModelConfig(**(BASE | CASES[case][0]))
    theirs = their_model(m, tied=False).eval()
    for name, p in theirs.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in name), std=0.3)
    seen = {}
    attention = theirs.model.layers[1].self_attn
    for kind in "qkv":
        attention.get_submodule(f"{kind}_proj").register_forward_hook(lambda _, x, y, k=kind: seen.update({k: y}))
    attention.o_proj.register_forward_pre_hook(lambda _, x: seen.update(o=x[0]))
    with torch.no_grad():
        theirs(torch.randint(0, 300, (2, 128)))
        attends = attention_of(theirs, {7: 128}.__getitem__)
        got = attends[1](*(seen[kind].flatten(0, 1) for kind in "qkv"), 7)
    assert len(attends) == 3 and (got - seen["o"].flatten(0, 1)).abs().max() <= 1e-5 * seen["o"].abs().max()


def test_a_new_kind_s_attention_in_transformers_is_not_taken_for_a_llama_s(monkeypatch):
    """Qwen2's has biases that no entry of its configuration tells of; its linears are judged at their own outputs."""
    monkeypatch.setitem(MODELS, "qwen2", dataclasses.replace(LLAMA, name="qwen2"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    assert attention_of(transformers.Qwen2ForCausalLM(config), {0: 128}.__getitem__) is None


def test_a_tied_model_with_an_output_layer_of_its_own_is_refused(lone_mesh, tmp_path):
    """transformers does not tie it, whatever config.json says; a copy of the embedding is left where it is."""
    m = ModelConfig(**BASE)
    model = their_model(m, tied=False)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight; set tie_word"):
        model_options(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    safetensors_torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert not model_options(tmp_path)["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize("case", ["multi-head", "qwen3"])
def test_names_are_theirs(case, lone_mesh):
    m = ModelConfig(**(BASE | CASES[case][0]))
    spec, stage = spec_of(m), make_stage(m, lone_mesh, tied=False)
    names = {spec.hf_name(name): tensor for name, tensor in stage.state_dict().items()}
    their_model(m, tied=False).load_state_dict(names, strict=True)


def test_a_missing_tensor_is_named(lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = {LLAMA.hf_name(name): tensor.detach() for name, tensor in stage.named_parameters()}
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"have no model.layers.1.mlp.up_proj.weight; download the missing files"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            lambda name: name.removeprefix("model."),
            r"no model.embed_tokens.weight; they have embed_tokens.weight, as",
        ),
        (lambda name: name.replace("lm_head", "x"), r"no lm_head.weight; .* or set tie_word_embeddings to true in its"),
    ],
)
def test_a_name_that_is_missing_has_a_way_out(names, message, lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = {names(LLAMA.hf_name(name)): tensor.detach() for name, tensor in stage.named_parameters()}
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


def test_a_tensor_that_two_files_have_is_refused(lone_mesh, tmp_path):
    """Of an older copy beside the shards, torch takes some tensors from one and some from the other."""
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = {LLAMA.hf_name(name): tensor.detach() for name, tensor in stage.named_parameters()}
    safetensors_torch.save_file(weights, tmp_path / "model-00001-of-00001.safetensors")
    load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)
    safetensors_torch.save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"norm.weight is in model-00001-of-00001.safetensors and in model.safetensors"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


def test_what_a_folder_has_beside_the_model_is_told(lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=True)
    weights = {LLAMA.hf_name(name): tensor.detach() for name, tensor in stage.named_parameters()}
    without = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    more = ("model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight")
    safetensors_torch.save_file(
        {**weights, **{name: torch.zeros(3) for name in (*without, *more)}}, tmp_path / "model.safetensors"
    )
    assert check_weights(tmp_path, dict(stage.named_parameters()), LLAMA) == [*more]


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "{", "[" * 10**5])
def test_a_configuration_that_is_no_object_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"{tmp_path}/config.json: .*; give the folder of a Llama"):
        model_options(tmp_path)


def weights_of(stage, **changed):
    weights = {LLAMA.hf_name(name): tensor.detach().clone() for name, tensor in stage.named_parameters()}
    return {**weights, **changed}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_refused(value, dtype, lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(stage).items()}
    weights["model.layers.1.mlp.up_proj.weight"][7, 3] = value
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight is not finite; give another model$"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


def test_a_double_beyond_floats_is_refused(lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    norm = torch.full((64,), 1e300, dtype=torch.float64)
    safetensors_torch.save_file(weights_of(stage, **{"model.norm.weight": norm}), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight is not finite"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_a_weight_in_another_type_is_refused(dtype, lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    norm = torch.ones(64).to(dtype)
    safetensors_torch.save_file(weights_of(stage, **{"model.norm.weight": norm}), tmp_path / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"model.norm.weight is stored in {name}; give the model's folder in BF16"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


def test_a_part_of_a_tensor_does_not_pass_for_the_whole(lone_mesh, tmp_path):
    """torch's reader takes the header's word for where a tensor stands, and would leave the rest as it was."""
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = weights_of(stage, **{"model.norm.weight": torch.ones(4)})
    offsets = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in weights.items()}
    offsets["model.norm.weight"] = {"saved_offsets": [60]}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors", metadata=about)
    with pytest.raises(UserError, match=r"model.norm.weight is a shard of a tensor"):
        load_hf(tmp_path, dict(stage.named_parameters()), LLAMA)


def test_a_pipe_among_the_weights_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors: cannot read the weights \(it is a pipe, not a file\)"):
        load_hf(tmp_path, {"norm.weight": torch.zeros(64)}, LLAMA)


def test_headers_of_millions_of_tensors_are_not_read(tmp_path):
    entry = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(400_000))
    header = f"{{{entry}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=r"the headers of its .safetensors say that they have more than 16 MiB"):
        load_hf(tmp_path, {"norm.weight": torch.zeros(64)}, LLAMA)


def test_a_cut_file_is_one_line(lone_mesh, tmp_path):
    safetensors_torch.save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"its .safetensors cannot be read \(.*; copy them again"):
        load_hf(tmp_path, {"norm.weight": torch.zeros(64)}, LLAMA)


#: As Llama 2's and Llama 3.1's config.json were written by transformers 4.
OLD = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": 300, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_older_configurations_are_read(tmp_path):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    plain = ModelConfig(**model_options(tmp_path))
    assert (plain.rotary_base, plain.use_rope_scaling, plain.query_groups, plain.head_dim) == (10000.0, False, 4, 16)
    assert plain.untie_embeddings_and_output_weights and plain.padded_vocab_size == 300
    more = {"rope_theta": 500000.0, "rope_scaling": scaling, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**OLD, **more}))
    scaled = ModelConfig(**model_options(tmp_path))
    assert (scaled.rotary_base, scaled.use_rope_scaling, scaled.rope_scaling_factor) == (500000.0, True, 8.0)
    assert scaled.query_groups == 2 and not scaled.untie_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": "16"}, "head_dim is '16': expected int . null, got str; correct the file"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected int <= 9999"),
        ({"hidden_size": None}, "hidden_size is None: expected int, got null"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads is 2.5: expected int . null, got float"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None: expected int"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5': expected float"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: expected float > 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false': expected bool"),
        ({"rope_theta": "big"}, "rope_theta is 'big': expected float . null"),
        ({"rope_scaling": [8]}, r"rope_scaling is \[8\]: expected object . null, got array"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_scaling.rope_type is \['yarn'\]: expected str . null"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "rope_scaling.factor is '8': expected float . null"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor of rope_type llama3 is missing"),
        ({"architectures": [["x"]]}, r"architectures\[0\] is \['x'\]: expected str, got array"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures is {'LlamaForCausalLM': 1}: expected array"),
        ({"hidden_act": ["silu"] * 10**5}, r"hidden_act is \[.{,80}\], but this package supports only 'silu'"),
        ({"quantization_config": {"quant_method": ["x"] * 10**5}}, "the weights are quantised .{,80}; give"),
    ],
)
def test_an_entry_of_another_type_is_named(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**OLD, **change}))
    with pytest.raises(UserError, match=message):
        model_options(tmp_path)


def test_a_qwen3_s_configuration_is_read(tmp_path):
    """What it leaves out has Qwen3Config's defaults, and what we do not have is refused."""
    found = {**OLD, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(found))
    m = ModelConfig(**model_options(tmp_path))
    assert (m.model_name, m.head_dim, m.query_groups, m.max_position_embeddings) == ("qwen3", 128, 2, 32768)
    assert (m.head_dim, m.max_position_embeddings) == (
        transformers.Qwen3Config().head_dim, transformers.Qwen3Config().max_position_embeddings,
    )  # fmt: skip
    with pytest.raises(UserError, match="--model-name comes to llama, but the model in .* has qwen3; give its own"):
        check_model(tmp_path, dataclasses.replace(m, model_name="llama"))
    (tmp_path / "config.json").write_text(json.dumps({**found, "use_sliding_window": True}))
    with pytest.raises(UserError, match="use_sliding_window is True, but this package supports only False"):
        model_options(tmp_path)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # as in Qwen3-0.6B-FP8
    (tmp_path / "config.json").write_text(json.dumps({**found, "quantization_config": quantised}))
    with pytest.raises(UserError, match=r"the weights are quantised \(fp8\); give the model's folder in BF16"):
        model_options(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**found, "architectures": ["GPT2LMHeadModel"]}))
    known = ", ".join(spec.architecture for spec in MODELS.values())
    with pytest.raises(UserError, match=f"architectures is .'GPT2LMHeadModel'., but only {known} can be read"):
        model_options(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_attention_heads", 2, "--num-attention-heads comes to 2"),
        ("vocab_size", 600, "--vocab-size comes to 600"),
        ("make_vocab_size_divisible_by", 128, "comes to 384, .* has 300; give --vocab-size 300 --make-vocab.*-by 4$"),
        ("num_query_groups", 2, "--num-query-groups comes to 2"),
        ("norm_epsilon", 1e-6, "--norm-epsilon comes to 1e-06"),
    ],
)
def test_another_model_is_refused(name, value, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    m = ModelConfig(**BASE, untie_embeddings_and_output_weights=True)
    check_model(tmp_path, m)
    with pytest.raises(UserError, match=message):
        check_model(tmp_path, dataclasses.replace(m, **{name: value}))


def test_a_model_without_safetensors_is_told(tmp_path):
    assert not is_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_hf_folder(tmp_path), "a run folder has one, too"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match=f"{tmp_path} holds the config.json of a model, but no .safetensors files; "):
        is_hf_folder(tmp_path)
