"""Casts on a GPU by the Triton kernels of triton_kernels.py, with the specification's bits.

One launch reads x once and writes one form or two; a weight's operands for fprop and dgrad differ in layout alone and
are one cast that is stored twice.  SwiGLU's product of two tensors is made as they are read.  Where triton is not
installed nothing here is taken, and the specification runs.

What has been run: the kernels compile for Hopper and Blackwell and their code has no fused, flushed or approximate
arithmetic but SwiGLU's, which is that of torch's kernels (tests/unit/quant/kernels/test_triton_compile.py); in Triton's
interpreter, on CPU, they give the specification's bits (test_triton_cast.py there), with torch in place of the
conversions to bf16 and FP8, which the interpreter rounds wrongly, and numpy's exponential in place of CUDA's.
Nothing has run on a GPU yet: tests/gpu waits for one, and no speed has been measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_snip.formats import SCALES
from megatron_snip.formats.element import E4M3, E5M2
from megatron_snip.quant.cast import OPERANDS, OUTPUTS, Cast, Constants, Form, Output, Quantized, allocate
from megatron_snip.quant.swizzled import TILE_ROWS

if TYPE_CHECKING:
    from megatron_snip.quant.kernels.triton_steps import FormSpec
    from megatron_snip.quant.rounding import RoundingKey, Rows

MAX_BLOCK = 128

# Offsets inside a tile are 32-bit: a tile of 128 rows spans less than 2**31 elements.
_MAX_SIDE = 1 << 24

# A program's columns: a whole block of MAX_BLOCK.
_COLS = 128
_AMAX_SIZE, _AMAX_WARPS = 16384, 8
_PRODUCT_SIZE, _PRODUCT_WARPS = 2048, 8


class Tiling(NamedTuple):
    """How many rows of x a program has in registers at once, and by how many warps."""

    chunk: int
    warps: int


#: By the longest side of a block and whether a form rounds stochastically.  Chosen by counts of the compiled code, not
#: by a clock, since none was at hand: of the tilings that leave an SM 16 warps on Hopper and Blackwell, that with the
#: fewest instructions an element (benchmarks/kernel_resources.py --sweep).  benchmarks/gpu.py measures them all.
TILINGS = {
    (128, False): Tiling(32, 4),
    (128, True): Tiling(16, 4),
    (32, False): Tiling(32, 8),
    (32, True): Tiling(32, 8),
    (16, False): Tiling(16, 4),
    (16, True): Tiling(16, 4),
}
_ANY = Tiling(32, 4)  # for other blocks
# For swizzled operands in blocks of 32, nearest.
_SWIZZLED = Tiling(32, 4)
# For SwiGLU's product in blocks of 128, nearest: such blocks whole, or a second way would make the product again.
_WHOLE = Tiling(128, 16)

_MIN_CAPABILITY, _FP8_CAPABILITY = (8, 0), (8, 9)
_FP8 = {E4M3: "e4m3", E5M2: "e5m2"}

#: Of every launch: no fused multiply-add, and subnormal numbers are kept.
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def takes(x: Tensor, forms: Sequence[Form], outputs: Sequence[Output], up: Tensor | None = None) -> bool:
    """Whether the kernels can cast ``x`` [R, C], or SwiGLU's product of it and ``up``, into these forms: on NVIDIA's
    GPUs, blocks of powers of two.
    """
    return (
        on_nvidia(x)
        and (up is None or takes_product(x, up))
        and all(
            _natural(form.block)
            and not form.transformed
            and (output not in OPERANDS or form.element.carrier is not None)
            for form, output in zip(forms, outputs, strict=True)
        )
    )


def takes_product(gate: Tensor, up: Tensor) -> bool:
    """Whether kernels make SwiGLU's product of gate and up [R, C], and its gradients, with the bits of torch's."""
    return on_nvidia(gate) and on_nvidia(up) and gate.dtype == up.dtype == torch.bfloat16


def on_nvidia(x: Tensor) -> bool:
    """Whether kernels can read ``x`` [...] and write beside it.

    Subclasses (fake tensors, for one) have no memory to point at.
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()  # before a compiler could trace what finds triton, and warn of it
        and x.dtype in (torch.bfloat16, torch.float32, torch.uint8)
        and installed()
        and type(x) in (Tensor, Parameter)
        and torch.version.hip is None
        and x.numel() > 0
        and max(x.shape) < _MAX_SIDE
        and torch.cuda.get_device_capability(x.device) >= _MIN_CAPABILITY
    )


def _natural(block: tuple[int, int]) -> bool:
    """Whether tiles of the kernels hold whole blocks."""
    return all(side & (side - 1) == 0 and side <= MAX_BLOCK for side in block)


