"""The random Hadamard transform, which spreads outliers over tokens before wgrad's operands are cast.

A group of 16 tokens [16, C] is multiplied by H diag(s) / 4, where H is the 16x16 Sylvester matrix and s are fixed
signs.  The matrix is orthogonal, and wgrad sums both operands over tokens, so G^T X stays the same up to rounding.
Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sec. 4.2; the signs and the rounding to x's
dtype are those of Transformer Engine's reference quantiser (custom_recipes/reference_nvfp4.py, get_wgrad_sign_vector).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.errors import UserError

LENGTH = 16
SIGNS = (1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0)


def check_tokens(x: Tensor) -> None:
    """Raise UserError if the tokens of x [T, C] are not whole groups."""
    if len(x) % LENGTH:
        raise UserError(
            f"random Hadamard transform: x has shape {list(x.shape)} and its {len(x)} tokens are no multiple of "
            f"{LENGTH}; change the sequence length or the batch, or choose a format without the transform"
        )


@torch.no_grad()
def hadamard(x: Tensor) -> Tensor:
    """``x`` [T, C] transformed in groups of 16 tokens: float32 sums in a fixed order, rounded to x.dtype.

    Adds and subtracts pairs in place of a GEMM, so that every device gives the same bits.  A NaN reaches its whole
    group; infinities become infinities or NaN.  Raises UserError if T is not a multiple of 16.
    """
    check_tokens(x)
    tokens, channels = x.shape
    signs = torch.tensor(SIGNS, device=x.device)[:, None]
    y = x.float().reshape(tokens // LENGTH, LENGTH, channels) * signs
    for half in (1, 2, 4, 8):
        first, second = y.view(-1, LENGTH // half // 2, 2, half, channels).unbind(dim=2)
        y = torch.stack((first + second, first - second), dim=2)
    return (y.reshape(tokens, channels) * LENGTH**-0.5).to(x.dtype)
