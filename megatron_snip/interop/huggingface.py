"""Weights and configuration of Hugging Face's LlamaForCausalLM.

Our parameters carry Hugging Face's names without the `model.` prefix, and the rotary channels stand in its
half-split order, so conversion renames and nothing else.  Source: transformers, models/llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError

_HEAD = "lm_head.weight"


def to_hf_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our whole weights, each [...], under Hugging Face's names."""
    return {name if name == _HEAD else f"model.{name}": tensor for name, tensor in weights.items()}


def from_hf_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; UserError for a name that LlamaForCausalLM does not have."""
    out = {}
    for name, tensor in weights.items():
        if name != _HEAD and not name.startswith("model."):
            raise UserError(f"{name} is no weight of LlamaForCausalLM; give the state of a Llama checkpoint")
        out[name.removeprefix("model.")] = tensor
    return out


def hf_config(m: ModelConfig, *, tied: bool) -> dict[str, Any]:
    """Keyword arguments of transformers' LlamaConfig for the same model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.rotary_base}
    if m.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": m.rope_scaling_factor,
            "low_freq_factor": m.rope_low_freq_factor,
            "high_freq_factor": m.rope_high_freq_factor,
            "original_max_position_embeddings": m.rope_original_max_position_embeddings,
        }
    return {
        "vocab_size": m.padded_vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.query_groups,
        "head_dim": m.head_dim,
        "max_position_embeddings": m.max_position_embeddings or m.seq_length,
        "rms_norm_eps": m.norm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


@torch.no_grad()
def load_hf_weights(stage: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a whole LlamaForCausalLM state, each tensor [...], into an unsharded stage that holds all blocks.

    A tied checkpoint may leave out the head.  UserError for a missing tensor or one of another shape.
    """
    ours = from_hf_names(weights)
    for name, parameter in stage.named_parameters():
        source = ours.get(name)
        if source is None or source.shape != parameter.shape:
            shape = None if source is None else list(source.shape)
            raise UserError(
                f"{name}: the checkpoint has {shape}, the model {list(parameter.shape)}; match the model options"
            )
        parameter.copy_(source)
