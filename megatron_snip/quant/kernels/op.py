"""Casts by the fastest implementation of the tensor's device, and the same as torch custom operators.

Direct calls go straight to a kernel or to the specification (cast.py).  Compilers and fake tensors cannot look into
kernels: they see ``torch.ops.megatron_snip.cast``, ``dequantize``, ``finite_amax`` and ``hadamard``; forms are lists of
integers, ``_FIELDS`` each: a form's constants and its key.  Of SwiGLU fake tensors alone see kernels, in a dry run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_snip.quant import cast as specification
from megatron_snip.quant.cast import Cast, Constants, Form, Output, Quantized, allocate, cast_reference, swiglu_product
from megatron_snip.quant.hadamard import check_tokens
from megatron_snip.quant.hadamard import hadamard as hadamard_reference
from megatron_snip.quant.kernels import cpu, triton_cast
from megatron_snip.quant.rounding import RoundingKey, Rows

_CONSTANTS = len(Constants._fields)
_FIELDS = _CONSTANTS + 11
_MASK32 = 0xFFFFFFFF


def cast(
    x: Tensor,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    amax: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    count: bool = False,
    up: Tensor | None = None,
) -> list[Cast]:
    """``x`` [R, C], rounded to ``dtype`` first, in each of the forms, none of them transformed; the rest as
    ``cast_reference``.

    up: of x's shape and dtype, which is then left as it is: ``swiglu_product(x, up)`` is cast.
    """
    if not _traced(x):
        return _cast_now(x, forms, outputs, amax, dtype, count, up)
    if up is not None and not triton_cast.takes_product(x, up):
        x, up = swiglu_product(x, up), None
    numbers = [number for form, output in zip(forms, outputs, strict=True) for number in _numbers(form, output)]
    made = iter(torch.ops.megatron_snip.cast(x.detach(), amax, numbers, dtype, count, up))
    return [
        Cast(next(made), None, None)
        if output == "values"
        else Cast(
            next(made), next(made), next(made) if count else None, next(made) if form.fmt.needs_tensor_amax else None
        )
        for form, output in zip(forms, outputs, strict=True)
    ]


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """``quantized.dequantize(dtype)`` [R, C]: bfloat16 and float32 by a kernel where there is one."""
    if quantized.fmt.element is None or dtype not in (torch.bfloat16, torch.float32):
        return quantized.dequantize(dtype)
    if not _traced(quantized.codes):
        return _dequantize_now(quantized, dtype)
    return torch.ops.megatron_snip.dequantize(
        quantized.codes, quantized.scales, quantized.tensor_scale, list(quantized.constants), dtype
    )


def rounds(x: Tensor) -> bool:
    """Whether ``cast`` and ``finite_amax`` each round x [R, C] to a dtype as they read it, and need no copy."""
    return triton_cast.takes_amax(x)


def finite_amax(x: Tensor, dtype: torch.dtype | None = None, up: Tensor | None = None) -> Tensor:
    """``cast.finite_amax`` of x [R, C], rounded to ``dtype`` first: float32 scalar.

    up: of x's shape, for which ``triton_cast.takes_product``; ``swiglu_product(x, up)`` is looked at, and not stored.
    """
    if rounds(x):
        return triton_cast.finite_amax(x, dtype, up)
    x = x if dtype is None else x.to(dtype)
    return torch.ops.megatron_snip.finite_amax(x.detach(), up) if _traced(x) else _finite_amax_now(x, up)


def hadamard(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``hadamard.hadamard`` of x [T, C], and, where the kernel found it on its way, ``finite_amax`` of that."""
    check_tokens(x)
    if _traced(x):
        made: tuple[Tensor, Tensor] = torch.ops.megatron_snip.hadamard(x.detach())
        return made
    return triton_cast.hadamard(x) if triton_cast.takes_amax(x) else (hadamard_reference(x), None)


def swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of gate and up [...] from that of ``swiglu_product(gate, up)``, of those that are needed."""
    if needs_gate and needs_up and triton_cast.takes_product(gate, up):  # not in a graph, which a compiler fuses
        if isinstance(grad, FakeTensor):
            made: tuple[Tensor, Tensor] = torch.ops.megatron_snip.swiglu_backward(grad, gate, up)
            return made
        return triton_cast.swiglu_backward(grad, gate, up)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if needs_gate else None
    return grad_gate, grad * F.silu(gate) if needs_up else None


def _traced(x: Tensor) -> bool:
    """Whether a compiler watches, or x [...] has a shape only."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def _cast_now(
    x: Tensor,
    forms: Sequence[Form],
    outputs: Sequence[Output],
    amax: Tensor | None,
    dtype: torch.dtype | None,
    count: bool,
    up: Tensor | None,
) -> list[Cast]:
    if triton_cast.takes(x, forms, outputs, up):
        return triton_cast.cast(x, forms, outputs, amax, dtype, count, up)
    x = x if up is None else swiglu_product(x, up)
    x = x if dtype is None else x.to(dtype)
    if cpu.takes(x, forms, outputs):
        return cpu.cast(x, forms, outputs, amax, count=count)
    return cast_reference(x, forms, outputs, amax, count)


