"""Stand-ins for what Triton's interpreter lacks or does otherwise than a GPU, in which kernels then give a GPU's bits.

The interpreter (3.6 and 3.9) rounds conversions to bf16 and FP8 with ties away from zero, and truncates subnormal
results, so that here torch converts, as the instructions do: to nearest even, FP8 saturating.  It has no function of
CUDA's library, so that the exponential is numpy's, and a sum that is rounded up is made of sums rounded to nearest.
It has no instructions of the machine either: here torch gives FP8 codes, and pairs of E2M1 are encoded as elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

from megatron_snip.quant.kernels import triton_stores
from megatron_snip.quant.kernels.triton_steps import encode_nearest
from megatron_snip.quant.kernels.triton_stores import E4M3_OF_FLOATS

_convert = interpreter._convert_float


def convert(array: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    """``interpreter._convert_float`` with the rounding of the device's instructions."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return torch.from_numpy(array.astype(np.int32) << 16).view(torch.float32).numpy()
    if source != tl.float32:
        return _convert(array, source, target, rounding)
    x = torch.from_numpy(np.array(array).view(np.float32))
    if target == tl.bfloat16:
        return x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    dtype = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}[target]
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()


_np_dtype = cache(interpreter._get_np_dtype)


def np_dtype(of: tl.dtype) -> np.dtype:
    """``interpreter._get_np_dtype``, whose table is made anew at every call."""
    return np.dtype(np.uint64) if of.scalar.is_ptr() else _np_dtype(of.scalar)


def exp(x: Any) -> Any:
    """In the place of ``libdevice.exp``."""
    return tl.exp(x)  # of triton as the interpreter has it while it runs


def add_ru(x: Any, y: Any) -> Any:
    """In the place of ``libdevice.add_ru``: the sum, or the next number above it where it was rounded down."""
    total = x + y
    of_y = total - x
    lost = (x - (total - of_y)) + (y - of_y)
    return tl.where(lost > 0, (total.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True), total)


def pairs_of_e2m1(low: Any, high: Any) -> Any:
    """In the place of the instruction of ``triton_stores``."""
    codes = []
    for x in (low, high):
        size = tl.minimum(tl.abs(x), 6.0, propagate_nan=tl.PropagateNan.NONE)
        codes.append(encode_nearest(size, 1, 0) + tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0))
    return (codes[0] | (codes[1] << 4)).to(tl.uint8)


def fp8_codes(x: Any, instruction: Any) -> Any:
    """In the place of the instructions of ``triton_stores``."""
    return x.to(tl.float8e4nv if instruction is E4M3_OF_FLOATS else tl.float8e5).to(tl.uint8, bitcast=True)


@contextmanager
def as_instructions_round() -> Iterator[None]:
    """Inside, the interpreter converts and exponentiates as this file's head says, and wastes less time.

    It would change ``triton.language`` anew at every call of a function, and computes each sum of integers twice, for
    an assertion that is off.
    """
    whole = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with (
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter, "_get_np_dtype", np_dtype),
        mock.patch.object(interpreter, "_patch_lang", lambda fn: type(whole)()),
        mock.patch.object(interpreter.interpreter_builder, "options", options),
        mock.patch.object(libdevice, "exp", exp),
        mock.patch.object(libdevice, "add_ru", add_ru),
        mock.patch.object(triton_stores, "pairs_of_e2m1", pairs_of_e2m1),
        mock.patch.object(triton_stores, "fp8_codes", fp8_codes),
    ):
        try:
            yield
        finally:
            whole.restore()
