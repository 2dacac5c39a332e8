"""Output layer and cross entropy with the vocabulary split over tp, some tokens at a time.

loss_t = log sum_v exp(z_tv) - z_t,label;  its gradient is softmax(z_t) - onehot(label).

The logits of a chunk become their own gradient in place, and forward multiplies it at once by the weight and by the
hidden states.  So no logits wait for backward, and only one chunk of them exists.
Sources: Megatron-LM, arXiv 1909.08053 (vocabulary parallelism); Liger Kernel, arXiv 2410.10989 (gradients in forward).
Shapes: T tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_snip.mesh import Axis
from megatron_snip.quant.kernels import triton_cast
from megatron_snip.quant.linears.matmul import add_product, product

#: Logits of a chunk, 384 MiB in bf16.  The weight's gradient is read and written once a chunk, so fewer would be slow.
_LOGITS = 3 << 26
_ROWS = 128  # a chunk is a multiple of this, for the GEMMs
#: Logits whose softmax is computed at once in float32: these fit a CPU's cache; on a GPU without Triton, 128 MiB.
_SOFTMAX = {"cpu": 1 << 20}
_LARGE_SOFTMAX = 1 << 25
_BLOCK, _WARPS = 4096, 8  # columns that a program of the kernels has at once

#: Losses [T] of a microbatch -> this rank's share [] of the loss; linear.
Share = Callable[[Tensor], Tensor]


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, share: Share, axis: Axis, training: bool
    ) -> tuple[Tensor, Tensor]:
        losses = x.new_empty(len(x), dtype=torch.float32)
        scale = _gradient_of(share, losses) if training else None
        w, size = weight.to(x.dtype), _chunk(len(x), len(weight))
        grad_x, grad_w = torch.empty_like(x) if training else None, None
        for first in range(0, len(x), size):
            rows = slice(first, first + size)
            logits = product("fprop", x[rows], w, x.dtype)
            losses[rows] = vocab_parallel_cross_entropy(
                logits, labels[rows], axis, None if scale is None else scale[rows]
            )
            if grad_x is not None:
                grad_x[rows] = product("dgrad", logits, w, x.dtype)
                # several chunks are added in float32; the gradient of one is rounded as that of any linear
                grad_w = add_product(grad_w, logits, x[rows]) if size < len(x) else product("wgrad", logits, x, x.dtype)
            del logits  # before the next chunk's
        if training:
            assert grad_w is not None
            ctx.save_for_backward(grad_x, grad_w.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return share(losses), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x.mul_(grads[0]), grad_w.mul_(grads[0]), None, None, None, None


def output_loss(x: Tensor, weight: Tensor, labels: Tensor, share: Share, axis: Axis) -> tuple[Tensor, Tensor]:
    """Hidden states x [T, H], weight [V/tp, H] of x.dtype or float32, labels [T] -> share [] and losses [T] in nats.

    Only the share is differentiable, once: x and weight get its gradient.  All tp ranks must call it.
    """
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss, losses = _OutputLoss.apply(x, weight, labels, share, axis, training)
    return loss, losses


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, scale: Tensor | None = None) -> Tensor:
    """Loss per token in nats: logits [T, V/tp], labels [T] global ids -> [T] float32, on every tp rank.

    Every label is in the vocabulary; scale is 0 where a token does not count.  Not differentiable.  With scale [T], the
    logits become the gradient of the sum of scale * losses.
    """
    if fused(logits):
        return _fused(logits, labels, axis, scale)
    size = max(1, _SOFTMAX.get(logits.device.type, _LARGE_SOFTMAX) // logits.shape[-1])
    space = torch.empty_like(logits[:size], dtype=torch.float32)  # the whole tensor would be twice the logits in bf16
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        losses[rows] = _of_rows(logits[rows], labels[rows], axis, space, None if scale is None else scale[rows])
    return losses


@torch.no_grad()
def _of_rows(logits: Tensor, labels: Tensor, axis: Axis, space: Tensor, scale: Tensor | None) -> Tensor:
    """``vocab_parallel_cross_entropy`` of some rows; space: float32, of their shape or more rows."""
    columns = logits.shape[-1]
    top = logits.amax(dim=-1).float()
    if axis.size > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=axis.group)
    z = torch.sub(logits, top.unsqueeze(-1), out=space[: len(logits)])
    column = labels - axis.rank * columns
    elsewhere = (column < 0) | (column >= columns)
    column = column.masked_fill(elsewhere, 0)
    at_label = z.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
    exp = z.exp_()
    sums = torch.stack([exp.sum(dim=-1), at_label])
    if axis.size > 1:
        dist.all_reduce(sums, group=axis.group)
    if scale is not None:
        grad = exp.div_(sums[0].unsqueeze(-1)).mul_(scale.unsqueeze(-1))
        logits.copy_(grad.scatter_add_(-1, column.unsqueeze(-1), -scale.masked_fill(elsewhere, 0.0).unsqueeze(-1)))
    return sums[0].log() - sums[1]


def fused(logits: Tensor) -> bool:
    """Whether the kernels of loss_kernel.py take logits [T, V/tp]: on an NVIDIA GPU, with Triton."""
    return triton_cast.on_nvidia(logits) and logits.stride(-1) == 1


@torch.no_grad()
def _fused(logits: Tensor, labels: Tensor, axis: Axis, scale: Tensor | None) -> Tensor:
    """``vocab_parallel_cross_entropy`` in two launches."""
    first, found = axis.rank * logits.shape[-1], logits.new_empty((3, len(logits)), dtype=torch.float32)
    launch(logits, labels, first, found)
    top, total, at_label = found
    if axis.size > 1:
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
        total.mul_((top - highest).exp_())
        top.copy_(highest)
        dist.all_reduce(found[1:], group=axis.group)
    if scale is not None:
        launch(logits, labels, first, found, scale)
    return total.log() - (at_label - top)


def launch(logits: Tensor, labels: Tensor, first: int, found: Tensor, scale: Tensor | None = None) -> None:
    """Find each row's largest logit, its sum of exp(z - largest) and its label's logit: found [3, T], float32.

    With scale [T], found is read, and the logits become scale * their loss's gradient.  first: global id of column 0.
    """
    if isinstance(logits, FakeTensor):  # a dry run counts memory, and this takes none
        return
    from megatron_snip.parallel.loss_kernel import gradient_kernel, softmax_kernel

    rows, columns = logits.shape
    how = {"COLUMNS": columns, "BLOCK": _BLOCK, "num_warps": _WARPS, **triton_cast.OPTIONS}
    given = (logits, logits.stride(0), labels.contiguous(), first)
    with torch.cuda.device_of(logits):
        if scale is None:
            softmax_kernel[(rows,)](*given, *found, **how)
        else:
            gradient_kernel[(rows, -(-columns // _BLOCK))](*given, *found[:2], scale.contiguous(), **how)


def _gradient_of(share: Share, losses: Tensor) -> Tensor:
    """The gradient [T] of a linear function of losses [T], whose values do not matter."""
    with torch.enable_grad():
        some = torch.zeros_like(losses, requires_grad=True)
        (scale,) = torch.autograd.grad(share(some), some)
    return scale


def _chunk(tokens: int, columns: int) -> int:
    """Tokens of a chunk: all if their logits are few, else an equal part of them."""
    count = -(-tokens * columns // _LOGITS)
    return tokens if count == 1 else -(-tokens // (count * _ROWS)) * _ROWS
