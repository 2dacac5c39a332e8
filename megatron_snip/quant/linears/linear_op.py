"""A group of linears as a custom operator, torch.ops.megatron_snip.linears, for compiled blocks.

The operator runs group.py's ``forward`` and ``backward`` with their collectives, and compilers do not trace into it.
When it runs, it looks up what changes from step to step (precision, backends, cached casts of the weight) by a handle
for each linear (``handle_of``).  So a compiled graph survives a change of plans, and all blocks of a model share it.
The operator returns what backward needs of the input as outputs of unknown sizes.  The context is a tensor, because
plain numbers would be compiled into the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron_snip.quant.casts.cast import Form, Operand, allocate
from megatron_snip.quant.casts.rounding import RoundingKey, Rows
from megatron_snip.quant.linears.group import Group, backward, forward
from megatron_snip.quant.linears.precision import LinearPrecision
from megatron_snip.quant.linears.step_context import StepContext

#: Parallel linears by their handles.  The first of a group has ``group``, and ``parts``: how many ranks the input's
#: rows are split over.
_OWNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
#: Precisions of passes that set one for all linears (``StepContext.precision``), each with its number.
_PRECISIONS: dict[LinearPrecision, int] = {}
#: The dtypes of a kept operand: its bytes in memory order, its scales and its tensor scale, each 1-D.
_KEPT = (torch.uint8, torch.float32, torch.float32)


def handle_of(owner: Any) -> Tensor:
    """A handle for a linear, int64 [1] on the CPU.  With plain numbers, each linear would compile its own graph."""
    _OWNERS[id(owner)] = owner
    return torch.tensor([id(owner)])


def pack(context: StepContext) -> Tensor:
    """Pack the context of a microbatch without observers: int64 [4], or [8] if its key has rows, on the CPU."""
    key, precision = context.key, context.precision
    assert key is not None and not context.observed
    number = -1 if precision is None else _PRECISIONS.setdefault(precision, len(_PRECISIONS))
    return torch.tensor([key.seed, key.iteration, key.row0, number, *(key.rows or ())])


def linears(inputs: Sequence[Tensor], ws: Sequence[Tensor], owners: Sequence[Any], context: Tensor) -> list[Tensor]:
    """x [t,K], or gate and up, and ws [N,K] -> y [T,N] of each owner's linear, differentiable once."""
    needs_wgrad = torch.is_grad_enabled() and ws[0].requires_grad
    # backward needs x itself for a wgrad in bf16, and always gate and up
    keeps = len(inputs) > 1 or (needs_wgrad and any(one.keeps_input for one in owners))
    now = torch.cat([*(one.handle for one in owners), context])
    made: list[Tensor] = torch.ops.megatron_snip.linears(inputs, ws, now, owners[0].parts, needs_wgrad, keeps)
    return made[: len(ws)]


def _group(now: Tensor, count: int, x: Tensor, rows: int) -> Group:
    """The group for ``now``, which holds the linears' handles and then the context.  x [...] gives the device."""
    numbers = now.tolist()
    owners, (seed, iteration, row0, precision, *pieces) = [_OWNERS[one] for one in numbers[:count]], numbers[count:]
    key = RoundingKey(seed, iteration, 0, row0, rows=Rows(*pieces) if pieces else None)
    context = StepContext(iteration, precision=None if precision < 0 else list(_PRECISIONS)[precision], key=key)
    group: Group = owners[0].group(owners, context, x.device, rows)
    return group


@torch.library.custom_op("megatron_snip::linears", mutates_args=())
def _linears(
    inputs: Sequence[Tensor], ws: Sequence[Tensor], now: Tensor, parts: int, needs_wgrad: bool, keeps_inputs: bool
) -> list[Tensor]:
    x = inputs[0]
    made, kept = forward(inputs, ws, _group(now, len(ws), x, len(x)), needs_wgrad=needs_wgrad)
    for i in range(len(ws) if needs_wgrad else 0):
        saved: Sequence[Any] = kept[i][1:4] if i < len(kept) else (None, None, None)
        if saved[0] is x:  # an operator may not return its input, but autograd can keep it
            saved = (None if keeps_inputs else x.clone(memory_format=torch.contiguous_format), None, None)
        made += _flat(saved, x)
    return made


