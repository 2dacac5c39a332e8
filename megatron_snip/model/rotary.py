"""Rotary positions, with Llama 3's scaling.  Source: arXiv 2104.09864, 2407.21783.

Shapes: B sequences, A heads, S tokens, D channels per head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megatron_snip.config import ModelConfig
from megatron_snip.quant.kernels import triton_cast

# Elements of half heads per program, and the limit for the elements of all heads of one token.
_PROGRAM, _MOST = 2048, 16384


def rotary_frequencies(m: ModelConfig) -> Tensor:
    """Angle per position of each channel pair, [D/2] float32, with Llama 3's scaling if enabled."""
    freq = 1.0 / m.rotary_base ** (torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
    if not m.use_rope_scaling:
        return freq
    original = m.rope_original_max_position_embeddings
    turns = original * freq / (2 * math.pi)  # rotations of a channel over the original length
    low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: keep
    return keep * freq + (1 - keep) * freq / m.rope_scaling_factor


def rotary_tables(m: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and channel, [S, D] each."""
    angles = torch.outer(torch.arange(m.seq_length, dtype=torch.float32), rotary_frequencies(m))
    angles = torch.cat([angles, angles], dim=-1).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split channel order: x [B, A, S, D], cos and sin [(B, 1,) S, D]."""
    if torch.compiler.is_compiling():  # the compiler fuses it
        return _rotate(x, cos, sin)
    made: Tensor = _Rotate.apply(x, cos, sin)
    return made


class _Rotate(torch.autograd.Function):
    """One launch each way on a GPU instead of five and nine, with autograd's bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(grads[0], *ctx.saved_tensors, back=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """x [B, A, S, D] rotated by cos and sin [(B, 1,) S, D], or a gradient rotated back."""
    if fused(x, cos, sin):
        if isinstance(x, FakeTensor):
            made: Tensor = torch.ops.megatron_snip.rotate(x, cos, sin, back)
            return made
        return launch(x, cos, sin, back=back)
    return _rotate_back(x, cos, sin) if back else _rotate(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of ``_rotate``.  Like autograd it adds 0.0, which removes -0.0."""
    half = grad.shape[-1] // 2
    turned = grad * sin
    return grad * cos + torch.cat([turned[..., half:], -turned[..., :half]], dim=-1).add_(0.0)


def fused(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel supports x [B, A, S, D] and the tables: bf16 on a GPU, all heads of a token in one program."""
    return (
        triton_cast.on_nvidia(x)
        and x.dtype == cos.dtype == sin.dtype == torch.bfloat16
        and x.stride(-1) == cos.stride(-1) == 1
        and cos.stride() == sin.stride()
        and x.shape[-1] % 2 == 0
        and x.shape[1] * x.shape[-1] <= _MOST
    )


def launch(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """``_rotated`` in one launch.  The result has the strides of x [B, A, S, D]."""
    import triton

    from megatron_snip.model.rotary_kernel import rotate_kernel

    (samples, heads, tokens, channels), out = x.shape, torch.empty_like(x)
    padded_heads, padded_half = triton.next_power_of_2(heads), triton.next_power_of_2(channels // 2)
    together = max(1, _PROGRAM // (padded_heads * padded_half))  # tokens per program
    warps = max(1, min(32, together * padded_heads * padded_half // 256))  # 8 elements per thread, one load
    of_sample = cos.stride(0) if cos.ndim == 4 and cos.shape[0] > 1 else 0
    with torch.cuda.device_of(x):
        rotate_kernel[(samples * -(-tokens // together),)](
            x, *x.stride()[:3], out, *out.stride()[:3], cos, sin, of_sample, cos.stride(-2),
            heads, tokens, channels // 2, back, padded_heads, together, padded_half,
            num_warps=warps, **triton_cast.OPTIONS,
        )  # fmt: skip
    return out


@torch.library.custom_op("megatron_snip::rotate", mutates_args=())
def _rotate_op(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return _rotated(x, cos, sin, back=back)


@_rotate_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x)
