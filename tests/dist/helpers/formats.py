"""Formats with transforms of every GEMM, and with operands that are cast again, for the ranks of a test."""

from __future__ import annotations

from dataclasses import replace

from megatron_snip.formats import ROLES, Hadamard, get_format, register

#: Precisions of three linears that read one input.
GROUPS = (
    ("bf16", "bf16", "bf16"), ("fp8", "fp8", "fp8"), ("fp8", "fp4", "fp8"), ("fp4", "bf16", "fp8"),
    ("fp8/fp4/bf16", "fp4", "fp4"), ("bf16/fp4/fp8", "fp8", "fp4"), ("mxfp8", "nvfp4_plain", "mxfp8"), ("nvfp4",) * 3,
    ("nvfp4_plain", "fp8/mxfp8/nvfp4_plain", "bf16/nvfp4_plain/bf16"), ("mxfp8_dequantized",) * 3,
    ("mxfp4_tetrajet", "fp8/bf16_dequantized/bf16_dequantized", "mxfp8"), ("nvfp4_plain/mxfp8_dequantized/mxfp8_dequantized",) * 3,
    ("again", "again", "fp8"), ("fp8_rowwise",) * 3, ("fp8_rowwise", "fp8/fp8_rowwise/fp8", "mxfp8"),
)  # fmt: skip


def register_formats() -> None:
    """Register them in this process.

    "rotated": along tokens and channels, which tp cuts, under the whole tensor's amax.  "again": every second operand
    is cast from the first.
    """
    everywhere = Hadamard("+--+" * 4, frozenset({"fprop", "dgrad", "wgrad"}))
    register(replace(get_format("nvfp4_plain"), name="rotated", hadamard=everywhere))
    register(replace(get_format("nvfp4_plain"), name="again", recast=frozenset(ROLES)))