def tiling(forms: Sequence[Form], product: bool = False, swizzled: bool = False) -> Tiling:
    """The entry of TILINGS for a launch of these forms; blocks of up to 32 rows fit a chunk and are read once.

    product: whether SwiGLU's product is cast.  swizzled: whether an operand is.
    """
    side, stochastic = max(max(form.block) for form in forms), any(form.key is not None for form in forms)
    if product and side == MAX_BLOCK and not stochastic:
        return _WHOLE
    if swizzled and side == 32 and not stochastic:
        return _SWIZZLED
    chosen = TILINGS.get((side, stochastic), _ANY)
    high = any(chosen.chunk < form.block[0] <= _ANY.chunk for form in forms)
    return _ANY if high else chosen


def cast(
    x: Tensor,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    amax: Tensor | None,
    dtype: torch.dtype | None = None,
    count: bool = True,
    up: Tensor | None = None,
) -> list[Cast]:
    """The casts of ``x`` [R, C], or with ``up`` of silu(x) * up, which ``takes`` has accepted; two forms a launch.

    dtype: what x is rounded to as it is read.  count: as ``cast_reference``.
    """
    x = _readable(x, dtype)
    x, up = _by_rows(x), None if up is None else _by_rows(up)
    if amax is not None:
        amax = amax.to(x.device, torch.float32)
    casts = [allocate(x, form, output, dtype=dtype, count=count) for form, output in zip(forms, outputs, strict=True)]
    for made in casts:
        if made.saturated is not None:
            made.saturated.zero_()
    first = 0
    while first < len(forms):
        pair, swizzled = forms[first : first + 2], "swizzled" in outputs[first : first + 2]
        chunk = tiling(pair, up is not None, swizzled).chunk
        both = len({form.block[0] for form in pair if form.block[0] > chunk}) < 2
        chosen = slice(first, first + 1 + both)
        rounded = dtype not in (None, x.dtype)
        _launch(x, up, forms[chosen], outputs[chosen], casts[chosen], amax, rounded=rounded)
        if count and _twins(forms[chosen], outputs[chosen]):
            one, twin = (made.saturated for made in casts[chosen])
            assert one is not None and twin is not None
            twin.copy_(one)
        first = chosen.stop
    return casts


