"""Linears as an operator that compilers do not look into: `torch.ops.megatron_snip.linears` and its backward.

One call runs all linears that read the same x, as their forward shares its casts.  What differs from step to step is
read when it runs, by a number of each linear (``handle``): precision, backends, kept casts of the weight.  So a graph
outlives a change of plans, and all blocks of a model share it.  What backward needs, codes and scales, are outputs
of unknown sizes.  The context is a tensor, because its numbers would be compiled into the graph.

Bits are those of ``quantized_linear``; so is the order in which gradients of x are added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron_snip.quant.cast import Form, Output, layout
from megatron_snip.quant.linear import backends_of
from megatron_snip.quant.operands import Casts, LinearCall, Operand
from megatron_snip.quant.precision import LinearPrecision
from megatron_snip.quant.rounding import RoundingKey, Rows
from megatron_snip.quant.step_context import StepContext
from megatron_snip.quant.three_gemms import Backends, Sizes, backward, forward, whole_amaxes


class Owner(Protocol):
    """Who knows what a linear does now: the module."""

    impl: str

    def linear_call(self, context: StepContext, input_casts: Casts | None) -> LinearCall:
        """Everything about a call."""
        ...


_OWNERS: WeakValueDictionary[int, Owner] = WeakValueDictionary()
_NUMBERS = itertools.count()
#: Precisions of all linears that a pass was run in, each with its number.
_PRECISIONS: dict[LinearPrecision, int] = {}


def handle_of(owner: Owner) -> Tensor:
    """A number for a linear, int64 [1] on the CPU: a tensor, or each linear would be a graph of its own."""
    number = next(_NUMBERS)
    _OWNERS[number] = owner
    return torch.tensor([number])


def pack(context: StepContext) -> Tensor:
    """A microbatch's context as int64 [4], or [8] with its rows, on the CPU; nobody observes it."""
    key, precision = context.key, context.precision
    assert key is not None and not context.observed
    number = -1 if precision is None else _PRECISIONS.setdefault(precision, len(_PRECISIONS))
    return torch.tensor([key.seed, key.iteration, key.row0, number, *(key.rows or ())])


def _unpack(packed: Tensor) -> StepContext:
    seed, iteration, row0, number, *rows = packed.tolist()
    key = RoundingKey(seed, iteration, 0, row0, rows=Rows(*rows) if rows else None)
    return StepContext(iteration, precision=None if number < 0 else list(_PRECISIONS)[number], key=key)


def linears(
    x: Tensor, weights: Sequence[Tensor], context: Tensor, handles: Sequence[Tensor], *, keeps_input: bool
) -> list[Tensor]:
    """x [T,K], weights [N,K] each -> ys [T,N] of x.dtype, differentiable once.

    keeps_input: whether a wgrad is in bf16, which needs x itself.
    """
    needs_wgrad = torch.is_grad_enabled() and weights[0].requires_grad
    made: list[Tensor] = torch.ops.megatron_snip.linears(
        x, list(weights), context, torch.cat(list(handles)), needs_wgrad, needs_wgrad and keeps_input
    )
    return made[: len(weights)]


def _calls(
    context: Tensor, handles: Tensor, x: Tensor, ws: Sequence[Tensor], tokens: int
) -> Iterator[tuple[LinearCall, Backends]]:
    """The call of each linear now, and who multiplies; x [...] tells the device."""
    now, casts = _unpack(context), Casts()
    for number, w in zip(handles.tolist(), ws, strict=True):
        owner = _OWNERS[number]
        call = owner.linear_call(now, casts)
        yield call, backends_of(owner.impl, call.precision, x.device, Sizes(tokens, w.shape[1], w.shape[0]))


@torch.library.custom_op("megatron_snip::linears", mutates_args=())
def _linears(
    x: Tensor, ws: Sequence[Tensor], context: Tensor, handles: Tensor, needs_wgrad: bool, keeps_input: bool
) -> list[Tensor]:
    ys, saved, seen = [], [], set()
    for w, (call, backends) in zip(ws, _calls(context, handles, x, ws, len(x)), strict=True):
        y, kept = forward(x, w, call, backends, needs_wgrad=needs_wgrad)
        ys.append(y)
        if needs_wgrad:
            assert kept is not None and (kept.form is not None or keeps_input), "the module tells keeps_input"
            saved += [x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)]
            if kept.form is not None and (kept.form, kept.output) not in seen:  # linears that keep the same share it
                seen.add((kept.form, kept.output))
                saved[-2:] = _flat(kept)
    return [*ys, *saved]


