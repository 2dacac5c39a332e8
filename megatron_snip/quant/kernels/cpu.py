"""Loads and calls the compiled CPU cast (cpu.cpp), which setup.py builds when there is a compiler."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_snip.formats import Element
from megatron_snip.quant.cast import Cast, Form, Output
from megatron_snip.quant.rounding import RoundingKey

logger = logging.getLogger(__name__)

ABI = 1
MAX_BLOCK_COLS = 128

# A thread costs some 30 us to start: fewer elements than this a thread are not worth one.
_ELEMENTS_PER_THREAD = 1 << 18
_SLOWER = "casts on CPU take the slower plain torch path, with the same results; reinstall with a C++ compiler"


class _Call(ctypes.Structure):
    """cpu.cpp's struct Call, field by field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("row0", ctypes.c_int64),
        ("col0", ctypes.c_int64),
        ("block_rows", ctypes.c_int32),
        ("block_cols", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("codes", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("sign_code", ctypes.c_int32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("iteration", ctypes.c_uint32),
        ("element_max", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None (logged once) where it was not built or is of another version."""
    path = Path(__file__).with_name("_cpu.so")
    if not path.exists():
        logger.warning("the CPU kernel is not built: %s", _SLOWER)
        return None
    try:
        loaded = ctypes.CDLL(str(path))
        abi = loaded.megatron_snip_abi()
    except (OSError, AttributeError) as error:
        logger.warning("the CPU kernel does not load (%s): %s", error, _SLOWER)
        return None
    if abi != ABI:
        logger.warning("the CPU kernel has ABI %d, this version needs %d: %s", abi, ABI, _SLOWER)
        return None
    loaded.megatron_snip_cast.argtypes = (ctypes.POINTER(_Call),)
    loaded.megatron_snip_cast.restype = None
    return loaded


def takes(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output]) -> bool:
    """Whether the compiled kernel can cast ``x`` [R, C] into these forms.

    Subclasses (fake tensors, for one) have no memory to point at, and a compiler cannot trace ctypes.
    """
    return (
        x.is_cpu
        and type(x) in (Tensor, Parameter)
        and all(form.fmt.scale == "fp32" and form.block[1] <= MAX_BLOCK_COLS for form in forms)
        and all(output == "values" for output in outputs)
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def cast(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], amax: Tensor | None) -> list[Cast]:
    """The casts of ``x`` [R, C], which ``takes`` has accepted."""
    x = x.contiguous()
    casts = []
    for form in forms:
        out = torch.empty_like(x)
        _call(x, out, None, form.element, form.block, form.key)
        casts.append(Cast(out, None, None))
    return casts


def _call(
    x: Tensor,
    out: Tensor,
    scales: Tensor | None,
    element: Element,
    block: tuple[int, int],
    key: RoundingKey | None,
) -> None:
    """Run the kernel; scales None asks for dequantised values."""
    loaded = library()
    assert loaded is not None and block[1] <= MAX_BLOCK_COLS
    rows, cols = x.shape
    key0, key1 = (0, 0) if key is None else key.words
    threads = min(torch.get_num_threads(), 1 + x.numel() // _ELEMENTS_PER_THREAD)
    loaded.megatron_snip_cast(
        _Call(
            x.data_ptr(),
            out.data_ptr(),
            None if scales is None else scales.data_ptr(),
            rows,
            cols,
            0 if key is None else key.row0,
            0 if key is None else key.col0,
            *block,
            x.dtype is torch.bfloat16,
            scales is not None,
            key is not None,
            element.mantissa_bits,
            element.emin,
            element.sign_code,
            key0,
            key1,
            0 if key is None else key.iteration,
            element.max,
            threads,
        )
    )
