"""Our logits are those of transformers' LlamaForCausalLM on the same weights."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.interop.huggingface import check_model, hf_config, hf_name, load_hf, model_options
from megatron_snip.model.llama import Build, LlamaStage
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
CASES = {
    "multi-head": ({}, False),
    "grouped-query": ({"num_query_groups": 2}, False),
    "one group": ({"num_query_groups": 1, "kv_channels": 32}, False),
    "rope scaling": ({"num_query_groups": 2, **LLAMA3}, False),
    "tied": ({"num_query_groups": 2, **LLAMA3}, True),
}


def make_stage(m: ModelConfig, mesh, *, tied: bool) -> LlamaStage:
    build = Build(m, mesh, Region(mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    stage = LlamaStage(build, range(m.num_layers), first=True, last=True, tied=tied)
    stage.allocate()
    return stage


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, lone_mesh, tmp_path):
    options, tied = CASES[case]
    m = ModelConfig(**(BASE | options))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**hf_config(m, tied=tied), attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    for p in theirs.parameters():  # transformers' own initialisation leaves logits near zero
        torch.nn.init.normal_(p, std=0.15)
    theirs.save_pretrained(tmp_path)
    check_model(tmp_path, dataclasses.replace(m, untie_embeddings_and_output_weights=not tied))
    stage = make_stage(m, lone_mesh, tied=tied)
    load_hf(tmp_path, dict(stage.named_parameters()))
    tokens = torch.randint(0, 300, (2, 128))
    with torch.no_grad():
        expected = theirs(tokens).logits
        got = stage.logits(stage.hidden(tokens, torch.tensor([0, 1])))
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5


def test_names_are_theirs(lone_mesh):
    m = ModelConfig(**BASE)
    stage = make_stage(m, lone_mesh, tied=False)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(m, tied=False)))
    theirs.load_state_dict({hf_name(name): tensor for name, tensor in stage.state_dict().items()}, strict=True)


def test_a_missing_tensor_is_named(lone_mesh, tmp_path):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = {hf_name(name): tensor.detach() for name, tensor in stage.named_parameters()}
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model.layers.1.mlp.up_proj.weight has shape None, the model's is \[160, 64\]"
    ):
        load_hf(tmp_path, dict(stage.named_parameters()))


def test_a_cut_file_is_one_line(lone_mesh, tmp_path):
    safetensors_torch.save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"its .safetensors cannot be read \(.*; copy them again"):
        load_hf(tmp_path, {"norm.weight": torch.zeros(64)})


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
    ("name", "value", "message"),
    [
        ("num_attention_heads", 2, "--num-attention-heads comes to 2"),
        ("vocab_size", 600, "--vocab-size comes to 600"),
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
