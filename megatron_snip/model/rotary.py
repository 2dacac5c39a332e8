"""Rotary positions, with Llama 3's scaling.  Source: arXiv 2104.09864, 2407.21783.

Shapes: B sequences, A heads, S tokens, D channels of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_snip.config import ModelConfig


def rotary_frequencies(m: ModelConfig) -> Tensor:
    """Angle per position of each channel pair, [D/2] float32, with Llama 3's scaling if asked."""
    freq = 1.0 / m.rotary_base ** (torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
    if not m.use_rope_scaling:
        return freq
    original = m.rope_original_max_position_embeddings
    turns = original * freq / (2 * math.pi)  # turns that a channel makes over the original length
    low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: leave alone
    return keep * freq + (1 - keep) * freq / m.rope_scaling_factor


def rotary_tables(m: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and channel, [S, D] each."""
    angles = torch.outer(torch.arange(m.seq_length, dtype=torch.float32), rotary_frequencies(m))
    angles = torch.cat([angles, angles], dim=-1).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split channel order: x [B, A, S, D], cos and sin [(B, 1,) S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
