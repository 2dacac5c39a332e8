"""The random Hadamard transform, which spreads outliers over their neighbours before operands are cast.

A group of L elements along the reduction dim is multiplied by H diag(s) / sqrt(L), where H is the LxL Sylvester matrix
and s holds the signs of the format's ``Hadamard``.  The matrix is orthogonal and a GEMM reduces both operands over that
dim, so the product stays the same up to rounding.  wgrad reduces over tokens, fprop and dgrad over channels.
Sources: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sec. 4.2, for wgrad, with signs and rounding
to x's dtype as in Transformer Engine's reference quantiser (custom_recipes/reference_nvfp4.py); Quartet (arXiv
2505.14669) for all GEMMs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import Hadamard


def check_groups(x: Tensor, transform: Hadamard, dim: int, role: str) -> None:
    """Raise UserError unless x [R, C], this rank's operand of a role, divides into whole groups along ``dim``."""
    size, tokens = x.shape[dim], dim == 0 and role != "weight"
    if size % transform.length:
        change = "sequence length or the batch" if tokens else "layer's size or the tensor parallel size"
        raise UserError(
            f"random Hadamard transform: {role} has shape {list(x.shape)} and its {size} "
            f"{'tokens' if tokens else 'channels'} are no multiple of {transform.length}; change the {change}, "
            "or choose a format without the transform"
        )


@torch.no_grad()
def hadamard(x: Tensor, transform: Hadamard, dim: int = 0) -> Tensor:
    """Transform ``x`` [R, C] in groups along ``dim``: float32 sums in a fixed order, rounded to x.dtype.

    It adds and subtracts pairs instead of running a GEMM, so every device gives the same bits.  A NaN spreads over its
    whole group; infinities become infinities or NaN.  The size along ``dim`` must be a multiple of the group's length.
    """
    if dim == 1:
        return hadamard(x.T, transform).T.contiguous()
    (rows, cols), length = x.shape, transform.length
    signs = torch.tensor([1.0 if sign == "+" else -1.0 for sign in transform.signs], device=x.device)[:, None]
    y = x.float().reshape(rows // length, length, cols) * signs
    half = 1
    while half < length:
        first, second = y.view(-1, length // half // 2, 2, half, cols).unbind(dim=2)
        y = torch.stack((first + second, first - second), dim=2)
        half *= 2
    return (y.reshape(rows, cols) * length**-0.5).to(x.dtype)
