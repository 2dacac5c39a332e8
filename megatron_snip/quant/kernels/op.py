"""Chooses the kernel that casts a tensor, and wraps kernels as torch custom operators.

Direct calls go straight to a kernel, or to the specification (cast.py).  Compilers and fake tensors cannot see
inside kernels, so they get ``torch.ops.megatron_snip.cast``, ``dequantize``, ``finite_amax`` and ``hadamard``.  An
operator takes no objects, so a form becomes its text (``Form.text``) and the integers of its key.  SwiGLU's gradients
are an operator for fake tensors only, in a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_snip.formats import Hadamard
from megatron_snip.quant.casts import cast as specification
from megatron_snip.quant.casts import codes as sent_codes
from megatron_snip.quant.casts.cast import Form, Operand, Quantized, allocate, form_of, reference, swiglu_product
from megatron_snip.quant.casts.codes import Sent
from megatron_snip.quant.casts.hadamard import hadamard as hadamard_reference
from megatron_snip.quant.casts.rounding import RoundingKey, Rows
from megatron_snip.quant.kernels import cpu, triton_cast, triton_codes

_MASK32 = 0xFFFFFFFF
_KEY = 11  # integers of a key
_NO_KEY = [-1, *[0] * (_KEY - 1)]

#: x [R, C], forms, amax, dtype, count, up -> an operand of each form, as ``cast.reference`` returns.
Run = Callable[[Tensor, Sequence[Form], Tensor | None, torch.dtype | None, bool, Tensor | None], list[Operand]]


class Kernel(NamedTuple):
    """A kernel.  takes: whether it can cast x, or SwiGLU's product of x and up, into these forms."""

    takes: Callable[[Tensor, Sequence[Form], Tensor | None], bool]
    run: Run


#: Device type -> its kernel.  The specification handles other devices and what a kernel does not take.
KERNELS = {
    "cuda": Kernel(triton_cast.takes, triton_cast.run),
    "cpu": Kernel(cpu.takes, cpu.run),
}


def run(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: bool = True,
    up: Tensor | None = None,
) -> list[Operand]:
    """``cast.reference`` of x [R, C], by the kernel of its device or the operator that stands for it."""
    if not _traced(x):
        return _run_now(x, forms, amax, dtype, count, up)
    if up is not None and not triton_cast.takes_product(x, up):
        x, up = swiglu_product(x, up), None
    text, keys = ";".join([form.text for form in forms]), [number for form in forms for number in _numbers(form.key)]
    made = iter(torch.ops.megatron_snip.cast(x.detach(), amax, text, keys, dtype, count, up))
    return [
        Operand(form, next(made))
        if form.output == "values"
        else Operand(form, next(made), next(made), next(made) if form.scaled else None, next(made) if count else None)
        for form in forms
    ]


def _run_now(
    x: Tensor,
    forms: Sequence[Form],
    amax: Tensor | None,
    dtype: torch.dtype | None,
    count: bool,
    up: Tensor | None,
) -> list[Operand]:
    kernel = KERNELS.get(x.device.type)
    chosen = kernel.run if kernel is not None and kernel.takes(x, forms, up) else reference
    return chosen(x, forms, amax, dtype, count, up)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """``quantized.dequantize(dtype)`` [R, C]: bfloat16 and float32 by a kernel where there is one."""
    if quantized.fmt.element is None or dtype not in (torch.bfloat16, torch.float32):
        return quantized.dequantize(dtype)
    if not _traced(quantized.codes):
        return _dequantize_now(quantized, dtype)
    return torch.ops.megatron_snip.dequantize(
        quantized.codes, quantized.scales, quantized.tensor_scale, quantized.text, dtype
    )


