"""The formats of this package, one literal each.  format.py explains the fields."""

from __future__ import annotations

from dataclasses import replace

from megatron_snip.formats.element import E2M1, E4M3, E5M2, element_named
from megatron_snip.formats.format import ROW, Format, Hadamard, register

BF16 = register(Format(name="bf16", element=None))
FP8 = register(Format(name="fp8", element=E4M3))
# FP4 rounds gradients stochastically: otherwise their small values would all become zero.
FP4 = register(Format(name="fp4", element=E2M1, stochastic_roles=frozenset({"grad_output"})))
FP8_E5M2 = register(Format(name="fp8_e5m2", element=E5M2))
# E5M2 for gradients: Transformer Engine's and Megatron-LM's "hybrid".
FP8_HYBRID = register(Format(name="fp8_hybrid", element=E4M3, gradient_element=E5M2))
# Power-of-two scales: DeepSeek-V3 (arXiv 2412.19437, sec. 3.3.2) and Transformer Engine's Float8BlockScaling.
FP8_POW2 = register(Format(name="fp8_pow2", element=E4M3, scale="fp32_pow2"))
# A scale for each row of an operand along the reduction dim: torchao's recipe "rowwise".
FP8_ROWWISE = register(Format(name="fp8_rowwise", element=E4M3, tile=ROW, weight_block=None, scale="fp32_pow2"))
FP4_POW2 = register(
    Format(name="fp4_pow2", element=E2M1, scale="fp32_pow2", stochastic_roles=frozenset({"grad_output"}))
)
# OCP Microscaling Formats (MX) v1.0, sec. 5: tiles of 32 along the reduction dim, for weights too.  FP8 scales are
# rounded up, so that nothing saturates: arXiv 2506.08027, Transformer Engine's MXFP8BlockScaling and torchao's RCEIL.
MXFP8 = register(Format(name="mxfp8", element=E4M3, tile=32, weight_block=None, scale="e8m0_ceil"))
MXFP8_E5M2 = register(Format(name="mxfp8_e5m2", element=E5M2, tile=32, weight_block=None, scale="e8m0_ceil"))
# The weight of dgrad and the input of wgrad are what fprop multiplied, cast again along their own dim: Transformer
# Engine's HybridQuantizer(columnwise_source="rowwise_dequantized").
MXFP8_DEQUANTIZED = register(replace(MXFP8, name="mxfp8_dequantized", recast=frozenset({"weight", "input"})))
# OCP MX v1.0, sec. 6.3: scales rounded down.
MXFP8_FLOOR = register(Format(name="mxfp8_floor", element=E4M3, tile=32, weight_block=None, scale="e8m0"))
MXFP6_E2M3 = register(Format(name="mxfp6_e2m3", element=element_named(2, 3), tile=32, weight_block=None, scale="e8m0"))
MXFP6_E3M2 = register(Format(name="mxfp6_e3m2", element=element_named(3, 2), tile=32, weight_block=None, scale="e8m0"))
# With scales rounded up, no gradient is clamped, so stochastic rounding keeps its mean.  wgrad's other operand rounds
# stochastically too: to nearest in blocks of 32, E2M1 takes a percent off what wgrad sums up (docs/numerics.md).
MXFP4 = register(
    Format(
        name="mxfp4",
        element=E2M1,
        tile=32,
        weight_block=None,
        scale="e8m0_ceil",
        stochastic_roles=frozenset({"grad_output", "wgrad.input"}),
    )
)
# TetraJet (arXiv 2502.20853): wgrad's input and dgrad's weight are what fprop multiplied, and all backward operands
# round stochastically.
MXFP4_TETRAJET = register(
    replace(
        MXFP4,
        name="mxfp4_tetrajet",
        stochastic_roles=frozenset({"grad_output", "dgrad.weight", "wgrad.input"}),
        recast=frozenset({"weight", "input"}),
    )
)
MXFP4_FLOOR = register(replace(MXFP4, name="mxfp4_floor", scale="e8m0", stochastic_roles=frozenset({"grad_output"})))
# The plain NVFP4 format: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sec. 2.
NVFP4_PLAIN = register(
    Format(
        name="nvfp4_plain",
        element=E2M1,
        tile=16,
        weight_block=None,
        scale="e4m3",
        stochastic_roles=frozenset({"grad_output"}),
    )
)
# The same paper's training recipe, and Transformer Engine's NVFP4BlockScaling: 16x16 blocks for weights, so that fprop
# and dgrad see the same values, and a random Hadamard transform over 16 tokens on both operands of wgrad.
NVFP4 = register(
    Format(
        name="nvfp4",
        element=E2M1,
        tile=16,
        weight_block=16,
        scale="e4m3",
        stochastic_roles=frozenset({"grad_output"}),
        hadamard=Hadamard("+++-+------+-+--"),  # get_wgrad_sign_vector of its reference_nvfp4.py
    )
)
# Four over six (arXiv 2512.02010) in the same recipe: a block's largest value becomes 6 or 4, whichever gives the
# smaller squared error.
NVFP4_4OVER6 = register(replace(NVFP4, name="nvfp4_4over6", scale="e4m3_4over6"))
# Backward in BF16 on what a quantised fprop multiplied: Transformer Engine's backward_override="dequantized".
BF16_DEQUANTIZED = register(Format(name="bf16_dequantized", element=None, recast=frozenset({"weight", "input"})))
