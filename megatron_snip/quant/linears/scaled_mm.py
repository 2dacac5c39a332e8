"""The ``hopper`` backend: FP8 tensor cores of Hopper with 1x128 and 128x128 scales.

Operands are the specification's codes and scales, bit for bit.  The hardware multiplies the codes and applies the
scales every 128 elements, in float32.  Elements of fewer than 8 bits are written as E4M3, which holds their values
exactly, so FP4 runs at FP8's speed.  Source: torch.nn.functional.scaled_mm, cuBLASLt's block scaling (CUDA 12.9 or
newer, compute capability 9.0).  block_scaled.py is the same for Blackwell.

NOT YET RUN ON A GPU: layouts are checked against PyTorch's own shape rules, values against the emulation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.formats.element import E4M3
from megatron_snip.quant.casts.cast import Operand, Output
from megatron_snip.quant.linears.operands import Backend, Sizes

_BLOCK = 128


class Hopper(Backend):
    """The ``hopper`` backend."""

    name = "hopper (FP8 tensor cores, scales of 1x128 and 128x128)"

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run a format, or None."""
        if fmt.scale not in ("fp32", "fp32_pow2") or fmt.tile != _BLOCK or fmt.weight_block != _BLOCK:
            return f"{fmt.name} has other scales than float32 ones of 1x{_BLOCK} tiles and {_BLOCK}x{_BLOCK} blocks"
        return unfit_element(fmt)

    def unfit_device(self, device: torch.device) -> str | None:
        """Why this is no Hopper GPU, or None."""
        return unfit_gpu(device, "Hopper", [(9, 0)], (12, 9))

    def unfit_sizes(self, sizes: Sizes) -> str | None:
        """Which size is not a multiple of the block, or None."""
        return no_multiple(sizes, _BLOCK)

    def output(self, role: str, *, kept: bool) -> Output:
        """What tensor cores read.  It has one byte per element, so it is kept, too."""
        return "operand"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """A GEMM of two operands [R, C] on the tensor cores, in dtype ``out``."""
        a_codes, a_scales = _left(gemm, a)
        b_codes, b_scales, b_recipe = _right(gemm, b)
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
    """Why a format's elements cannot be written as E4M3, or None."""
    assert fmt.element is not None
    if fmt.element.carrier is None:
        return f"{fmt.name}'s {fmt.element.name} elements fit neither E4M3 nor E5M2"
    if fmt.element.carrier != E4M3:  # both operands of a GEMM have one format
        return f"{fmt.name} needs E5M2 for both operands, which the hardware does not multiply"
    return None


def _bytes(operand: Operand) -> Tensor:
    """Codes [R, C] as the carrier's dtype."""
    assert operand.form is not None and operand.form.element.carrier == E4M3
    return operand.data.view(torch.float8_e4m3fn)


def _left(gemm: str, a: Operand) -> tuple[Tensor, Tensor]:
    """X [T,K], G [T,N], or G^T [N,T] for wgrad: row-major, with column-major scales."""
    assert a.scales is not None
    codes = _bytes(a)
    return (codes.T, a.scales.T) if gemm == "wgrad" else (codes, a.scales)


def _right(gemm: str, b: Operand) -> tuple[Tensor, Tensor, F.ScalingType]:
    """W^T [K,N], W [N,K] or X [T,K], column-major, with scales as cuBLASLt wants them.

    Scales of 128x128 blocks are contiguous along the reduction dim, padded there to a multiple of 4 (cast.Output).
    """
    assert b.scales is not None
    codes = _bytes(b)
    if gemm == "wgrad":
        return codes, b.scales.T, F.ScalingType.BlockWise1x128
    if gemm == "fprop":
        return codes.T, b.scales.T, F.ScalingType.BlockWise128x128
    return codes, b.scales, F.ScalingType.BlockWise128x128