def to_send(codes: Operand) -> tuple[Tensor, Tensor]:
    """``codes.to_send``: the bytes and scales of codes [R, C] that a rank sends."""
    form, data, scales = codes.form, codes.data, codes.scales
    assert form is not None and scales is not None
    if not sent_codes.in_pairs(form):
        return data, scales
    if _traced(data):
        made: tuple[Tensor, Tensor] = torch.ops.megatron_snip.to_send(data, scales, form.text)
        return made
    return triton_codes.to_send(codes) if triton_codes.takes(data, form) else sent_codes.to_send(codes)


def _lay_out_now(sent: Sent, form: Form) -> Operand:
    return (triton_codes if triton_codes.takes(sent.data, form) else sent_codes).lay_out(sent, form)


def lay_out(sent: Sent, form: Form) -> Operand:
    """``codes.lay_out``: the operand [R, C] in ``form`` of gathered codes.  It may share their memory."""
    if sent_codes.moves_nothing(form):
        scales = sent.scales if form.output == "codes" else sent_codes.padded_scales(sent, form)
        return Operand(form, sent.data, scales, sent.tensor_scale)
    if not _traced(sent.data):
        return _lay_out_now(sent, form)
    data, scales, *tensor_scale = torch.ops.megatron_snip.lay_out(*sent, form.text)
    return Operand(form, data, scales, *tensor_scale)


def finite_amax(x: Tensor, dtype: torch.dtype | None = None, up: Tensor | None = None) -> Tensor:
    """``cast.finite_amax`` of x [R, C], rounded to ``dtype`` first: float32 scalar.

    up: of x's shape; if given, find the amax of ``swiglu_product(x, up)``, which is not stored.
    ``triton_cast.takes_product`` must accept both.
    """
    if triton_cast.on_nvidia(x):
        return triton_cast.finite_amax(x, dtype, up)
    x = x if dtype is None else x.to(dtype)
    return torch.ops.megatron_snip.finite_amax(x.detach(), up) if _traced(x) else _finite_amax_now(x, up)


def hadamard(x: Tensor, transform: Hadamard, dim: int) -> tuple[Tensor, Tensor | None]:
    """``hadamard.hadamard`` of x [R, C], and its ``finite_amax`` if the kernel finds it as well, else None."""
    if _traced(x):
        made: tuple[Tensor, Tensor] = torch.ops.megatron_snip.hadamard(x.detach(), transform.signs, dim)
        return made
    if triton_cast.on_nvidia(x):
        return triton_cast.hadamard(x, transform, dim)
    return hadamard_reference(x, transform, dim), None


def swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of gate and up [...] from the gradient of ``swiglu_product(gate, up)``; None if not needed."""
    if needs_gate and needs_up and triton_cast.takes_product(gate, up):  # False under a compiler, which fuses
        if isinstance(grad, FakeTensor):
            made: tuple[Tensor, Tensor] = torch.ops.megatron_snip.swiglu_backward(grad, gate, up)
            return made
        return triton_cast.swiglu_backward(grad, gate, up)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if needs_gate else None
    return grad_gate, grad * F.silu(gate) if needs_up else None


def _traced(x: Tensor) -> bool:
    """Whether a compiler traces this call, or x [...] is a fake tensor."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def _dequantize_now(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    if cpu.reads(quantized.codes):
        return cpu.dequantize(quantized, dtype)
    if triton_cast.takes_codes(quantized):
        return triton_cast.dequantize(quantized, dtype)
    return quantized.dequantize(dtype)


def _finite_amax_now(x: Tensor, up: Tensor | None = None) -> Tensor:
    if triton_cast.on_nvidia(x):  # when called by the operator
        return triton_cast.finite_amax(x, up=up)
    x = x if up is None else swiglu_product(x, up)
    return cpu.finite_amax(x) if cpu.reads(x) else specification.finite_amax(x)


# --- Keys as integers


def _numbers(key: RoundingKey | None) -> list[int]:
    """A key as _KEY integers of 64 bits; seed and stream in halves, since only their lower 64 bits count."""
    if key is None:
        return _NO_KEY
    halves = [key.seed & _MASK32, key.seed >> 32 & _MASK32, key.stream & _MASK32, key.stream >> 32 & _MASK32]
    return [key.iteration, *halves, key.row0, key.col0, *(key.rows or (0, 0, 0, 0))]


