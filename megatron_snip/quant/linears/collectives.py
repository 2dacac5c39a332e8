"""Tensor-parallel collectives over tokens, which start before a GEMM and are waited for after it.

Shapes: T tokens, t of them on this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Axis

# torch 2.13 renamed both: the old names warn there, and older releases lack the new ones
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start_gather(part: Tensor, axis: Axis, *, async_op: bool = True) -> Callable[[], Tensor]:
    """Start an all-gather of each rank's rows [t, C]; the returned function waits for the whole [T, C].

    The whole has the layout of the parts.  Column-major parts cost a copy.
    async_op: False if torch.compile may trace the call; it supports only synchronous collectives.
    """
    columns_first = not part.is_contiguous()
    flat = part.T if columns_first else part
    assert flat.is_contiguous(), "rows or columns lie one after another"
    whole = flat.new_empty((axis.size * flat.shape[0], flat.shape[1]))
    work = all_gather(whole, flat, group=axis.group, async_op=async_op)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        if columns_first:
            return whole.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1).T
        return whole

    return wait


def start_sum(x: Tensor, axis: Axis, *, scatter: bool, async_op: bool = True) -> Callable[[], Tensor]:
    """Start summing partial sums x [T, C] over tp; x may be overwritten.

    The returned function waits for the sum [T, C], or with ``scatter`` for this rank's rows [t, C] of it.
    """
    if scatter:
        out = x.new_empty((len(x) // axis.size, x.shape[1]))
        work = reduce_scatter(out, x, group=axis.group, async_op=async_op)
    else:
        work, out = dist.all_reduce(x, group=axis.group, async_op=async_op), x

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return out

    return wait