def _dequantize_now(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    if cpu.reads(quantized.codes):
        return cpu.dequantize(quantized, dtype)
    if triton_cast.takes_codes(quantized):
        return triton_cast.dequantize(quantized, dtype)
    return quantized.dequantize(dtype)


def _finite_amax_now(x: Tensor, up: Tensor | None = None) -> Tensor:
    if triton_cast.takes_amax(x):  # of an operator's call
        return triton_cast.finite_amax(x, up=up)
    x = x if up is None else swiglu_product(x, up)
    return cpu.finite_amax(x) if cpu.reads(x) else specification.finite_amax(x)


# --- Forms as integers


def _numbers(form: Form, output: Output) -> list[int]:
    """A form as _FIELDS integers of 64 bits; a key's seed and stream in halves, which together are as good."""
    constants, key = form.constants(output), form.key
    if key is None:
        return [*constants, -1, *[0] * 10]
    halves = [key.seed & _MASK32, key.seed >> 32 & _MASK32, key.stream & _MASK32, key.stream >> 32 & _MASK32]
    return [*constants, key.iteration, *halves, key.row0, key.col0, *(key.rows or (0, 0, 0, 0))]


def _forms(numbers: Sequence[int]) -> tuple[list[Form], list[Output]]:
    """What _numbers made into integers."""
    forms, outputs = [], []
    for first in range(0, len(numbers), _FIELDS):
        rest = numbers[first + _CONSTANTS : first + _FIELDS]
        iteration, seed_low, seed_high, stream_low, stream_high, row0, col0, *rows = rest
        key = None
        if iteration >= 0:
            seed, stream = seed_low | seed_high << 32, stream_low | stream_high << 32
            key = RoundingKey(seed, iteration, stream, row0, col0, rows=Rows(*rows) if any(rows) else None)
        form, output = Form.of(Constants(*numbers[first : first + _CONSTANTS]), key)
        forms.append(form)
        outputs.append(output)
    return forms, outputs


# --- The operators


@torch.library.custom_op("megatron_snip::cast", mutates_args=())
def _cast_op(
    x: Tensor, amax: Tensor | None, forms: Sequence[int], dtype: torch.dtype | None, count: bool, up: Tensor | None
) -> list[Tensor]:
    return _parts(_cast_now(x.contiguous(), *_forms(forms), amax, dtype, count, up))


@_cast_op.register_fake
def _(
    x: Tensor, amax: Tensor | None, forms: Sequence[int], dtype: torch.dtype | None, count: bool, up: Tensor | None
) -> list[Tensor]:
    return _parts(
        allocate(x, form, output, dtype=dtype, count=count) for form, output in zip(*_forms(forms), strict=True)
    )


def _parts(casts: Iterable[Cast]) -> list[Tensor]:
    return [tensor for made in casts for tensor in made if tensor is not None]


@torch.library.custom_op("megatron_snip::dequantize", mutates_args=())
def _dequantize_op(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, constants: Sequence[int], dtype: torch.dtype
) -> Tensor:
    form, _ = Form.of(Constants(*constants), None)
    return _dequantize_now(Quantized(codes, scales, form.fmt, form.block, tensor_scale), dtype)


@_dequantize_op.register_fake
def _(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, constants: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.custom_op("megatron_snip::finite_amax", mutates_args=())
def _finite_amax_op(x: Tensor, up: Tensor | None = None) -> Tensor:
    return _finite_amax_now(x, up)


@_finite_amax_op.register_fake
def _(x: Tensor, up: Tensor | None = None) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_snip::hadamard", mutates_args=())
def _hadamard_op(x: Tensor) -> tuple[Tensor, Tensor]:
    y, largest = hadamard(x)
    return y, _finite_amax_now(y) if largest is None else largest


@_hadamard_op.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_snip::swiglu_backward", mutates_args=())
def _swiglu_backward_op(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = swiglu_gradients(grad, gate, up, True, True)
    assert grad_gate is not None and grad_up is not None
    return grad_gate, grad_up


@_swiglu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)