def forms_of(text: str, keys: Sequence[int]) -> list[Form]:
    """The forms of an operator's call, from the text and keys that ``run`` made."""
    forms = []
    for i, one in enumerate(text.split(";")):
        iteration, seed, seed_high, stream, stream_high, row0, col0, *rows = keys[_KEY * i : _KEY * (i + 1)]
        form = form_of(one)
        if iteration >= 0:
            key = RoundingKey(seed | seed_high << 32, iteration, stream | stream_high << 32, row0, col0)
            form = form.with_key(replace(key, rows=Rows(*rows)) if any(rows) else key)
        forms.append(form)
    return forms


# --- The operators


@torch.library.custom_op("megatron_snip::cast", mutates_args=())
def _cast_op(
    x: Tensor, amax: Tensor | None, forms: str, keys: Sequence[int], dtype: torch.dtype | None, count: bool,
    up: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    return _parts(_run_now(x.contiguous(), forms_of(forms, keys), amax, dtype, count, up))


@_cast_op.register_fake
def _(
    x: Tensor, amax: Tensor | None, forms: str, keys: Sequence[int], dtype: torch.dtype | None, count: bool,
    up: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    return _parts(allocate(x, form, dtype=dtype, count=count) for form in forms_of(forms, keys))


def _parts(made: Iterable[Operand]) -> list[Tensor]:
    return [part for operand in made for part in operand[1:] if part is not None]


@torch.library.custom_op("megatron_snip::dequantize", mutates_args=())
def _dequantize_op(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    fmt, block = form_of(form).fmt, form_of(form).block
    return _dequantize_now(Quantized(codes, scales, fmt, block, tensor_scale), dtype)


@_dequantize_op.register_fake
def _(codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.custom_op("megatron_snip::to_send", mutates_args=())
def _to_send_op(data: Tensor, scales: Tensor, form: str) -> tuple[Tensor, Tensor]:
    return to_send(Operand(form_of(form), data, scales))


@_to_send_op.register_fake
def _(data: Tensor, scales: Tensor, form: str) -> tuple[Tensor, Tensor]:
    return data.new_empty((len(data), -(-data.shape[1] // 2))), torch.empty_like(scales)


@torch.library.custom_op("megatron_snip::lay_out", mutates_args=())
def _lay_out_op(data: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: str) -> list[Tensor]:
    return _parts([_lay_out_now(Sent(data, scales, tensor_scale), form_of(form))])


@_lay_out_op.register_fake
def _(data: Tensor, scales: Tensor, tensor_scale: Tensor | None, form: str) -> list[Tensor]:
    made = form_of(form)
    codes = data[:, :1].expand(-1, data.shape[1] * (2 if sent_codes.in_pairs(made) else 1))
    return _parts([allocate(codes, made, count=False)])


@torch.library.custom_op("megatron_snip::finite_amax", mutates_args=())
def _finite_amax_op(x: Tensor, up: Tensor | None = None) -> Tensor:
    return _finite_amax_now(x, up)


@_finite_amax_op.register_fake
def _(x: Tensor, up: Tensor | None = None) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_snip::hadamard", mutates_args=())
def _hadamard_op(x: Tensor, signs: str, dim: int) -> tuple[Tensor, Tensor]:
    y, largest = hadamard(x, Hadamard(signs), dim)
    return y, _finite_amax_now(y) if largest is None else largest


@_hadamard_op.register_fake
def _(x: Tensor, signs: str, dim: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_snip::swiglu_backward", mutates_args=())
def _swiglu_backward_op(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = swiglu_gradients(grad, gate, up, True, True)
    assert grad_gate is not None and grad_up is not None
    return grad_gate, grad_up


@_swiglu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)
