"""A weight's codes on their way between ranks, and the operands that are laid out from them.

Each rank casts its own rows to "codes" and sends bytes and scales; elements of up to 4 bits go two to a byte.  From the
gathered bytes, ``lay_out`` makes what a GEMM reads, with the bits of a cast of the whole weight.  Only a NaN differs:
pairs of codes have none, so its whole block becomes NaN.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import NAN_CODE
from megatron_snip.formats.element import Element
from megatron_snip.quant.casts.cast import Form, Operand, allocate, has_nan, layout, store
from megatron_snip.quant.casts.grid import encode
from megatron_snip.quant.casts.swizzled import pack

_HALF = 4  # bits


class Sent(NamedTuple):
    """Codes as they travel: uint8 [R, C], or [R, C/2] if two share a byte, and float32 [row blocks, column blocks].

    tensor_scale: float32 scalar that multiplies all scales, for formats with ``needs_tensor_amax``.
    """

    data: Tensor
    scales: Tensor
    tensor_scale: Tensor | None = None


def in_pairs(form: Form) -> bool:
    """Whether two codes of this form travel in a byte."""
    return form.element.bits <= _HALF


def to_send(codes: Operand) -> tuple[Tensor, Tensor]:
    """Bytes and scales of an operand [R, C] whose output is "codes"."""
    form, data, scales = codes.form, codes.data, codes.scales
    assert form is not None and form.output == "codes" and scales is not None
    if not in_pairs(form):
        return data, scales
    return pack(data), torch.where(has_nan(data, form.block), torch.nan, scales)


def moves_nothing(form: Form) -> bool:
    """Whether an operand in this form has the bytes that travel in the same order, so that no copy is needed."""
    return form.output in ("codes", "operand") and form.dim == 1 and form.stored == form.element and not in_pairs(form)


def padded_scales(sent: Sent, form: Form) -> Tensor:
    """The scales of an "operand" form, laid out for tensor cores."""
    (rows, cols), _, shape, along = sent.scales.shape, *layout(sent.data.shape, form)[1:]
    made = sent.scales.new_zeros(shape if along == 1 else shape[::-1])
    made = made if along == 1 else made.T
    made[:rows, :cols] = sent.scales
    return made


def lay_out(sent: Sent, form: Form) -> Operand:
    """The operand [R, C] in ``form``, with any output but values, of a weight that was cast to codes and gathered."""
    codes = _recoded(sent.data, form.element, form.stored, in_pairs(form))
    made = allocate(codes, form, count=False)
    store(codes, sent.scales, made)
    if made.tensor_scale is not None and sent.tensor_scale is not None:
        made.tensor_scale.copy_(sent.tensor_scale)
    return made


def store_scales(sent: Sent, made: Operand) -> None:
    """Write the scales alone into an allocated operand that is not swizzled."""
    assert made.scales is not None
    made.scales.zero_()[: sent.scales.shape[0], : sent.scales.shape[1]] = sent.scales
    if made.tensor_scale is not None and sent.tensor_scale is not None:
        made.tensor_scale.copy_(sent.tensor_scale)


def _recoded(data: Tensor, element: Element, stored: Element, pairs: bool) -> Tensor:
    """Codes [R, C] of ``stored``, a byte each, from codes of ``element`` as they travel."""
    if not pairs and element == stored:
        return data
    table = code_table(element, stored, pairs, data.device)
    return table.index_select(0, data.flatten().int()).view(torch.uint8).view(len(data), -1)


@cache
def code_table(element: Element, stored: Element, pairs: bool, device: torch.device) -> Tensor:
    """Byte of ``element`` -> the code of ``stored``, uint8 [256]; for bytes with two codes, both as an int16 [256]."""
    count = 2**element.bits
    finite = [code for code in range(count) if code % element.sign_code <= element.max_code]
    codes = torch.full((256,), NAN_CODE, dtype=torch.uint8)
    codes[finite] = encode(torch.tensor([element.value(code) for code in finite]), stored)
    if pairs:
        byte = torch.arange(256)
        codes = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=1).view(torch.int16).flatten()
    return codes.to(device)
