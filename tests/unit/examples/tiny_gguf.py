"""Writes GGUF files of version 3, for the tests of what reads them; and a tiny Llama as one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
F32, Q4_1, Q8_0 = 0, 3, 8


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Kind and value, as gguf-py chooses kinds."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    each = _value(value[0])[:4]
    return struct.pack("<I", 9) + each + struct.pack("<Q", len(value)) + b"".join(_value(v)[4:] for v in value)


def packed(weight: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor [..., 32 n], and what they mean, number by number as ggml-quants.c has it."""
    if kind == F32:
        return weight.astype("<f4").tobytes(), weight.astype(np.float32)
    out, meant = b"", []
    for x in weight.reshape(-1, 32).astype(np.float32):
        if kind == Q8_0:
            d = np.float16(max(np.abs(x).max() / 127, 1e-4))
            q = [int(np.clip(round(float(v) / float(d)), -127, 127)) for v in x]
            out += struct.pack("<e32b", d, *q)
            meant += [float(d) * v for v in q]
        else:
            d, m = np.float16((x.max() - x.min()) / 15), np.float16(x.min())
            q = [int(np.clip(round((float(v) - float(m)) / float(d)), 0, 15)) for v in x]
            out += struct.pack("<ee16B", d, m, *(q[j] | q[j + 16] << 4 for j in range(16)))
            meant += [float(d) * v + float(m) for v in q]
    return out, np.array(meant, np.float32).reshape(weight.shape)


def write_gguf(
    path: Path, fields: Mapping[str, Any], tensors: Mapping[str, tuple[bytes, tuple[int, ...], int]]
) -> None:
    """tensors: name -> (bytes, shape with rows first, kind)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(_string(key) + _value(value) for key, value in fields.items())
    body = b""
    for name, (data, shape, kind) in tensors.items():
        body += bytes(-len(body) % 32)
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += data
    path.write_bytes(head + bytes(-len(head) % 32) + body)


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """``permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def bpe(texts: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Words, the special ones first, and merges of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = json.loads(tokenizer.to_str())["model"]
    return sorted(made["vocab"], key=made["vocab"].get), [tuple(merge) for merge in made["merges"]]


def fields_of(words: list[str], merges: list[tuple[str, str]], config: Any) -> dict[str, Any]:
    """Metadata as SmolLM2's file has it."""
    return {
        "general.architecture": "llama", "llama.block_count": config.num_hidden_layers,
        "llama.context_length": 8192, "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads, "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3 if word in SPECIAL else 1 for word in words],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def tensors_of(model: Any) -> dict[str, tuple[bytes, tuple[int, ...], int]]:
    """A tied transformers' Llama, as llama.cpp's converter lays it out, in F32."""
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
        "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
        "down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
    }  # fmt: skip
    found, c = {}, model.config
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    for name, weight in model.state_dict().items():
        *where, kind, _ = name.split(".")
        if kind == "lm_head":
            continue
        x = weight.float().numpy()
        x = side_by_side(x, heads[kind]) if kind in heads else x
        block = f"blk.{where[2]}." if "layers" in where else ""
        found[f"{block}{names[kind]}.weight"] = (packed(x, F32)[0], x.shape, F32)
    return found


def tiny_llama(words: int) -> Any:
    """A tied Llama with grouped queries whose weights BF16 holds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=100000.0,
        max_position_embeddings=8192, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
        p.data = p.data.bfloat16().float()
    return model
