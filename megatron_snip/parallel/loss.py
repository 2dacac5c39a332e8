"""Cross entropy with the vocabulary split over tp.  Source: Megatron-LM, arXiv 1909.08053.

loss_t = log sum_v exp(z_tv) - z_t,label;  its gradient is softmax(z_t) - onehot(label).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Axis

#: Gradient elements computed at once: a few chunks fit a CPU's cache; on a GPU a chunk is 512 MiB.
_CHUNK = {"cpu": 1 << 20}
_LARGE_CHUNK = 1 << 27


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
        rows = logits.shape[-1]
        top = logits.amax(dim=-1).float()
        if axis.size > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=axis.group)
        z = torch.sub(logits, top.unsqueeze(-1))  # float32 without a float32 copy of the logits
        column = labels - axis.rank * rows
        elsewhere = (column < 0) | (column >= rows)
        column = column.masked_fill(elsewhere, 0)
        at_label = z.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exp = z.exp_()
        sums = torch.stack([exp.sum(dim=-1), at_label])
        if axis.size > 1:
            dist.all_reduce(sums, group=axis.group)
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(-1)), column, elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, elsewhere = ctx.saved_tensors
        scale, grad = grads[0].unsqueeze(-1), torch.empty_like(softmax, dtype=ctx.dtype)
        at_label = -scale.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        size = max(1, _CHUNK.get(softmax.device.type, _LARGE_CHUNK) // softmax.shape[-1])
        space = torch.empty_like(softmax[:size])  # the whole tensor in float32 would be twice the logits
        for first in range(0, len(softmax), size):
            rows = slice(first, first + size)
            part = torch.mul(softmax[rows], scale[rows], out=space[: len(softmax) - first])
            grad[rows] = part.scatter_add_(-1, column[rows].unsqueeze(-1), at_label[rows])
        return grad, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Loss per token in nats: logits [T, V/tp], labels [T] global ids -> [T] float32, on every tp rank."""
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, axis)
    return loss