def _readable(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x`` [R, C], which kernels round to ``dtype`` as they read it, or what they cannot round, rounded."""
    return x if dtype in (None, x.dtype) or (x.dtype, dtype) == (torch.float32, torch.bfloat16) else x.to(dtype)


def _by_rows(x: Tensor) -> Tensor:
    """``x`` [R, C], or a copy whose rows the kernels can read."""
    return x.contiguous() if x.stride(1) != 1 or x.stride(0) >= _MAX_SIDE else x


def _launch(
    x: Tensor,
    up: Tensor | None,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    casts: Sequence[Cast],
    amax: Tensor | None,
    rounded: bool,
) -> None:
    """One launch, which writes ``casts``: x [R, C] with contiguous rows, rounded to bfloat16 or not, or silu(x) * up,
    in one form, or two whose blocks higher than a chunk are equally high.
    """
    from megatron_snip.quant.kernels import triton_kernels
    from megatron_snip.quant.kernels.triton_steps import How

    fp8 = _converts_fp8(x.device)
    specs: list[Any] = []
    arguments: list[Any] = [x, x.stride(0), up, 0 if up is None else up.stride(0), *x.shape, amax]
    twins = _twins(forms, outputs)
    for form, output, made in zip(forms, outputs, casts, strict=True):
        phase = -1 if form.key is None else form.key.col0 & 7
        specs.append(_spec(form.constants(output), phase, fp8, twins))
        strides = (0, 0) if made.scales is None else made.scales.stride()
        arguments += [*made, *strides, *_random(form.key, x.device)]
    if len(forms) == 1:
        specs.append(None)
        arguments += [None, None, None, None, 0, 0, *_random(None, x.device)]
    if twins:
        specs[1] = None
    swizzled = "swizzled" in outputs
    chunk, warps = tiling(forms, up is not None, swizzled)
    rows = max(chunk, *(form.block[0] for form in forms))
    covered = TILE_ROWS if swizzled else rows  # beyond the edge lie scales of 0
    even = x.shape[0] % covered == 0 and x.shape[1] % _COLS == 0
    grid = (-(-x.shape[0] // covered) * (covered // rows) * -(-x.shape[1] // _COLS),)
    with torch.cuda.device_of(x):
        triton_kernels.cast_kernel[grid](
            *arguments, *specs, rows, _COLS, chunk, How(even, rounded), num_warps=warps, **OPTIONS
        )


def _twins(forms: Sequence[Form], outputs: Sequence[Output]) -> bool:
    """Whether these are two operands of the same codes and scales, one along each dim."""
    if len(forms) < 2 or forms[0].key is not None or forms[1].key is not None:
        return False
    one, other = (form.constants(output) for form, output in zip(forms, outputs, strict=True))
    square = one.block_rows == one.block_cols
    return square and OUTPUTS[one.output] in OPERANDS and one.dim != other.dim and one == other._replace(dim=one.dim)


def _converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions that convert float32 to FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


@cache
def _spec(constants: Constants, phase: int, fp8: bool, twins: bool) -> FormSpec:
    """What a kernel is compiled for; phase and twins as FormSpec has them, fp8: whether the device converts."""
    from megatron_snip.quant.kernels.triton_steps import FormSpec

    element, stored, output = constants.element, constants.stored, OUTPUTS[constants.output]
    hardware = _FP8.get(stored, "") if fp8 and output != "values" else ""
    return FormSpec(
        block_rows=constants.block_rows,
        block_cols=constants.block_cols,
        scale=SCALES[constants.scale],
        mantissa=element.mantissa_bits,
        emin=element.emin,
        emax=element.emax,
        largest=element.max,
        saturation=element.saturation,
        sixth=float(np.float32(1.0) / np.float32(element.max)),
        output=output,
        transposed=output in OPERANDS and constants.dim == 0,
        twins=twins,
        packed=constants.packed,
        each=constants.each,
        code_mantissa=stored.mantissa_bits,
        code_emin=stored.emin,
        sign_code=stored.sign_code,
        hardware=hardware,
        direct=hardware != "" and stored == element and phase < 0,
        phase=phase,
    )


def _random(key: RoundingKey | None, device: torch.device) -> list[Any]:
    """A key as the kernel takes it: words that stay for a run, and where the kernel reads iteration, row0 and rows.

    Words are 32 bits as signed integers, so that their size never asks for a new kernel.
    """
    if key is None:
        return [0, 0, 0, None, None, None]
    words = [(word + 2**31) % 2**32 - 2**31 for word in (*key.words, key.col0 >> 3)]
    iteration, row0 = (None, None) if key.clock is None else key.clock
    return [
        *words,
        _on_device(key.iteration, device) if iteration is None else iteration,
        _on_device(key.row0, device) if row0 is None else row0,
        None if key.rows is None else _rows_on_device(key.rows, device),
    ]


def _stream(device: torch.device) -> int | None:
    """For which stream what lies on a device may be kept: another one would not wait for what was written.

    None while a CUDA graph is captured, which may live longer than what is kept.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def _on_device(number: int, device: torch.device) -> Tensor:
    """A number as int64 [1], written once for all casts of an iteration or microbatch."""
    stream = _stream(device)
    return torch.full((1,), number, device=device) if stream is None else _written(number, device, stream)


@lru_cache(maxsize=1024)
def _written(number: int, device: torch.device, stream: int) -> Tensor:
    return torch.full((1,), number, device=device)


@cache
def _rows_on_device(rows: Rows, device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)  # the same for the whole run, and so in a CUDA graph


def takes_codes(quantized: Quantized) -> bool:
    """Whether ``dequantize`` takes these codes [R, C]."""
    return quantized.fmt.quantised and on_nvidia(quantized.codes) and _natural(quantized.block)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """``Quantized.dequantize`` of codes [R, C] that ``takes_codes`` has accepted, in any strides: [R, C] by rows."""
    from megatron_snip.quant.kernels import triton_kernels

    element, codes = quantized.fmt.element, quantized.codes
    assert element is not None
    if max(codes.stride()) >= _MAX_SIDE:
        codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    block_rows, block_cols = quantized.block
    rows, cols = max(_ANY.chunk, block_rows), _COLS
    grid = (-(-codes.shape[0] // rows) * -(-codes.shape[1] // cols),)
    with torch.cuda.device_of(codes):
        triton_kernels.dequantize_kernel[grid](
            codes,
            *codes.stride(),
            quantized.scales,
            *quantized.scales.stride(),
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


def takes_amax(x: Tensor) -> bool:
    """Whether ``finite_amax`` takes x [R, C]."""
    return on_nvidia(x)


def finite_amax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """cast.finite_amax of x [R, C] that ``takes_amax`` has accepted, rounded to ``dtype`` as it is read.

    It is one launch, and does not wait for the device.
    """
    from megatron_snip.quant.kernels import triton_kernels

    x = _readable(x, dtype).contiguous()
    stream = _stream(x.device)
    state = torch.zeros(2, dtype=torch.int32, device=x.device) if stream is None else _state(x.device, stream)
    out = torch.empty((), device=x.device)
    with torch.cuda.device_of(x):
        triton_kernels.amax_kernel[(-(-x.numel() // _AMAX_SIZE),)](
            x, out, state, x.numel(), _AMAX_SIZE, dtype not in (None, x.dtype), num_warps=_AMAX_WARPS, **OPTIONS
        )
    return out


@cache
def _state(device: torch.device, stream: int) -> Tensor:
    """What ``amax_kernel`` needs, and leaves as it was."""
    return torch.zeros(2, dtype=torch.int32, device=device)


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
