"""Launches the kernel of triton_kernel.py.

What has been run: the kernel compiles for Hopper and Blackwell without fused, flushed or approximate arithmetic, and
gives the specification's bits on an H200 (tests/gpu/test_adamw.py) and in Triton's CPU interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.quant.adamw.step import Scalars, Stored
from megatron_snip.quant.adamw.triton_kernel import adamw_kernel
from megatron_snip.quant.kernels.triton_cast import OPTIONS

_SIZE, _WARPS = 1024, 4


def run(stored: Stored, grad: Tensor, scalars: Scalars) -> None:
    """`step.reference` of contiguous tensors [...] that are not empty."""
    weight, key = stored.weight, stored.key
    cols, random = 1, [0] * 5
    if key is not None:
        cols = weight.shape[1]
        words = [(word + 2**31) % 2**32 - 2**31 for word in key.words]  # 32 bits for every key: one kernel
        random = [key.row0, key.col0, key.iteration, *words]
    with torch.cuda.device_of(weight):
        adamw_kernel[(-(-weight.numel() // _SIZE),)](
            weight, stored.m, stored.v, stored.weight_low, stored.v_low, grad, weight.numel(), cols, *random, *scalars,
            STOCHASTIC=key is not None, SIZE=_SIZE, num_warps=_WARPS, **OPTIONS,
        )  # fmt: skip
