"""The ``emulated`` backend, which dequantises operands and multiplies in the compute dtype, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.casts.cast import Operand, Output
from megatron_snip.quant.kernels.dispatch import values
from megatron_snip.quant.linears.matmul import product
from megatron_snip.quant.linears.operands import Backend


class Emulated(Backend):
    """The ``emulated`` backend.  It also runs GEMMs in bf16, which need no emulation."""

    name = "emulated"
    takes_values = True

    def output(self, role: str, *, kept: bool) -> Output:
        """Codes, one byte per element, if they are kept; else values, which need no second pass."""
        return "codes" if kept else "values"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """Multiply the operands [R, C], dequantised to ``dtype``, with a result in dtype ``out``."""
        return product(gemm, values(a, dtype), values(b, dtype), out)
