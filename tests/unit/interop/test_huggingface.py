"""Our logits are those of transformers' LlamaForCausalLM on the same weights."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.config import ModelConfig
from megatron_snip.interop.huggingface import hf_config, load_hf_weights, to_hf_names
from megatron_snip.model.llama import Build, LlamaStage
from megatron_snip.parallel.tensor import Region

transformers = pytest.importorskip("transformers")

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
    stage = LlamaStage(build, range(m.num_layers), first=True, last=True, tied=tied, recompute=False)
    stage.allocate()
    return stage


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, lone_mesh):
    options, tied = CASES[case]
    m = ModelConfig(**(BASE | options))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**hf_config(m, tied=tied), attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    for p in theirs.parameters():  # transformers' own initialisation leaves logits near zero
        torch.nn.init.normal_(p, std=0.15)
    stage = make_stage(m, lone_mesh, tied=tied)
    load_hf_weights(stage, {k: v for k, v in theirs.state_dict().items() if not (tied and "lm_head" in k)})
    tokens = torch.randint(0, 300, (2, 128))
    with torch.no_grad():
        expected = theirs(tokens).logits
        got = stage.logits(stage.hidden(tokens, torch.tensor([0, 1])))
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5


def test_names_round_trip_into_transformers(lone_mesh):
    m = ModelConfig(**BASE)
    stage = make_stage(m, lone_mesh, tied=False)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(m, tied=False)))
    theirs.load_state_dict(to_hf_names(stage.state_dict()), strict=True)


def test_errors_name_the_tensor(lone_mesh):
    stage = make_stage(ModelConfig(**BASE), lone_mesh, tied=False)
    weights = to_hf_names(stage.state_dict())
    with pytest.raises(ValueError, match="embed_tokens.weight: the checkpoint has None"):
        load_hf_weights(stage, {k: v for k, v in weights.items() if "embed" not in k})
    with pytest.raises(ValueError, match="transformer.wte is no weight"):
        load_hf_weights(stage, {"transformer.wte": torch.zeros(1)})
