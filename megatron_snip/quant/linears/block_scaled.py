"""The ``blackwell`` backends, for tensor cores that themselves apply a scale every 32 or 16 elements.

MX      E4M3 elements, with an E8M0 scale every 32 along the reduction dim.  Narrower elements are written as E4M3.  A
        power-of-two scale of 1x128 or 128x128 is the same scale four times, so `fp8_pow2` and `fp4_pow2` run here, too.
NVFP4   E2M1 elements, two to a byte, with an E4M3 scale every 16 under a float32 scale of the tensor.  16x16 blocks of
        weights repeat their scale.

Compute capability 12 (RTX 50, RTX PRO) multiplies the same operands: cuBLASLt reads the same layouts there.  Before
13.6, both operands must be contiguous along the reduction dim (pytorch/pytorch#198126), as ours always are.

Codes and scales are the specification's, bit for bit.  Casts write them in cuBLASLt's layout (cast.py's output
"swizzled"), so this module only makes views.  Blackwell cannot apply float32 scales that are not powers of two, so
`fp8` and `fp4` are emulated there.
Source: torch.nn.functional.scaled_mm; cuBLAS 12.8, "1D Block Scaling Factors Layout".

NOT YET RUN ON A GPU: layouts are checked against PyTorch's own shape rules, values against the emulation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import E4M3_SCALES, ROW, Format
from megatron_snip.formats.element import E2M1
from megatron_snip.quant.casts.cast import Operand, Output
from megatron_snip.quant.linears.operands import REDUCTION_DIM, Backend, Sizes
from megatron_snip.quant.linears.scaled_mm import no_multiple, unfit_element, unfit_gpu

_MX_BLOCK, _NVFP4_BLOCK = 32, 16


class _Blackwell(Backend):
    def unfit_device(self, device: torch.device) -> str | None:
        """Why this is not a Blackwell GPU, or None."""
        return unfit_gpu(device, "Blackwell", [(10, 0), (12, 0)], (12, 8))

    def unfit_sizes(self, fmt: Format, sizes: Sizes) -> str | None:
        """Which size is not a multiple of 32, or None.  32 E2M1 codes, two to a byte, fill the required 16 bytes."""
        return no_multiple(sizes, _MX_BLOCK)

    def output(self, role: str, *, kept: bool) -> Output:
        """What the tensor cores read.  It has at most one byte per element, so it is kept, too."""
        return "swizzled"


class MX(_Blackwell):
    """The backend for MX formats."""

    name = "blackwell (MXFP8 tensor cores, a scale every 32)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        is_power = fmt.scale in ("e8m0", "e8m0_ceil", "fp32_pow2")
        if not is_power or fmt.tile == ROW or fmt.tile % _MX_BLOCK or (fmt.weight_block or 0) % _MX_BLOCK:
            return f"{fmt.name} has other scales than powers of two of {_MX_BLOCK} elements or multiples of them"
        if fmt.gradient_element is not None:
            return f"{fmt.name} has {fmt.gradient_element.name} gradients, which these tensor cores are not given"
        return unfit_element(fmt)

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        (a_codes, a_scales), (b_codes, b_scales) = (
            _as_read(operand, dim, torch.float8_e4m3fn, torch.float8_e8m0fnu)
            for operand, dim in zip((a, b), REDUCTION_DIM[gemm].values(), strict=True)
        )
        recipe, swizzled = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(
            a_codes, b_codes.T, a_scales, recipe, b_scales, recipe, swizzled, swizzled, output_dtype=out
        )  # fmt: skip


class NVFP4(_Blackwell):
    """The backend for NVFP4."""

    name = "blackwell (NVFP4 tensor cores, a scale every 16)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        blocks = (fmt.tile, fmt.weight_block or _NVFP4_BLOCK)
        if fmt.elements != (E2M1,) or fmt.scale not in E4M3_SCALES or blocks != (_NVFP4_BLOCK, _NVFP4_BLOCK):
            return f"{fmt.name} is not E2M1 with an E4M3 scale every {_NVFP4_BLOCK} elements"
        return None

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        (a_codes, a_scales), (b_codes, b_scales) = (
            _as_read(operand, dim, torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
            for operand, dim in zip((a, b), REDUCTION_DIM[gemm].values(), strict=True)
        )
        whole: Any = a.tensor_scale, b.tensor_scale
        recipe: Any = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        # one for each scale: the kernel needs both, though torch's shape rule looks only at the first
        swizzled: Any = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        return F.scaled_mm(
            a_codes, b_codes.T, [a_scales, whole[0]], recipe, [b_scales, whole[1]], recipe,
            swizzled, swizzled, output_dtype=out,
        )  # fmt: skip


def _as_read(operand: Operand, dim: int, codes: torch.dtype, scales: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of a swizzled operand reduced along ``dim``: codes [outer, reduction], row-major, and 1-D scales."""
    data, tiles = operand.data, operand.scales
    assert operand.form is not None and operand.form.output == "swizzled" and tiles is not None
    if dim == 0:
        data, tiles = data.T, tiles.T
    return data.view(codes), tiles.view(scales).view(-1)
