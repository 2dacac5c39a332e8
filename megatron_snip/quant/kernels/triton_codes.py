"""Launches the Triton kernels of triton_code_kernels.py, one for each function of casts/codes.py.

NOT YET RUN ON A GPU: they compile for Hopper and Blackwell, and give the specification's bits in Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.casts.cast import Form, Operand, allocate, part_of
from megatron_snip.quant.casts.codes import Sent, code_table, in_pairs, store_scales
from megatron_snip.quant.kernels import triton_cast

_SIDE, _WARPS = 128, 8  # of a program's tile


def takes(data: Tensor, form: Form) -> bool:
    """Whether the kernels take bytes [R, C] of codes of this form, or write it; swizzled operands they do not."""
    square = form.output != "swizzled" and part_of(form.block) == form.block
    return square and triton_cast.on_nvidia(data) and triton_cast.natural(form.block)


def to_send(codes: Operand) -> tuple[Tensor, Tensor]:
    """``codes.to_send`` of codes [R, C] that travel in pairs, in one launch."""
    from megatron_snip.quant.kernels import triton_code_kernels

    form, data, scales = codes.form, codes.data, codes.scales
    assert form is not None and scales is not None
    (rows, cols), half = data.shape, -(-data.shape[1] // 2)
    out, out_scales = data.new_empty((rows, half)), torch.empty_like(scales)
    with torch.cuda.device_of(data):
        triton_code_kernels.send_kernel[(-(-rows // _SIDE) * -(-cols // _SIDE),)](
            data, scales, out, out_scales, rows, cols, half, *scales.shape, *form.block, _SIDE, _SIDE, num_warps=_WARPS,
            **triton_cast.OPTIONS,
        )  # fmt: skip
    return out, out_scales


def lay_out(sent: Sent, form: Form) -> Operand:
    """``codes.lay_out``, the codes in one launch."""
    from megatron_snip.quant.kernels import triton_code_kernels

    data, pairs, recodes = sent.data, in_pairs(form), form.stored != form.element
    rows, cols = len(data), data.shape[1] * (2 if pairs else 1)
    made = allocate(data[:, :1].expand(-1, cols), form, count=False)
    table = code_table(form.element, form.stored, False, data.device) if recodes else None
    with torch.cuda.device_of(data):
        triton_code_kernels.lay_out_kernel[(-(-rows // _SIDE) * -(-cols // _SIDE),)](
            data, table, made.data, *made.data.stride(), rows, cols, pairs, recodes, _SIDE, _SIDE, num_warps=_WARPS,
            **triton_cast.OPTIONS,
        )  # fmt: skip
    store_scales(sent, made)
    return made
