"""Loads and calls the compiled CPU casts (cpu.cpp), which setup.py builds if there is a compiler."""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_snip.formats import SCALES, Element
from megatron_snip.formats.element import Specials
from megatron_snip.quant.casts.cast import (
    Form,
    Operand,
    Quantized,
    allocate,
    as_read,
    form_of,
    reference,
    scales_of_rows,
)

logger = logging.getLogger(__name__)

ABI = 17
MAX_BLOCK_COLS, MAX_4OVER6_ROWS = 1024, 128
BEST_ISA = 2

# Waking a thread takes a few microseconds, which does not pay off for fewer elements than this.
_ELEMENTS_PER_THREAD = 1 << 16
# Outputs from this size on bypass the caches, which could not hold them until the next operation reads them.
_STREAM_BYTES = 32 << 20
_READABLE, _PLAIN = (torch.bfloat16, torch.float32, torch.uint8), (Tensor, Parameter)
_SLOWER = "casts on CPU take the slower plain torch path, with the same results; reinstall with a C++ compiler"

# cpu.h's structs, field by field
_GRID = struct.Struct("@ff5i")
_FORM = struct.Struct("@6PqqQQ4q3Ii72s")
_CONSTANTS = struct.Struct("@4i28s28s")
_CALL = struct.Struct("@PPqqq4i")
_DECODE = struct.Struct("@PPPqqqqq3i28s")
_NEAREST = (0,) * 10  # instead of a key


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None (logged once) if it was not built or has another version."""
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
    pointer, whole, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in {
        "cast": (ctypes.c_char_p, ctypes.c_char_p),
        "decode": (ctypes.c_char_p,),
        "adamw": (ctypes.c_char_p,),
        "amax": (pointer, whole, short, short, pointer),
        "copy": (pointer, pointer, whole, short),
        "blend": (pointer, whole, whole, pointer, pointer, pointer),
    }.items():
        function = getattr(loaded, f"megatron_snip_{name}")
        function.argtypes, function.restype = arguments, None
    return loaded


def takes(x: Tensor, forms: Sequence[Form], up: Tensor | None = None) -> bool:
    """Whether the compiled kernel can cast ``x`` [R, C], or SwiGLU's product of it and ``up``, into these forms."""
    if not reads(x):
        return False
    for form in forms:
        if form.part[1] > MAX_BLOCK_COLS or form.output == "swizzled":  # only Blackwell reads that
            return False
        if form.fmt.scale == "e4m3_4over6" and form.block[0] > MAX_4OVER6_ROWS:
            return False
        if form.key is not None and form.key.col0 + x.shape[1] > 2**34:
            return False
    return True


def reads(x: Tensor) -> bool:
    """Whether there is a compiled kernel and ``x`` [...] has memory that it can read.

    Subclasses such as fake tensors have none.  Compilers never get here: they see operators (op.py).
    """
    return x.is_cpu and x.dtype in _READABLE and type(x) in _PLAIN and library() is not None


def run(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: bool = True,
    up: Tensor | None = None,
    isa: int = BEST_ISA,
) -> list[Operand]:
    """``cast.reference`` of x [R, C] for forms that ``takes`` has accepted, all from one read of x.

    isa: 0 generic, 1 AVX2, 2 AVX-512, or the best one below that this machine has.
    """
    x = as_read(x, dtype, up)
    if x.numel() == 0:
        return reference(x, forms, amax, count=count)
    x = x.contiguous()
    made = room(x, forms, count)
    fill(x, made, amax, isa)
    for i, form in enumerate(forms):
        if form.output == "operand" and form.dim == 0:
            made[i] = made[i]._replace(data=made[i].data.T.contiguous().T)
    return made


