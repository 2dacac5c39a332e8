"""The ``scaled_mm`` linear: FP8 tensor cores of Hopper with 1x128 and 128x128 scales.

Operands are codes and scales of the specification, bit for bit; the hardware multiplies them and applies the
scales every 128 elements, in float32.  Elements narrower than 8 bits ride E4M3, which holds their values
exactly, so FP4 runs at FP8's speed.  Source: torch.nn.functional.scaled_mm, cuBLASLt's block scaling
(CUDA 12.9 or newer, compute capability 9.0).

NOT YET RUN ON A GPU: layouts are checked against PyTorch's own shape rules, values against the emulation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import Format, get_format
from megatron_snip.formats.element import E4M3
from megatron_snip.quant.cast import Output
from megatron_snip.quant.operands import LinearCall, Operand
from megatron_snip.quant.precision import GEMMS, LinearPrecision
from megatron_snip.quant.three_gemms import plain_product, three_gemms

_BLOCK = 128


class ScaledMM:
    """Implementation of that name; also the ``Gemms`` that it multiplies with."""

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why this precision cannot run on a device, or None."""
        formats = {get_format(getattr(precision, gemm)) for gemm in GEMMS}
        for fmt in sorted((fmt for fmt in formats if fmt.quantised), key=lambda fmt: fmt.name):
            if reason := _unfit_format(fmt):
                return reason
        return _unfit_device(device)

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [T,K], w [N,K] -> y [T,N].  Raises ValueError for sizes that are no multiples of 128."""
        quantised = any(get_format(getattr(call.precision, gemm)).quantised for gemm in GEMMS)
        if quantised and (reason := unfit_shapes(x, w)):
            raise ValueError(f"--linear-impl scaled_mm: {reason}; use --linear-impl auto or emulated")
        return three_gemms(x, w, call, self)

    def output(self, role: str, *, kept: bool) -> Output:
        """Bytes for the tensor cores; one an element, so they are what is kept too."""
        return "operand"

    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """A GEMM on the tensor cores, or the plain one where it is in bf16."""
        if a.form is None or b.form is None:
            return plain_product(gemm, a.values(dtype), b.values(dtype))
        a_codes, a_scales = _left(gemm, a)
        b_codes, b_scales, b_recipe = _right(gemm, b)
        return F.scaled_mm(
            a_codes,
            b_codes,
            a_scales,
            F.ScalingType.BlockWise1x128,
            b_scales,
            b_recipe,
            output_dtype=dtype,
            use_fast_accum=False,
        )


def unfit_shapes(x: Tensor, w: Tensor) -> str | None:
    """Why the tensor cores cannot multiply x [T,K] and w [N,K], or None."""
    sizes = {"tokens": x.shape[0], "input channels": x.shape[1], "output channels": w.shape[0]}
    for what, size in sizes.items():
        if size % _BLOCK:
            return f"{size} {what} are no multiple of {_BLOCK}"
    return None


def _unfit_format(fmt: Format) -> str | None:
    if fmt.scale not in ("fp32", "fp32_pow2") or fmt.tile != _BLOCK or fmt.weight_block != _BLOCK:
        return f"{fmt.name} has other scales than float32 ones of 1x{_BLOCK} tiles and {_BLOCK}x{_BLOCK} blocks"
    assert fmt.element is not None
    if fmt.element.carrier is None:
        return f"{fmt.name}'s {fmt.element.name} elements fit neither E4M3 nor E5M2"
    if fmt.element.carrier != E4M3:  # both operands of a GEMM have one format
        return f"{fmt.name} needs E5M2 for both operands, which the hardware does not multiply"
    return None


def _unfit_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a Hopper GPU, the device is {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"it needs a Hopper GPU (compute capability 9.0), not {torch.cuda.get_device_name(device)}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < (12, 9):
        return f"block scales need CUDA 12.9, PyTorch was built with {torch.version.cuda}"
    return None


def _bytes(operand: Operand) -> Tensor:
    """Codes [R, C] as the carrier's dtype."""
    assert operand.form is not None and operand.form.element.carrier == E4M3
    return operand.data.view(torch.float8_e4m3fn)


def _left(gemm: str, a: Operand) -> tuple[Tensor, Tensor]:
    """X [T,K], G [T,N] or, for wgrad, G^T [N,T]: row-major, its scales column-major."""
    assert a.scales is not None
    codes = _bytes(a)
    return (codes.T, a.scales.T) if gemm == "wgrad" else (codes, a.scales)


def _right(gemm: str, b: Operand) -> tuple[Tensor, Tensor, F.ScalingType]:
    """W^T [K,N], W [N,K] or X [T,K], column-major, with scales as cuBLASLt wants them.

    Scales of 128x128 blocks run along the reduction dim first, padded to a multiple of 4 there, as Output has them.
    """
    assert b.scales is not None
    codes = _bytes(b)
    if gemm == "wgrad":
        return codes, b.scales.T, F.ScalingType.BlockWise1x128
    if gemm == "fprop":
        return codes.T, b.scales.T, F.ScalingType.BlockWise128x128
    return codes, b.scales, F.ScalingType.BlockWise128x128
