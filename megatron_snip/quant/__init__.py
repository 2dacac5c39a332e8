"""Casts to low-precision formats and the linear that uses them."""

from __future__ import annotations

from megatron_snip.quant.backend import Sizes
from megatron_snip.quant.cast import Quantized
from megatron_snip.quant.dispatch import dequantize, fake_quantize, quantize
from megatron_snip.quant.linear import (
    check_linear,
    compiled_impl,
    linear_implementations,
    linear_runs,
    quantized_linear,
    register_linear,
    run_linear,
)
from megatron_snip.quant.operands import Casts, LinearCall, LinearObserver, Operands
from megatron_snip.quant.precision import GEMMS, LinearPrecision
from megatron_snip.quant.rounding import Clock, RoundingKey, name_stream
from megatron_snip.quant.shape import KINDS, LinearShape
from megatron_snip.quant.step_context import PLAIN, StepContext

__all__ = [
    "GEMMS",
    "KINDS",
    "PLAIN",
    "Casts",
    "Clock",
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
    "linear_implementations",
    "linear_runs",
    "name_stream",
    "quantize",
    "quantized_linear",
    "register_linear",
    "run_linear",
]
