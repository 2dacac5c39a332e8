"""How a quantised linear works.  Read this first.

A linear Y = X W^T runs three GEMMs in a training step.  T tokens, K input and N output channels, and G the gradient of
Y:

    fprop   Y[T,N] = X[T,K]   @ W[N,K].T    sums over K
    dgrad  dX[T,K] = G[T,N]   @ W[N,K]      sums over N
    wgrad  dW[N,K] = G[T,N].T @ X[T,K]      sums over T

Each GEMM has a format (`LinearPrecision`), and both of its operands are cast to it: x ~ scale * q, where q is a
number of 8 bits or fewer (E4M3 in FP8, E2M1 in FP4), and one scale serves a block of neighbours.  A scale maps the
largest number of its block to the largest q, so a smaller block loses less to an outlier and stores more scales.

Why blocks run along the sum.  A tensor core adds up products of q and applies scales to partial sums only.  All
products of a partial sum must therefore have the same scales, so a block is a tile along the dim that the GEMM sums
over: 1 x 128 in `fp8` and `fp4`, 1 x 32 in `mxfp8`, 1 x 16 in `nvfp4`.  X is summed over K in fprop and over T in
wgrad, G over N and over T: each is cast twice, and the two casts have different values.  Weights of `fp8` and `fp4`
have square blocks of 128 x 128, which suit both sums.  Then dgrad multiplies by the same values as fprop, and the
gradient is that of the function that forward computed.

In code, without the random bits that FP4 needs:

    def q(tensor, role, dim):  # the role decides the block; dim is the one that the GEMM sums over
        return fake_quantize(tensor, "fp8", role=role, dim=dim)

    y = q(x, "input", 1) @ q(w, "weight", 1).T
    grad_x = q(g, "grad_output", 1) @ q(w, "weight", 0)
    grad_w = q(g, "grad_output", 0).T @ q(x, "input", 0)

`quantized_linear` gives the same bits.  It reads a tensor once for both of its casts, keeps X for wgrad as codes of
one byte per element, and multiplies codes where the hardware can.

What rounds how.  E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.  To nearest, the small values of a gradient
would become 0 at every step, so FP4 rounds G up or down at random, such that the mean is right.  The random bits are
a function of seed, iteration, linear and position (`RoundingKey`): every parallel layout draws the same ones.

What FP4 on Hopper is.  Hopper multiplies FP8, not FP4.  But E4M3 holds every number of E2M1, so FP4's q are written
as E4M3 codes, and the FP8 tensor cores multiply them: the values of FP4, at the speed and size of FP8.  Blackwell
packs two E2M1 codes into a byte and multiplies them faster than FP8.  Everywhere else scale * q is multiplied in the
compute dtype, which shows what a format does to the loss and saves no time.

Read on: formats/ (what a format is), casts/cast.py (every cast in plain torch), kernels/dispatch.py (`cast`, by a
kernel), and in linears/: operands.py (which form each operand takes), group.py (forward and backward) and linear.py
(the ways to run a linear).
"""

from __future__ import annotations

from megatron_snip.quant.casts.cast import Quantized
from megatron_snip.quant.casts.rounding import RoundingKey, name_stream
from megatron_snip.quant.kernels.dispatch import dequantize, fake_quantize, quantize
from megatron_snip.quant.linears.linear import (
    LINEAR_IMPLS,
    check_linear,
    compiled_impl,
    quantized_linear,
)
from megatron_snip.quant.linears.operands import Casts, LinearCall, LinearObserver, Operands, Sizes
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision
from megatron_snip.quant.linears.shape import KINDS, LinearShape
from megatron_snip.quant.linears.step_context import PLAIN, StepContext

__all__ = [
    "GEMMS",
    "KINDS",
    "LINEAR_IMPLS",
    "PLAIN",
    "Casts",
    "LinearCall",
    "LinearObserver",
    "LinearPrecision",
    "LinearShape",
    "Operands",
    "Quantized",
    "RoundingKey",
    "Sizes",
    "StepContext",
    "check_linear",
    "compiled_impl",
    "dequantize",
    "fake_quantize",
    "name_stream",
    "quantize",
    "quantized_linear",
]