def fill(x: Tensor, made: Sequence[Operand], amax: Tensor | None, isa: int = BEST_ISA) -> None:
    """Write the casts of ``x`` [R, C], contiguous and not empty, into operands from ``room``."""
    given = [_given(x, one) for one in made]  # kept alive until the kernel has read it
    packed = b"".join(map(_packed, made, given))
    rows, cols = x.shape
    call = _CALL.pack(
        x.data_ptr(),
        0 if amax is None else amax.data_ptr(),
        rows,
        cols,
        _STREAM_BYTES,
        x.dtype is torch.bfloat16,
        threads_of(rows * cols),
        isa,
        len(made),
    )
    loaded = library()
    assert loaded is not None
    loaded.megatron_snip_cast(call, packed)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy with the kernel's threads and non-temporal stores, for benchmarks of memory bandwidth.

    Both [...] are contiguous and of equal size; size and addresses are multiples of 64 bytes.
    """
    loaded, size = library(), source.numel() * source.element_size()
    assert loaded is not None and size == target.numel() * target.element_size()
    assert (source.data_ptr() | target.data_ptr() | size) % 64 == 0
    loaded.megatron_snip_copy(source.data_ptr(), target.data_ptr(), size, threads_of(source.numel()))


def dequantize(quantized: Quantized, dtype: torch.dtype, isa: int = BEST_ISA) -> Tensor:
    """``Quantized.dequantize`` to bfloat16 or float32, for codes that ``reads`` has accepted: [R, C]."""
    codes, scales, element = quantized.codes.contiguous(), quantized.scales, quantized.fmt.element
    assert element is not None and dtype in (torch.bfloat16, torch.float32)
    if quantized.tensor_scale is not None:
        scales = scales * quantized.tensor_scale
    out, (rows, cols) = torch.empty_like(codes, dtype=dtype), codes.shape
    if not rows or not cols:
        return out
    scales = scales.contiguous()
    loaded = library()
    assert loaded is not None
    loaded.megatron_snip_decode(
        _DECODE.pack(
            codes.data_ptr(),
            scales.data_ptr(),
            out.data_ptr(),
            rows,
            cols,
            *quantized.block,
            _STREAM_BYTES,
            dtype is torch.bfloat16,
            threads_of(rows * cols),
            isa,
            _grid(element.exponent_bits, element.mantissa_bits, element.specials),
        )
    )
    return out


def finite_amax(x: Tensor) -> Tensor:
    """``cast.finite_amax`` of x [...] that ``reads`` has accepted: float32 scalar."""
    loaded, x, out = library(), x.contiguous(), torch.empty(())
    assert loaded is not None
    loaded.megatron_snip_amax(x.data_ptr(), x.numel(), x.element_size(), threads_of(x.numel()), out.data_ptr())
    return out


def threads_of(elements: int) -> int:
    """How many threads a kernel uses for this many elements."""
    return min(torch.get_num_threads(), 1 + elements // _ELEMENTS_PER_THREAD)


def room(x: Tensor, forms: Sequence[Form], count: bool = True) -> list[Operand]:
    """Allocate casts of x [R, C].  The kernel writes all codes row-major, even those of "operand"."""
    made = [allocate(x, form, count=count) for form in forms]
    for i, form in enumerate(forms):
        if form.output == "operand":
            scales = made[i].scales
            assert scales is not None
            scales.zero_()  # the kernel does not write the padding
            made[i] = made[i]._replace(data=torch.empty_like(x, dtype=torch.uint8))
    return made


def _given(x: Tensor, made: Operand) -> tuple[Tensor, Tensor] | None:
    """Store row-wise scales of x [R, C], and return encode and scale; None if blocks have their own scales."""
    form, _, scales, *_ = made
    assert form is not None
    if not form.by_rows:
        return None
    found = scales_of_rows(x, form)
    if scales is not None:
        scales.copy_(found[1])
    return found


def _packed(made: Operand, given: tuple[Tensor, Tensor] | None) -> bytes:
    """A form and where its cast goes, as cpu.h's struct Form.  given: from ``_given``."""
    form, data, scales, tensor_scale, saturated = made
    assert form is not None
    key, drawn = form.key, _NEAREST
    if key is not None:
        drawn = (key.row0, key.col0, *(key.rows or (0, 0, 0, 0)), *key.words, key.iteration, True)
    return _FORM.pack(
        data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if saturated is None else saturated.data_ptr(),
        0 if tensor_scale is None else tensor_scale.data_ptr(),
        *((0, 0) if given is None else [one.data_ptr() for one in given]),
        *((0, 0) if scales is None else scales.stride()),
        *drawn,
        _constants(form.text),
    )


@lru_cache(maxsize=1024)
def _constants(text: str) -> bytes:
    """The end of cpu.h's struct Form, which is the same for every call with a form of this text."""
    form = form_of(text)
    return _CONSTANTS.pack(
        form.output != "values",
        SCALES.index(form.fmt.scale),
        *form.part,
        *(_grid(one.exponent_bits, one.mantissa_bits, one.specials) for one in (form.element, form.stored)),
    )


@cache
def _grid(exponent_bits: int, mantissa_bits: int, specials: Specials) -> bytes:
    """An element as cpu.h's struct Grid."""
    element = Element(exponent_bits, mantissa_bits, specials)
    return _GRID.pack(
        element.max,
        element.saturation,
        element.mantissa_bits,
        element.emin,
        element.emax,
        element.sign_code,
        element.max_code,
    )
