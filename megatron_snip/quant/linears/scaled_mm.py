"""Backends for FP8 tensor cores: 1x128 and 128x128 scales on Hopper, row-wise scales on any GPU that has them.

Operands are the specification's codes and scales, bit for bit.  The hardware multiplies the codes and applies the
scales every 128 elements, in float32.  Elements of fewer than 8 bits are written as E4M3, which holds their values
exactly, so FP4 runs at FP8's speed.  Gradients may be E5M2.  Source: torch.nn.functional.scaled_mm and, for E5M2,
torch._scaled_mm; cuBLASLt's block scaling (CUDA 12.9 or newer, compute capability 9.0).
block_scaled.py is for Blackwell.

E4M3 with block scales ran on an H200.  NOT YET RUN ON A GPU: E5M2 gradients and row-wise scales.  Their layouts are
checked against PyTorch's own shape rules, and their values against the emulation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import ROW, Format
from megatron_snip.formats.element import E4M3, E5M2
from megatron_snip.quant.casts.cast import Operand, Output
from megatron_snip.quant.linears.operands import REDUCTION_DIM, Backend, Sizes

_DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_BLOCK = 128
_ROW_MULTIPLE = 16  # of every size, with row-wise scales
_UNPADDED = 4 * _BLOCK  # torch._scaled_mm takes scales of square blocks without padding


class Hopper(Backend):
    """The ``hopper`` backend."""

    name = "hopper (FP8 tensor cores, scales of 1x128 and 128x128)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        if fmt.scale not in ("fp32", "fp32_pow2") or fmt.tile != _BLOCK or fmt.weight_block != _BLOCK:
            return f"{fmt.name} has other scales than float32 ones of 1x{_BLOCK} tiles and {_BLOCK}x{_BLOCK} blocks"
        return unfit_element(fmt)

    def unfit_device(self, device: torch.device) -> str | None:
        """Why this is not a Hopper GPU, or None."""
        return unfit_gpu(device, "Hopper", [(9, 0)], (12, 9))

    def unfit_sizes(self, fmt: Format, sizes: Sizes) -> str | None:
        """Which size is not a multiple of the block, or None."""
        if E5M2 in fmt.elements and sizes.outputs % _UNPADDED:
            return f"{sizes.outputs} output channels are no multiple of {_UNPADDED}, which {fmt.name}'s dgrad needs"
        return no_multiple(sizes, _BLOCK)

    def output(self, role: str, *, kept: bool) -> Output:
        """What tensor cores read.  It has one byte per element, so it is kept, too."""
        return "operand"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        a_codes, a_scales = _left(gemm, a)
        b_codes, b_scales, b_recipe = _right(gemm, b)
        if a_codes.dtype != b_codes.dtype:  # F.scaled_mm takes only E4M3 with these scales
            b_scales = b_scales.T if b_recipe == F.ScalingType.BlockWise1x128 else b_scales  # its predecessor's layout
            return torch._scaled_mm(a_codes, b_codes, a_scales, b_scales, out_dtype=out)
        return F.scaled_mm(
            a_codes,
            b_codes,
            a_scales,
            F.ScalingType.BlockWise1x128,
            b_scales,
            b_recipe,
            output_dtype=out,
            use_fast_accum=False,
        )


class RowWise(Backend):
    """The backend for row-wise scales: torch's "RowWise" scaling."""

    name = "row-wise (FP8 tensor cores, a scale a row)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        if fmt.tile != ROW or fmt.weight_block is not None:
            return f"{fmt.name} has no scales of whole rows"
        if fmt.gradient_element is not None:
            return f"{fmt.name} has {fmt.gradient_element.name} gradients, which are not multiplied under such scales"
        return unfit_element(fmt)

    def unfit_device(self, device: torch.device) -> str | None:
        """Why this GPU has no FP8 tensor cores, or None."""
        return unfit_gpu(device, "Ada, Hopper or Blackwell", [(8, 9), (9, 0), (10, 0), (12, 0)], (12, 4))

    def unfit_sizes(self, fmt: Format, sizes: Sizes) -> str | None:
        """Which size is not a multiple of 16, or None."""
        return no_multiple(sizes, _ROW_MULTIPLE)

    def output(self, role: str, *, kept: bool) -> Output:
        """What tensor cores read.  It has one byte per element, so it is kept, too."""
        return "operand"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores.  Its bfloat16 result is converted to ``out``."""
        assert a.scales is not None and b.scales is not None
        dims, recipe = REDUCTION_DIM[gemm].values(), F.ScalingType.RowWise
        a_codes, b_codes = (
            _bytes(operand) if dim == 1 else _bytes(operand).T for operand, dim in zip((a, b), dims, strict=True)
        )
        a_scales, b_scales = a.scales.flatten()[:, None], b.scales.flatten()[None]  # with the strides torch requires
        made = F.scaled_mm(
            a_codes, b_codes.T, a_scales, recipe, b_scales, recipe, output_dtype=torch.bfloat16, use_fast_accum=False
        )  # fmt: skip
        return made.to(out)


def no_multiple(sizes: Sizes, multiple: int) -> str | None:
    """Which size is not a multiple of what a backend needs, or None."""
    words = {"tokens": sizes.tokens, "input channels": sizes.inputs, "output channels": sizes.outputs}
    return next(
        (f"{size} {what} are no multiple of {multiple}" for what, size in words.items() if size % multiple), None
    )


def unfit_gpu(
    device: torch.device, kind: str, capabilities: Sequence[tuple[int, int]], cuda: tuple[int, int]
) -> str | None:
    """Why a device is not a GPU of this kind, or None.

    Its compute capability must have the same major number as one of ``capabilities``, and not be lower.
    """
    if device.type != "cuda":
        return f"tensor cores need a {kind} GPU, the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if not any(major == first and minor >= second for first, second in capabilities):
        name, known = torch.cuda.get_device_name(device), " or ".join(f"{a}.{b}" for a, b in capabilities)
        return f"tensor cores need a {kind} GPU (compute capability {known}), not {name}"
    if tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2]) < cuda:
        return f"block scales need CUDA {cuda[0]}.{cuda[1]}, PyTorch was built with {torch.version.cuda}"
    return None


def unfit_element(fmt: Format) -> str | None:
    """Why a format's elements do not fit E4M3, or its gradients' elements E4M3 or E5M2; None if they do."""
    for element in fmt.elements:
        if element.carrier is None:
            return f"{fmt.name}'s {element.name} elements fit neither E4M3 nor E5M2"
    if fmt.elements[0].carrier != E4M3:
        return f"{fmt.name} needs E5M2 for both operands, which the hardware does not multiply"
    return None


def _bytes(operand: Operand) -> Tensor:
    """Codes [R, C] as the carrier's dtype."""
    assert operand.form is not None
    return operand.data.view(_DTYPES[operand.form.stored])


def _left(gemm: str, a: Operand) -> tuple[Tensor, Tensor]:
    """X [T,K], G [T,N], or G^T [N,T] for wgrad: row-major, with column-major scales."""
    assert a.scales is not None
    codes = _bytes(a)
    return (codes.T, a.scales.T) if gemm == "wgrad" else (codes, a.scales)


def _right(gemm: str, b: Operand) -> tuple[Tensor, Tensor, F.ScalingType]:
    """W^T [K,N], W [N,K] or X [T,K], column-major, with scales in cuBLASLt's layout.

    Scales of 128x128 blocks are contiguous along the reduction dim, padded there to a multiple of 4 (cast.Output).
    """
    assert b.scales is not None
    codes = _bytes(b)
    if gemm == "wgrad":
        return codes, b.scales.T, F.ScalingType.BlockWise1x128
    if gemm == "fprop":
        return codes.T, b.scales.T, F.ScalingType.BlockWise128x128
    return codes, b.scales, F.ScalingType.BlockWise128x128
