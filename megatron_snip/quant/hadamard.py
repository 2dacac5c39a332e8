"""The random Hadamard transform that spreads outliers over tokens before wgrad's operands are cast.

Groups of 16 tokens [16, C] become H diag(s) / 4 times themselves, H the 16x16 Sylvester matrix and s fixed
signs.  The matrix is orthogonal and both operands of wgrad are reduced along tokens, so G^T X stays the same
up to rounding.  Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sec. 4.2; the
signs and the rounding to x's dtype are those of Transformer Engine's reference quantiser
(custom_recipes/reference_nvfp4.py, get_wgrad_sign_vector).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.errors import UserError

LENGTH = 16
SIGNS = (1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0)


def check_tokens(x: Tensor) -> None:
    """UserError if the tokens of x [T, C] are not whole groups."""
    if len(x) % LENGTH:
        raise UserError(
            f"random Hadamard transform: x has shape {list(x.shape)} and its {len(x)} tokens are no multiple of "
            f"{LENGTH}; change the sequence length or the batch, or choose a format without the transform"
        )


@torch.no_grad()
def hadamard(x: Tensor) -> Tensor:
    """``x`` [T, C] transformed in groups of 16 tokens: float32 sums in a fixed order, rounded to x.dtype.

    Sums and differences of pairs, not a GEMM, so that every device gives the same bits.  A NaN reaches its
    whole group, infinities become infinities or NaN.  Raises UserError where T is no multiple of 16.
    """
    check_tokens(x)
    tokens, channels = x.shape
    signs = torch.tensor(SIGNS, device=x.device)[:, None]
    y = x.float().reshape(tokens // LENGTH, LENGTH, channels) * signs
    for half in (1, 2, 4, 8):
        first, second = y.view(-1, LENGTH // half // 2, 2, half, channels).unbind(dim=2)
        y = torch.stack((first + second, first - second), dim=2)
    return (y.reshape(tokens, channels) * LENGTH**-0.5).to(x.dtype)
