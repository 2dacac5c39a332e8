"""Qwen3's dense models: a Llama with a norm on each query and key head before rotation.

Source: arXiv 2505.09388; transformers, models/qwen3.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_snip.model.attention import Attention
from megatron_snip.model.build import Build, RMSNorm
from megatron_snip.model.llama import LLAMA, Block
from megatron_snip.model.spec import register


class Qwen3Attention(Attention):
    """Llama's attention with norms over the channels of each query and key head.  All heads share one weight [D]."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__(build, prefix)
        self.q_norm, self.k_norm = RMSNorm(build, of_heads=True), RMSNorm(build, of_heads=True)

    def queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, A, S, D] and k [B, G, S, D] -> the same shapes."""
        return self.q_norm(q), self.k_norm(k)


QWEN3 = register(
    replace(
        LLAMA,
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        block=lambda build, index: Block(build, index, Qwen3Attention),
        more_parameters=lambda m: LLAMA.more_parameters(m) + 2 * m.head_dim,
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    )
)