@_linears.register_fake
def _(
    inputs: Sequence[Tensor], ws: Sequence[Tensor], now: Tensor, parts: int, needs_wgrad: bool, keeps_inputs: bool
) -> list[Tensor]:
    x, size = inputs[0], torch.library.get_ctx().new_dynamic_size
    saved = [x.new_empty(size(), dtype=dtype) for dtype in _KEPT * (len(ws) if needs_wgrad else 0)]
    return [*(x.new_empty(x.shape[0] * parts, w.shape[0]) for w in ws), *saved]


@torch.library.custom_op("megatron_snip::linears_backward", mutates_args=())
def _linears_backward(
    gs: Sequence[Tensor], ws: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], now: Tensor,
    parts: int, needs_dgrad: bool,
) -> list[Tensor]:  # fmt: skip
    needs_wgrad, dtype, shape = len(saved) > 0, gs[0].dtype, (len(gs[0]) // parts, ws[0].shape[1])
    group = _group(now, len(ws), gs[0], shape[0])
    kept = [
        Operand(None, inputs[0]) if form is None and len(inputs) == 1 else _unflat(form, saved[3 * i :], shape, dtype)
        for i, form in enumerate(group.kept_as(shape[0], needs_wgrad=needs_wgrad))
    ]
    needs_inputs = [needs_dgrad] * max(len(inputs), 1)
    grads, grads_w = backward(gs, ws, inputs, kept, group, needs_inputs=needs_inputs, needs_wgrad=needs_wgrad)
    return [one for one in (*grads, *grads_w) if one is not None]


@_linears_backward.register_fake
def _(
    gs: Sequence[Tensor], ws: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], now: Tensor,
    parts: int, needs_dgrad: bool,
) -> list[Tensor]:  # fmt: skip
    size, count = (gs[0].shape[0] // parts, ws[0].shape[1]), max(len(inputs), 1) if needs_dgrad else 0
    made = [gs[0].new_empty(size) for _ in range(count)]
    return [*made, *(torch.empty_like(w, memory_format=torch.contiguous_format) for w in (ws if saved else ()))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    read, ws, now, ctx.parts, _, keeps_inputs = inputs
    ctx.count, ctx.inputs, ctx.kept = len(ws), len(read), len(read) if keeps_inputs else 0
    ctx.save_for_backward(now, *read[: ctx.kept], *ws, *output[len(ws) :])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    now, *rest = ctx.saved_tensors
    inputs, ws, saved = rest[: ctx.kept], rest[ctx.kept : ctx.kept + ctx.count], rest[ctx.kept + ctx.count :]
    gs, needs_dgrad = [g.contiguous() for g in grads[: ctx.count]], any(ctx.needs_input_grad[0])
    made = torch.ops.megatron_snip.linears_backward(gs, ws, inputs, saved, now, ctx.parts, needs_dgrad)
    count = ctx.inputs if needs_dgrad else 0
    return made[:count] or [None] * ctx.inputs, made[count:] or [None] * ctx.count, None, None, None, None


_linears.register_autograd(_backward, setup_context=_setup)


def _flat(parts: Sequence[Tensor | None], x: Tensor) -> list[Tensor]:
    """The tensors of an operand of x [t,K], 1-D in memory order; empty for those that it does not have."""
    return [
        x.new_empty(0, dtype=dtype) if part is None else part.as_strided((part.numel(),), (1,)).view(dtype)
        for part, dtype in zip(parts, _KEPT, strict=True)
    ]


def _unflat(form: Form | None, flat: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Operand:
    """Undo ``_flat``: the operand of a tensor [t,K] of this shape and dtype, from its three tensors."""
    if form is None:
        return Operand(None, flat[0].view(dtype).view(shape))
    made: list[Any] = [
        like if like is None else part.view(like.dtype).as_strided(like.shape, like.stride())
        for part, like in zip(flat, _lie(shape, dtype, form), strict=False)
    ]
    return Operand(form, *made)


@lru_cache(maxsize=256)
def _lie(shape: tuple[int, int], dtype: torch.dtype, form: Form) -> tuple[Tensor | None, ...]:
    """Meta tensors for an operand [t,K] of this form.  dtype: of values."""
    return allocate(torch.empty(shape, dtype=dtype, device="meta"), form, count=False)[1:4]
