"""Products in BF16 on any CPU.

A CPU without instructions for BF16 multiplies float32 3.0 to 4.5 times as fast, conversions included.  Either way
sums are float32 and rounded once; only their order differs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M,K] @ b [K,N] in their dtype."""
    return (a.float() @ b.float()).to(a.dtype) if float32_is_faster(a) else torch.mm(a, b)


def product(gemm: str, a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """The GEMM of two operands [R, C] as they are: fprop a @ b.T, dgrad a @ b, wgrad a.T @ b, in dtype ``out``."""
    a, b = (a.T if gemm == "wgrad" else a), (b.T if gemm == "fprop" else b)
    if out == a.dtype or a.is_cpu:  # CPUs multiply bf16 into bf16 alone
        y = matmul(a, b)
        return y if y.dtype == out else y.to(out)
    return torch.mm(a, b, out_dtype=out)


def float32_is_faster(x: Tensor) -> bool:
    """Whether products of x [...] are faster in float32, and as good."""
    return x.dtype is torch.bfloat16 and x.is_cpu and _lacks_bf16()


@cache
def _lacks_bf16() -> bool:
    """Whether this is an x86 CPU without instructions for BF16; a PyTorch that does not tell has them."""
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return found.get("architecture") == "x86_64" and not (found.get("avx512_bf16", True) or found.get("amx_bf16", True))
