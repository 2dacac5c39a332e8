"""The ``emulated`` linear: dequantised operands, multiplied in the compute dtype.  Any format, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.cast import Output
from megatron_snip.quant.operands import LinearCall, Operand
from megatron_snip.quant.precision import LinearPrecision
from megatron_snip.quant.three_gemms import plain_product, three_gemms


class Emulated:
    """Implementation of that name; also the ``Gemms`` that it multiplies with."""

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Always None: it runs everything."""
        return None

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [T,K], w [N,K] -> y [T,N]."""
        return three_gemms(x, w, call, self)

    def output(self, role: str, *, kept: bool) -> Output:
        """Codes, a byte an element, where they are kept; else values, which need no second pass."""
        return "codes" if kept else "values"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """A GEMM of the dequantised operands in ``dtype``."""
        return plain_product(gemm, a.values(dtype), b.values(dtype))
