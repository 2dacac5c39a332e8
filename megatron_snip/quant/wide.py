"""The backend of a float32 run's probe: sums in float64, each rounded once.

In float32 the sum of two parts is not, to the last bit, the sum of the whole, so an operand's last bit depends on how
tensor parallelism cuts the sums before it, and an element that stands near a tie then rounds to another code.  With
products and sums over processes in float64 (``Group.wide``) operands are the same on every layout.
Source: docs/numerics.md, "Reduction over the mesh".
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.backend import Backends
from megatron_snip.quant.cast import Operand
from megatron_snip.quant.dispatch import values
from megatron_snip.quant.emulated import Emulated

#: Rows of a factor taken at a time, so that float64 copies of weights, and of logits, stay small.
_CHUNK = 128


class Wide(Emulated):
    """``Emulated`` with float64 products."""

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of the operands [R, C] dequantised to ``dtype``, summed in float64, in dtype ``out``."""
        left, right = values(a, dtype), values(b, dtype)
        n = right.shape[0] if gemm == "fprop" else left.shape[1]  # output channels
        cuts = [slice(start, start + _CHUNK) for start in range(0, n, _CHUNK)]
        if gemm == "dgrad":
            total = left.new_zeros((len(left), right.shape[1]), dtype=torch.float64)
            for cut in cuts:
                total.addmm_(left[:, cut].double(), right[cut].double())
            return total.to(out)
        if gemm == "fprop":
            x, y = left.double(), left.new_empty((len(left), n), dtype=out)
            for cut in cuts:
                y[:, cut] = x @ right[cut].double().T
            return y
        x, grad_w = right.double(), left.new_empty((n, right.shape[1]), dtype=out)
        for cut in cuts:
            grad_w[cut] = left[:, cut].double().T @ x
        return grad_w


WIDE = Backends(*[Wide()] * 3)
