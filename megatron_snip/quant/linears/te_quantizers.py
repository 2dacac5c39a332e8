"""Makes Transformer Engine's `CustomRecipe` quantizers for a linear whose GEMMs each have their own format.

A tensor is quantised rowwise for one GEMM and columnwise for another:

    input        rowwise fprop   columnwise wgrad
    weight       rowwise fprop   columnwise dgrad
    grad_output  rowwise dgrad   columnwise wgrad

A GEMM in a format that Transformer Engine does not have, or not on this GPU, uses our own quantizer
(te_own_quantizer.py), for which this package must be installed.

Source: Transformer Engine 2.19 and 2.20, pytorch/custom_recipes, which it calls experimental.  `megatron-snip export`
copies this file into what it writes, so its top imports nothing from this package.
"""

from __future__ import annotations

from typing import Any

#: Tensor of a linear -> indices into (fprop, dgrad, wgrad) of the GEMMs that read it rowwise and columnwise.
READ_BY = {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}
#: Formats whose columnwise inputs and weights are made from the rowwise ones -> the same without that.
RECAST = {"mxfp8_dequantized": "mxfp8", "bf16_dequantized": "bf16"}
#: Formats that Transformer Engine has, those of Blackwell last.
FP8 = ("bf16", "fp8", "fp8_hybrid", "fp8_pow2")
BLACKWELL = ("mxfp8", "nvfp4_plain", "nvfp4")


def quantizer_for(role: Any, formats: tuple[str, str, str] | None) -> Any:
    """The quantizer for a `QuantizerRole` of a linear whose fprop, dgrad and wgrad run in these formats.

    If role is None or its tensor_type is not in `READ_BY`, the tensor leaves the linear and stays in high precision.
    If formats is None, everything does.
    """
    from transformer_engine.pytorch import HybridQuantizer, IdentityQuantizer

    tensor = None if role is None else role.tensor_type
    if formats is None or tensor not in READ_BY:
        return IdentityQuantizer()
    gemms = [("fprop", "dgrad", "wgrad")[place] for place in READ_BY[tensor]]
    row, column = (formats[place] for place in READ_BY[tensor])
    again = column in RECAST and tensor != "grad_output"
    row, column = RECAST.get(row, row), RECAST.get(column, column)
    how = {"columnwise_source": "rowwise_dequantized"} if again and row != "bf16" else {}
    if row == column and not how and _is_theirs(row):
        return _quantizer(row, tensor, transformed=True)
    made, pair = [], HybridQuantizer
    for fmt, gemm in zip((row, column), gemms, strict=True):
        if _is_theirs(fmt):
            made.append(_quantizer(fmt, tensor, transformed=gemm == gemms[1]))
        else:
            own = _own_quantizers(fmt)
            pair = own.Directions
            made.append(own.OwnQuantizer(tensor, gemm, fmt, role.name))
    if how and pair is not HybridQuantizer:
        raise ValueError(
            f"{row} is dequantised for backward here only where Transformer Engine has it; take {row} alone"
        )
    return pair(rowwise_quantizer=made[0], columnwise_quantizer=made[1], **how)


def _is_theirs(fmt: str) -> bool:
    """Whether Transformer Engine runs a format on this GPU; without a GPU, the answer is Blackwell's."""
    from torch import cuda

    return fmt in FP8 or (fmt in BLACKWELL and not (cuda.is_available() and cuda.get_device_capability() < (10, 0)))


def _own_quantizers(fmt: str) -> Any:
    """This package's module of quantizers.  Raises ModuleNotFoundError if the package is not installed."""
    try:
        from megatron_snip.quant.linears import te_own_quantizer
    except ModuleNotFoundError as error:
        why = f"Transformer Engine does not run {fmt} here, and megatron_snip, whose quantizer does, is not installed"
        raise ModuleNotFoundError(f"{why} ({error})") from None
    return te_own_quantizer


def _quantizer(fmt: str, tensor: str, *, transformed: bool) -> Any:
    """One quantizer.  transformed: whether it makes columnwise data, which wgrad's Hadamard transform is for."""
    from transformer_engine.pytorch import Float8BlockQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
    from transformer_engine.pytorch.constants import DType

    weight = tensor == "weight"
    if fmt == "bf16":
        return IdentityQuantizer()
    if fmt == "mxfp8":
        return MXFP8Quantizer(fp8_dtype=DType.kFloat8E4M3)
    if fmt in ("fp8", "fp8_hybrid", "fp8_pow2"):
        hybrid = fmt == "fp8_hybrid" and tensor == "grad_output"
        return Float8BlockQuantizer(
            fp8_dtype=DType.kFloat8E5M2 if hybrid else DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            amax_epsilon=0.0,
            force_pow_2_scales=fmt == "fp8_pow2",
            block_scaling_dim=2 if weight else 1,
        )
    hadamard = fmt == "nvfp4" and transformed and not weight
    return NVFP4Quantizer(
        fp4_dtype=DType.kFloat4E2M1,
        with_rht=hadamard,
        with_post_rht_amax=hadamard,
        with_2d_quantization=fmt == "nvfp4" and weight,
        stochastic_rounding=tensor == "grad_output",
    )
