"""Launches the Triton kernels of triton_kernels.py, which cast on a GPU with the specification's bits.

One launch reads x once and writes one form or two.  A weight's operands for fprop and dgrad differ only in layout, so
they are one cast that is stored twice.  SwiGLU's product of two tensors is computed as they are read.  If triton is not
installed, the kernels take nothing and the specification runs.

What has been run: the kernels compile for Hopper and Blackwell.  Their code has no fused, flushed or approximate
arithmetic except SwiGLU's, which is that of torch's kernels (tests/unit/quant/kernels/test_triton_compile.py).  They
give the specification's bits in Triton's CPU interpreter (test_triton_cast.py there).  In that test, torch replaces the
conversions to bf16 and FP8, which the interpreter rounds wrongly, and numpy's exponential replaces CUDA's.  On an H200,
all casts of tests/gpu/core.py have the specification's bits (benchmarks/results/2026-11-26-gpu-h200.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_snip.formats import Element, Hadamard
from megatron_snip.quant.casts.cast import (
    OPERANDS,
    Form,
    Operand,
    Quantized,
    allocate,
    as_read,
    part_of,
    scales_of_rows,
)
from megatron_snip.quant.kernels.triton_launches import ANY, COLS, FP8, FP8_AND_FP4, MAX_BLOCK, Kind, Launch, launches

if TYPE_CHECKING:
    from megatron_snip.quant.casts.rounding import RoundingKey, Rows

# Offsets inside a tile are 32-bit, so a tile of 128 rows must span less than 2**31 elements.
_MAX_SIDE = 1 << 24

_AMAX_SIZE, _AMAX_WARPS = 16384, 8
_PRODUCT_SIZE, _PRODUCT_WARPS = 2048, 8
_HADAMARD_TILE, _HADAMARD_WARPS = (4, 128), 4  # a 16th of the rows, which hold at least a group, and columns


_MIN_CAPABILITY, _FP8_CAPABILITY, _FP4_CAPABILITY = (8, 0), (8, 9), (10, 0)

#: For every launch: no fused multiply-add, and subnormal numbers are not flushed to 0.
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def takes(x: Tensor, forms: Sequence[Form], up: Tensor | None = None) -> bool:
    """Whether the kernels can cast ``x`` [R, C], or SwiGLU's product of it and ``up``, into these forms.

    They can on NVIDIA GPUs, if the sides of blocks are powers of two, and under "e4m3_4over6" 1 or 16.
    """
    if not on_nvidia(x) or (up is not None and not takes_product(x, up)):
        return False
    for form in forms:
        if not natural(form.part) or (form.output in OPERANDS and form.element.carrier is None):
            return False
        if form.fmt.scale == "e4m3_4over6" and max(form.block) != 16:
            return False
    return True


def takes_product(gate: Tensor, up: Tensor) -> bool:
    """Whether kernels compute SwiGLU's product of gate and up [R, C], and its gradients, with torch's bits."""
    return on_nvidia(gate) and on_nvidia(up) and gate.dtype == up.dtype == torch.bfloat16


def on_nvidia(x: Tensor) -> bool:
    """Whether kernels can read ``x`` [...] and write to its device.

    Subclasses such as fake tensors have no memory.
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()  # first, or a compiler would trace ``installed`` and warn
        and x.dtype in (torch.bfloat16, torch.float32, torch.uint8)
        and installed()
        and type(x) in (Tensor, Parameter)
        and torch.version.hip is None
        and x.numel() > 0
        and max(x.shape) < _MAX_SIDE
        and _capability(x.device) >= _MIN_CAPABILITY
    )


@cache
def natural(block: tuple[int, int]) -> bool:
    """Whether the kernels' tiles hold whole blocks."""
    return all(side & (side - 1) == 0 and side <= MAX_BLOCK for side in block)


def run(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: bool = True,
    up: Tensor | None = None,
) -> list[Operand]:
    """``cast.reference`` of x [R, C] for forms that ``takes`` has accepted; one launch writes two forms.

    x is rounded to ``dtype``, and multiplied into SwiGLU's product with ``up``, as it is read, or beforehand with
    row-wise scales.
    """
    if any(form.by_rows for form in forms):
        x, dtype, up = as_read(x, dtype, up), None, None
    x = _readable(x, dtype)
    x, up = _by_rows(x), None if up is None else _by_rows(up)
    if amax is not None:
        amax = amax.to(x.device, torch.float32)
    made = [allocate(x, form, dtype=dtype, count=count) for form in forms]
    for one in made:
        if one.saturated is not None:
            one.saturated.zero_()
    rounded, kinds = dtype not in (None, x.dtype), tuple(map(Kind.of, forms))
    for launch in launches(kinds, up is not None, _converts(x.device)):
        written = [_with_given(x, one) for one in made[launch.forms]]
        _launch(launch, x, up, written, amax, rounded)
        if count and launch.twins:
            first, twin = (one.saturated for one in written)
            assert first is not None and twin is not None
            twin.copy_(first)
    return made


