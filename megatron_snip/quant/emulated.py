"""The ``emulated`` backend: dequantised operands, multiplied in the compute dtype.  Any format, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.backend import Backend
from megatron_snip.quant.cast import Operand, Output
from megatron_snip.quant.dispatch import values
from megatron_snip.quant.matmul import product


class Emulated(Backend):
    """``Backend`` of that name; GEMMs in bf16 are its own too, and nothing is emulated there."""

    name = "emulated"
    takes_values = True

    def output(self, role: str, *, kept: bool) -> Output:
        """Codes, a byte an element, where they are kept; else values, which need no second pass."""
        return "codes" if kept else "values"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of the operands [R, C] dequantised to ``dtype``, in dtype ``out``."""
        return product(gemm, values(a, dtype), values(b, dtype), out)
