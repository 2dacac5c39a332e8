# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The Triton kernel of rotary positions; rotary.py launches it.

It gives torch's bits on an H200 and in Triton's interpreter, and compiles for Blackwell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.quant.kernels.triton_steps import to_bfloat16


# fmt: off
@triton.jit
def rotate_kernel(
    x, x_sample, x_head, x_token, out, out_sample, out_head, out_token, cos, sin, table_sample, table_token,
    heads, tokens, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
):
    """Rotates all heads of TOKENS tokens of x [samples, heads, tokens, 2 half], bf16, into out.  Last stride 1.

    cos, sin: [tokens, 2 half], per sample or shared.  Rounds where torch's operators round.
    BACK: x is the gradient of the rotated tensor.
    """
    blocks = tl.cdiv(tokens, TOKENS)
    sample, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * TOKENS
    row = tl.arange(0, TOKENS * HEADS)
    token, head = (first + row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    channel = tl.arange(0, HALF)[None, :]
    mask = ((token < tokens) & (head < heads))[:, None] & (channel < half)
    at = x + (sample.to(tl.int64) * x_sample + head * x_head + token * x_token)[:, None] + channel
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    angle = (sample.to(tl.int64) * table_sample + token * table_token)[:, None] + channel
    cos_low = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + half, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + half, mask=mask, other=0.0).to(tl.float32)
    if BACK:  # adds 0.0 as autograd does
        turned_low = to_bfloat16(high * sin_high) + 0.0
        turned_high = 0.0 - to_bfloat16(low * sin_low)
    else:
        turned_low = to_bfloat16(high * sin_low) * -1.0  # Triton 3.6 computes -x as 0 - x and loses the sign of 0
        turned_high = to_bfloat16(low * sin_high)
    low = to_bfloat16(low * cos_low) + turned_low
    high = to_bfloat16(high * cos_high) + turned_high
    to = out + (sample.to(tl.int64) * out_sample + head * out_head + token * out_token)[:, None] + channel
    tl.store(to, low.to(tl.bfloat16), mask=mask)
    tl.store(to + half, high.to(tl.bfloat16), mask=mask)
# fmt: on
