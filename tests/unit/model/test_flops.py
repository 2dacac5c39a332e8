"""FLOPs and parameters, counted again by hand."""

from __future__ import annotations

import pytest

from megatron_snip.config import ModelConfig
from megatron_snip.model.flops import iteration_flops, parameters

LLAMA_7B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, seq_length=4096, vocab_size=32000
)
LLAMA_3_8B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    seq_length=8192, vocab_size=128256,
)  # fmt: skip


def test_published_parameter_counts():
    assert parameters(LLAMA_7B, tied=False) == 6_738_415_616
    assert parameters(LLAMA_3_8B, tied=False) == 8_030_261_248
    assert parameters(LLAMA_7B, tied=False) - parameters(LLAMA_7B, tied=True) == 32000 * 4096


def test_flops_are_two_a_multiply_add_and_thrice_forward():
    """Linears and head 2 FLOPs a parameter; causal attention QK^T and AV, half of S^2 each."""
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    forward = 4096 * 2 * (linears + 32000 * 4096) + 32 * 2 * 2 * (4096 * 4096 / 2) * 4096
    assert iteration_flops(LLAMA_7B, 3) == pytest.approx(3 * 3 * forward, rel=1e-12)


def test_heads_of_their_own_width():
    """Qwen3-0.6B: 16 heads of 128 channels over a residual stream of 1024, 0.60 billion parameters as published."""
    m = ModelConfig(
        model_name="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
        num_query_groups=8, kv_channels=128, seq_length=4096, vocab_size=151936,
    )  # fmt: skip
    linears = 28 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024)
    assert parameters(m, tied=True) == 28 * (2 * 1024 + 2 * 128) + 1024 + linears + 151936 * 1024 == 596_049_920
    forward = 4096 * 2 * (linears + 151936 * 1024) + 28 * 2 * 2 * (4096 * 4096 / 2) * 2048
    assert iteration_flops(m, 3) == pytest.approx(3 * 3 * forward, rel=1e-12)