@_linears.register_fake
def _(
    x: Tensor, ws: Sequence[Tensor], context: Tensor, handles: Tensor, needs_wgrad: bool, keeps_input: bool
) -> list[Tensor]:
    made = [x.new_empty(x.shape[0], w.shape[0]) for w in ws]
    size = torch.library.get_ctx().new_dynamic_size
    for dtype in (torch.uint8, torch.float32) * (len(ws) if needs_wgrad else 0):
        made.append(x.new_empty(size(), dtype=dtype))
    return made


@torch.library.custom_op("megatron_snip::linears_backward", mutates_args=())
def _linears_backward(
    gs: Sequence[Tensor],
    ws: Sequence[Tensor],
    x: Tensor | None,
    saved: Sequence[Tensor],
    context: Tensor,
    handles: Tensor,
    needs_dgrad: bool,
) -> list[Tensor]:
    tokens = len(gs[0])
    kept: dict[tuple[Form | None, Output], Operand] = {}
    if x is not None:
        kept[None, "values"] = Operand(None, "values", x)
    calls = list(_calls(context, handles, gs[0], ws, tokens))
    wanted: list[tuple[Form | None, Output]] = []
    for i, (call, backends) in enumerate(calls):
        form, output = call.form("wgrad", "input"), backends.wgrad.output("input", kept=True)
        wanted.append((form, output) if form is not None else (None, "values"))
        if form is not None and (form, output) not in kept:
            kept[form, output] = _unflat(form, output, saved[2 * i], saved[2 * i + 1], (tokens, ws[i].shape[1]))
    total, grads = None, []
    amaxes = whole_amaxes(gs, *zip(*calls, strict=True), needs_dgrad=needs_dgrad, needs_wgrad=True)
    # autograd runs the linear that ran last first, and adds in this order
    for g, w, (call, backends), which, amax in reversed(list(zip(gs, ws, calls, wanted, amaxes, strict=True))):
        grad_x, grad_w = backward(g, w, kept[which], None, call, backends, amax, needs_dgrad=needs_dgrad)
        assert grad_w is not None
        grads.append(grad_w)
        if grad_x is not None:
            total = grad_x if total is None else total + grad_x
    return [*grads[::-1], *([] if total is None else [total])]


@_linears_backward.register_fake
def _(
    gs: Sequence[Tensor],
    ws: Sequence[Tensor],
    x: Tensor | None,
    saved: Sequence[Tensor],
    context: Tensor,
    handles: Tensor,
    needs_dgrad: bool,
) -> list[Tensor]:
    made = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in ws]
    return [*made, gs[0].new_empty(gs[0].shape[0], ws[0].shape[1])] if needs_dgrad else made


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, ws, context, handles, _, keeps_input = inputs
    ctx.count, ctx.keeps_input = len(ws), keeps_input
    ctx.save_for_backward(context, handles, *ws, *output[len(ws) :], *([x] if keeps_input else []))


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    context, handles, *rest = ctx.saved_tensors
    x = rest.pop() if ctx.keeps_input else None
    ws, saved = rest[: ctx.count], rest[ctx.count :]
    needs_dgrad = ctx.needs_input_grad[0]
    gs = [g.contiguous() for g in grads[: ctx.count]]
    made = torch.ops.megatron_snip.linears_backward(gs, ws, x, saved, context, handles, needs_dgrad)
    return (made.pop() if needs_dgrad else None), made, None, None, None, None


_linears.register_autograd(_backward, setup_context=_setup)


def _flat(kept: Operand) -> list[Tensor]:
    """Codes of X [T,K] as they lie in memory, and scales with the tensor's at the end, both 1-D."""
    assert kept.scales is not None
    data, scales = (part.as_strided((part.numel(),), (1,)) for part in (kept.data, kept.scales))
    scales = scales.view(torch.float32)
    return [data, scales if kept.tensor_scale is None else torch.cat([scales, kept.tensor_scale.view(1)])]


def _unflat(form: Form, output: Output, data: Tensor, scales: Tensor, shape: tuple[int, int]) -> Operand:
    """What ``_flat`` was made of, X [T,K] of a shape."""
    codes_size, codes_along, scales_size, scales_along = layout(shape, form, output)
    whole = scales[-1] if form.fmt.needs_tensor_amax else None
    scales = scales if whole is None else scales[:-1]
    scales = scales.view(torch.uint8) if output == "swizzled" else scales
    codes, scales = _along(codes_along, data, codes_size), _along(scales_along, scales, scales_size)
    return Operand(form, output, codes, scales, whole)


def _along(dim: int, flat: Tensor, shape: Sequence[int]) -> Tensor:
    """What lies in memory along a dim: 1-D -> [R, C]."""
    return flat.view(*shape) if dim == 1 else flat.view(*shape[::-1]).T