def _with_given(x: Tensor, made: Operand) -> Operand:
    """The operand as the kernel takes it; for row-wise scales, decode and encode of x [R, C] replace its scales."""
    form, _, scales, *_ = made
    assert form is not None
    if not form.by_rows:
        return made
    encode, decode = scales_of_rows(x, form)
    if scales is not None:
        scales.copy_(decode)
    return made._replace(scales=decode, tensor_scale=encode)


def _readable(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x`` [R, C], if kernels can round it to ``dtype`` as they read it; else a rounded copy."""
    return x if dtype in (None, x.dtype) or (x.dtype, dtype) == (torch.float32, torch.bfloat16) else x.to(dtype)


def _by_rows(x: Tensor) -> Tensor:
    """``x`` [R, C], or a copy if the kernels cannot read its rows."""
    return x.contiguous() if x.stride(1) != 1 or x.stride(0) >= _MAX_SIDE else x


def _launch(
    launch: Launch,
    x: Tensor,
    up: Tensor | None,
    written: Sequence[Operand],
    amax: Tensor | None,
    rounded: bool,
) -> None:
    """Write the casts of x [R, C], with contiguous rows, or of silu(x) * up.  rounded: to bfloat16 first."""
    from megatron_snip.quant.kernels import triton_kernels, triton_steps

    rows, cols = x.shape
    arguments: list[Any] = [x, x.stride(0), up, 0 if up is None else up.stride(0), rows, cols, amax]
    keys = [None if form is None else form.key for form, *_ in written]
    for (_, data, scales, tensor_scale, saturated), key in zip(written, keys, strict=True):
        strides = (0, 0) if scales is None else scales.stride()
        arguments += (data, scales, saturated, tensor_scale, *strides, *_random(key, x.device))
    if len(written) == 1:
        arguments += (None, None, None, None, 0, 0, *_random(None, x.device))
    even = rows % launch.covered == 0 and cols % COLS == 0
    grid = (-(-rows // launch.covered) * (launch.covered // launch.rows) * -(-cols // COLS),)
    chunk, warps = launch.tiling.chunk, launch.tiling.warps
    alike = len(keys) == 2 and keys[0] is not None and keys[0] == keys[1]
    how = triton_steps.How(even, rounded, min(chunk, 32 * warps * 16 // COLS), alike)
    with torch.cuda.device_of(x):
        triton_kernels.cast_kernel[grid](
            *arguments,
            *launch.specs,
            launch.rows,
            COLS,
            chunk,
            how,
            num_warps=warps,
            maxnreg=launch.registers,
            **OPTIONS,
        )


def _converts(device: torch.device) -> tuple[Element, ...]:
    """The elements that an instruction of the device converts float32 to."""
    capability = _capability(device) if device.type == "cuda" else (0, 0)
    return FP8_AND_FP4 if capability >= _FP4_CAPABILITY else FP8 if capability >= _FP8_CAPABILITY else ()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)  # cached, because torch takes many calls to find it


def _random(key: RoundingKey | None, device: torch.device) -> list[Any]:
    """A key as the kernel takes it: words that stay the same for a run, and pointers to iteration, row0 and rows.

    Words are signed 32-bit integers, so that no value makes Triton compile another kernel.
    """
    if key is None:
        return [0, 0, 0, None, None, None]
    stream = _stream(device)
    iteration, row0 = (_on_device(number, device, stream) for number in (key.iteration, key.row0))
    rows = None if key.rows is None else _rows_on_device(key.rows, device)
    return [*_signed(*key.words, key.col0 >> 3), iteration, row0, rows]


@lru_cache(maxsize=8192)  # six operands for each linear of a large model
def _signed(*words: int) -> list[int]:
    return [(word + 2**31) % 2**32 - 2**31 for word in words]


def _stream(device: torch.device) -> int | None:
    """The stream that a tensor on a device may be cached for; other streams would not wait for its values.

    None while a CUDA graph is captured, because the graph may outlive the cache.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def _on_device(number: int, device: torch.device, stream: int | None) -> Tensor:
    """A number as int64 [1] on a device, written once for all casts of an iteration or microbatch."""
    return torch.full((1,), number, device=device) if stream is None else _written(number, device, stream)


@lru_cache(maxsize=1024)
def _written(number: int, device: torch.device, stream: int) -> Tensor:
    return torch.full((1,), number, device=device)


@cache
def _rows_on_device(rows: Rows, device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)  # the same for the whole run


def takes_codes(quantized: Quantized) -> bool:
    """Whether ``dequantize`` takes these codes [R, C]."""
    return quantized.fmt.quantised and on_nvidia(quantized.codes) and natural(part_of(quantized.block))


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """``Quantized.dequantize`` of codes [R, C] that ``takes_codes`` has accepted, of any strides: row-major [R, C]."""
    from megatron_snip.quant.kernels import triton_kernels

    element, codes = quantized.fmt.element, quantized.codes
    assert element is not None
    if max(codes.stride()) >= _MAX_SIDE:
        codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    block_rows, block_cols = part_of(quantized.block)
    scales = quantized.scales
    if quantized.block != (block_rows, block_cols):  # one scale for all parts of a row
        scales = scales.expand(-(-codes.shape[0] // block_rows), -(-codes.shape[1] // block_cols))
    rows, cols = max(ANY.chunk, block_rows), COLS
    grid = (-(-codes.shape[0] // rows) * -(-codes.shape[1] // cols),)
    with torch.cuda.device_of(codes):
        triton_kernels.dequantize_kernel[grid](
            codes,
            *codes.stride(),
            scales,
            *scales.stride(),
            quantized.tensor_scale,
            out,
            *codes.shape,
            block_rows,
            block_cols,
            element.mantissa_bits,
            element.bias,
            element.max_code,
            element.sign_code,
            rows,
            cols,
            num_warps=rows * cols // 2048,
            **OPTIONS,
        )
    return out


def finite_amax(x: Tensor, dtype: torch.dtype | None = None, up: Tensor | None = None) -> Tensor:
    """``cast.finite_amax`` of x [R, C] that ``on_nvidia`` has accepted, rounded to ``dtype`` as it is read.

    up: if given, find the amax of SwiGLU's product; ``takes_product`` has accepted both.  It takes one launch and does
    not wait for the device.
    """
    from megatron_snip.quant.kernels import triton_kernels

    x, up = _readable(x, dtype).contiguous(), None if up is None else up.contiguous()
    out, state = torch.empty((), device=x.device), _atomic_state(x.device)
    with torch.cuda.device_of(x):
        triton_kernels.amax_kernel[(-(-x.numel() // _AMAX_SIZE),)](
            x, up, out, state, x.numel(), _AMAX_SIZE, dtype not in (None, x.dtype), num_warps=_AMAX_WARPS, **OPTIONS
        )
    return out


def _atomic_state(device: torch.device) -> Tensor:
    stream = _stream(device)
    return torch.zeros(2, dtype=torch.int32, device=device) if stream is None else _state(device, stream)


@cache
def _state(device: torch.device, stream: int) -> Tensor:
    """Zeros that ``amax_kernel`` and ``hadamard_kernel`` use and leave as zeros."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def hadamard(x: Tensor, transform: Hadamard, dim: int) -> tuple[Tensor, Tensor]:
    """``hadamard.hadamard`` of x [R, C] that ``on_nvidia`` has accepted, and its ``finite_amax``, in one launch."""
    from megatron_snip.quant.kernels import triton_kernels

    x = _by_rows(x)
    out, largest = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty((), device=x.device)
    # the kernel transforms columns; rows are the columns of the transposed matrix
    source, target = (x, out) if dim == 0 else (x.T, out.T)
    (rows, cols), parts, (height, width) = source.shape, transform.length // 16, _HADAMARD_TILE
    height, signs = max(height, parts), sum(1 << at for at, sign in enumerate(transform.signs) if sign == "-")
    even = rows % (16 * height) == 0 and cols % width == 0
    with torch.cuda.device_of(x):
        triton_kernels.hadamard_kernel[(-(-rows // (16 * height)) * -(-cols // width),)](
            source, *source.stride(), target, *target.stride(), largest, _atomic_state(x.device), rows, cols,
            signs, parts, transform.length**-0.5, height, width, even,
            num_warps=_HADAMARD_WARPS, **OPTIONS,
        )  # fmt: skip
    return out, largest


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up [...], which ``takes_product`` has accepted, from their product's, in one launch."""
    from megatron_snip.quant.kernels import triton_kernels

    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grads = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        triton_kernels.swiglu_backward_kernel[(-(-gate.numel() // _PRODUCT_SIZE),)](
            grad, gate, up, *grads, gate.numel(), _PRODUCT_SIZE, num_warps=_PRODUCT_WARPS, **OPTIONS
        )
    return grads
