"""The ``blackwell`` backends: tensor cores that read one scale every 32 or 16 elements themselves.

MX      E4M3 elements, an E8M0 scale every 32 along the reduction dim.  Narrower elements ride E4M3.  A power-of-two
        scale of 1x128 or 128x128 is the same scale four times, so `fp8_pow2` and `fp4_pow2` run here too.
NVFP4   E2M1 elements, two a byte, an E4M3 scale every 16 under a float32 scale of the tensor; 16x16 blocks of
        weights repeat their scale.

Codes and scales are the specification's, bit for bit.  Scales lie in tiles of 128 rows x 4, as cuBLASLt reads them
(``swizzle``).  float32 scales that are no powers of two have no such form: `fp8` and `fp4` are emulated on Blackwell.
Source: torch.nn.functional.scaled_mm; cuBLAS 12.8, "1D Block Scaling Factors Layout".

NOT YET RUN ON A GPU: layouts are checked against PyTorch's own shape rules, values against the emulation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.formats.element import E2M1
from megatron_snip.quant.cast import Output
from megatron_snip.quant.operands import REDUCTION_DIM, Operand
from megatron_snip.quant.scaled_mm import no_multiple, unfit_element, unfit_gpu
from megatron_snip.quant.three_gemms import Backend, Sizes

_MX_BLOCK, _NVFP4_BLOCK = 32, 16
_E4M3_NAN, _CODE_NAN = 0x7F, 0xFF


class _Blackwell(Backend):
    def unfit_device(self, device: torch.device) -> str | None:
        """Why this is no Blackwell GPU, or None."""
        return unfit_gpu(device, "Blackwell", (10, 0), (12, 8))

    def unfit_sizes(self, sizes: Sizes) -> str | None:
        """Which size is no multiple of 32, or None: two E2M1 to a byte then fill 16 bytes too."""
        return no_multiple(sizes, _MX_BLOCK)


class MX(_Blackwell):
    """``Backend`` of that name."""

    name = "blackwell (MXFP8 tensor cores, a scale every 32)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        if fmt.scale not in ("e8m0", "fp32_pow2") or fmt.tile % _MX_BLOCK or (fmt.weight_block or 0) % _MX_BLOCK:
            return f"{fmt.name} has other scales than powers of two of {_MX_BLOCK} elements or multiples of them"
        return unfit_element(fmt)

    def output(self, role: str, *, kept: bool) -> Output:
        """E4M3 codes along the reduction dim, a byte an element."""
        return "operand"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        (a_codes, a_scales), (b_codes, b_scales) = (
            _mx(operand, dim) for operand, dim in zip((a, b), REDUCTION_DIM[gemm].values(), strict=True)
        )
        recipe, swizzled = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(
            a_codes, b_codes.T, a_scales, recipe, b_scales, recipe, swizzled, swizzled, output_dtype=out
        )  # fmt: skip


class NVFP4(_Blackwell):
    """``Backend`` of that name."""

    name = "blackwell (NVFP4 tensor cores, a scale every 16)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        blocks = (fmt.tile, fmt.weight_block or _NVFP4_BLOCK)
        if fmt.element != E2M1 or fmt.scale != "e4m3" or blocks != (_NVFP4_BLOCK, _NVFP4_BLOCK):
            return f"{fmt.name} is not E2M1 with an E4M3 scale every {_NVFP4_BLOCK} elements"
        return None

    def output(self, role: str, *, kept: bool) -> Output:
        """Codes, a byte an element, which ``multiply`` packs."""
        return "codes"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        (a_codes, a_scales), (b_codes, b_scales) = (
            _nvfp4(operand, dim) for operand, dim in zip((a, b), REDUCTION_DIM[gemm].values(), strict=True)
        )
        recipe: Any = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        # one for each scale: the kernel asks for both, torch's rule for shapes looks at the first
        swizzled: Any = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        return F.scaled_mm(
            a_codes, b_codes.T, a_scales, recipe, b_scales, recipe, swizzled, swizzled, output_dtype=out
        )  # fmt: skip


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [outer, reduction blocks] in tiles of 128 x 4, with zeros beyond the edges: 1-D.

    In a tile, scale (r, c) is byte 16 (r % 32) + 4 (r // 32) + c; tiles run along the reduction dim first.
    """
    rows, cols = scales.shape
    padded = F.pad(scales, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _by_block(operand: Operand, dim: int, block: int) -> Tensor:
    """Scales [outer, reduction / block] of an operand reduced along ``dim``, repeated where they hold for more."""
    assert operand.scales is not None and operand.form is not None
    scales, sides, sizes = operand.scales, operand.form.block, operand.data.shape
    if dim == 0:
        scales, sides, sizes = scales.T, sides[::-1], sizes[::-1]
    if sides[0] > 1:
        scales = scales.repeat_interleave(sides[0], dim=0)[: sizes[0]]
    if sides[1] > block:
        scales = scales.repeat_interleave(sides[1] // block, dim=1)[:, : sizes[1] // block]
    return scales


def _mx(operand: Operand, dim: int) -> tuple[Tensor, Tensor]:
    """E4M3 codes [outer, reduction], row-major, and swizzled E8M0 scales."""
    codes = operand.data if dim == 1 else operand.data.T
    # a float32 power of two's exponent field is its E8M0 code; 2**-127, which is subnormal, and 0 have 0
    exponents = (_by_block(operand, dim, _MX_BLOCK).contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn), swizzle(exponents).view(torch.float8_e8m0fnu)


def _nvfp4(operand: Operand, dim: int) -> tuple[Tensor, list[Tensor]]:
    """E2M1 codes [outer, reduction / 2], two a byte, row-major; swizzled E4M3 scales and the tensor's.

    E2M1 has no NaN, so the scale of a block that holds one is NaN, which reaches the same rows of the product.
    """
    assert operand.tensor_scale is not None
    codes = (operand.data if dim == 1 else operand.data.T).contiguous()
    blocks = codes.view(codes.shape[0], -1, _NVFP4_BLOCK)
    scales = _by_block(operand, dim, _NVFP4_BLOCK).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.where(blocks.amax(dim=2) == _CODE_NAN, _E4M3_NAN, scales)
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    return packed.view(torch.float4_e2m1fn_x2), [swizzle(scales).view(torch.float8_e4m3fn), operand.tensor_scale]
