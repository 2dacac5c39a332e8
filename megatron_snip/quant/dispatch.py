"""``quantize`` and ``fake_quantize``: the kernel of the tensor's device, else the specification.

Both give the same bits (cast.py), so this choice never changes a result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_snip.formats import Format
from megatron_snip.quant.cast import (
    Quantized,
    Rounding,
    fake_quantize_reference,
    quantize_reference,
    resolve,
    unquantised,
)
from megatron_snip.quant.kernels import cpu
from megatron_snip.quant.rounding import RoundingKey


def quantize(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
) -> Quantized:
    """Codes and scales of ``x`` [R, C].  Arguments and errors as ``fake_quantize``."""
    fmt, stochastic = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if fmt.element is None:
        return unquantised(x, fmt)
    block = fmt.block_shape(role, dim)
    if not _cpu_kernel_takes(x, block):
        return quantize_reference(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    codes, scales = cpu.quantize(x, fmt.element, block, key if stochastic else None)
    return Quantized(codes, scales, fmt, block)


def fake_quantize(
    x: Tensor,
    fmt: Format | str,
    *,
    role: str,
    dim: int,
    rounding: Rounding | None = None,
    key: RoundingKey | None = None,
) -> Tensor:
    """``x`` [R, C] quantised and dequantised: float32 arithmetic, rounded to x.dtype, no gradient.

    role: "input", "weight" or "grad_output", which decides the block.  dim: the GEMM's reduction
    dim, along which tiles run.  rounding: "nearest", "stochastic", or None for the format's rule for
    the role.  key: the random bits of stochastic rounding.  bf16 returns ``x`` itself.
    Raises ValueError for an unknown format, role, dim or rounding, a tensor that is not 2-D or not
    bfloat16 or float32, and stochastic rounding without a key.
    """
    fmt, stochastic = resolve(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    if fmt.element is None:
        return x
    block = fmt.block_shape(role, dim)
    if not _cpu_kernel_takes(x, block):
        return fake_quantize_reference(x, fmt, role=role, dim=dim, rounding=rounding, key=key)
    return cpu.fake_quantize(x, fmt.element, block, key if stochastic else None)


def _cpu_kernel_takes(x: Tensor, block: tuple[int, int]) -> bool:
    """Whether the compiled CPU kernel can cast ``x``.

    Subclasses (fake tensors, for one) have no memory to point at, and a compiler cannot trace ctypes.
    """
    return (
        x.is_cpu
        and type(x) in (Tensor, Parameter)
        and block[1] <= cpu.MAX_BLOCK_COLS
        and not torch.compiler.is_compiling()
        and cpu.library() is not None
    )
