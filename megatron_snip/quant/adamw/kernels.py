"""Runs a step of AdamW on BF16 weights with the device's kernel: C++ on CPUs, Triton on GPUs, else the specification.

All give the same bits.  Fake tensors see the operator ``megatron_snip::adamw`` instead of a kernel.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from megatron_snip.quant.adamw.step import Scalars, Stored, reference
from megatron_snip.quant.kernels import cpu, triton_cast

# cpu.h's struct AdamW, field by field
_CALL = struct.Struct("@6P2q2Q3I3i11f")


def adamw(stored: Stored, grad: Tensor, scalars: Scalars) -> None:
    """`step.reference`: update `stored` in place with the BF16 gradient [...] of its shape."""
    weight = stored.weight
    assert grad.shape == weight.shape and grad.dtype == weight.dtype == torch.bfloat16
    if not weight.numel():
        return
    grad = grad.contiguous()
    if isinstance(weight, FakeTensor):
        torch.ops.megatron_snip.adamw(weight, stored.m, stored.v, stored.weight_low, stored.v_low, grad)
    elif triton_cast.on_nvidia(weight):
        from megatron_snip.quant.adamw import triton_step  # only where triton is installed

        triton_step.run(stored, grad, scalars)
    elif type(weight) in (Tensor, Parameter) and cpu.reads(weight):
        run_on_cpu(stored, grad, scalars)
    else:
        reference(stored, grad, scalars)


def run_on_cpu(stored: Stored, grad: Tensor, scalars: Scalars, isa: int = cpu.BEST_ISA) -> None:
    """`adamw` with the C++ kernel; the tensors [...] are contiguous and not empty.  isa: as in ``cpu.run``."""
    weight, key = stored.weight, stored.key
    rows, cols = (1, weight.numel()) if key is None else weight.shape
    row0, col0, words, iteration = (0, 0, (0, 0), 0) if key is None else (key.row0, key.col0, key.words, key.iteration)
    tensors = (weight, stored.m, stored.v, stored.weight_low, stored.v_low, grad)
    assert all(one is None or one.is_contiguous() for one in tensors)
    call = _CALL.pack(
        *[0 if one is None else one.data_ptr() for one in tensors],
        rows,
        cols,
        row0,
        col0,
        *words,
        iteration,
        key is not None,
        cpu.threads_of(weight.numel()),
        isa,
        *scalars,
    )
    loaded = cpu.library()
    assert loaded is not None
    loaded.megatron_snip_adamw(call)


@torch.library.custom_op("megatron_snip::adamw", mutates_args=("weight", "m", "v", "weight_low", "v_low"))
def _adamw_op(
    weight: Tensor, m: Tensor, v: Tensor, weight_low: Tensor | None, v_low: Tensor | None, grad: Tensor
) -> None:
    raise NotImplementedError("for fake tensors only")


@_adamw_op.register_fake
def _(weight: Tensor, m: Tensor, v: Tensor, weight_low: Tensor | None, v_low: Tensor | None, grad: Tensor) -> None:
    return None
