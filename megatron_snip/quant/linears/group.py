"""Runs forward and backward of a group of linears that read one input, with tp's collectives alongside their GEMMs.

    forward    cast this rank's rows; gather codes and scales, or the rows themselves for bf16; multiply
    backward   gather what wgrad reads   while  each linear runs dgrad
               sum the input's gradient  while  each linear runs wgrad

A single linear is a group of one.  All linears run ``forward`` and ``backward``: `_Linears` calls them in eager mode,
and the operator in linear_op.py calls them in compiled blocks.

The input is x, or SwiGLU's product silu(gate) * up (arXiv 2002.05202), which is not stored if the cast can compute it.
Forward casts the input once for fprop and wgrad, and keeps only what wgrad reads: codes, or the input itself if wgrad
is in bf16 or there is an observer.

Under sequence parallelism, each rank keeps its own rows.  It casts them before the all-gather if all linears read one
form and the bits match a cast of the whole input: nothing rounds stochastically, and the rank's rows are whole blocks
and whole tiles of swizzled scales.
Source of the order: Megatron-LM's ColumnParallelLinear, arXiv 2205.05198.
Shapes: T tokens, t of them on this rank, K input and N output channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.mesh import Axis
from megatron_snip.quant.casts.cast import Form, Operand
from megatron_snip.quant.casts.swizzled import TILE_ROWS
from megatron_snip.quant.kernels import op
from megatron_snip.quant.kernels.dispatch import ReduceAmax, cast, values
from megatron_snip.quant.linears.collectives import start_gather, start_sum
from megatron_snip.quant.linears.operands import Casts, LinearCall, Operands, unset


class Group(NamedTuple):
    """Linears that read the same input, in their current precision.

    axis: tp, over which the input's gradient is summed; None if no other rank reads the input.
    gathers: whether each rank has a part of the input's rows.  reduce_part: maps the amax of this part to that of the
    whole input; the calls' own ``reduce_amax`` is for the gathered rows.  watch: told of the inputs and of what is kept
    in each forward, for a dry run.
    """

    calls: Sequence[LinearCall]
    axis: Axis | None = None
    gathers: bool = False
    reduce_part: ReduceAmax | None = None
    watch: Callable[[Sequence[Tensor], Group, Sequence[Operand]], None] | None = None

    @property
    def observed(self) -> bool:
        """Whether an observer looks at one of the linears."""
        return [call for call in self.calls if call.observer is not None] != []

    def wanted(self, gemm: str, *, kept: bool) -> list[Form | None]:
        """The form of the input that each linear's GEMM reads."""
        return [call.wanted(gemm, "input", kept=kept) for call in self.calls]

    def wanted_later(self) -> list[Form | None]:
        """The form of the input that each linear keeps for wgrad: what wgrad multiplies, or what that is cast from."""
        return [
            call.source("wgrad", "input", kept=True) or call.wanted("wgrad", "input", kept=True) for call in self.calls
        ]

    def cast_as(self, wanted: Sequence[Form | None], rows: int) -> Sequence[Form | None]:
        """The distinct forms that this rank casts its ``rows`` of the input to, for linears that read ``wanted``.

        Before an all-gather there is one form, because codes of two formats would be more bytes than the rows (None).
        """
        forms = wanted if len(wanted) == 1 else list(dict.fromkeys(wanted))
        if not (self.gathers and forms):
            return forms
        form = forms[0]
        if len(forms) > 1 or form is None or form.key is not None:
            return [None]
        tiles = TILE_ROWS if form.output == "swizzled" else 1  # 128 tokens are whole tiles along either dim
        hadamard = form.fmt.hadamard
        tokens = hadamard.length if form.transformed and form.dim == 0 and hadamard is not None else 1
        if rows % max(form.block[0], tokens, tiles):
            return [None]
        return [form.held("codes") if form.output == "values" else form]

    def kept_as(self, rows: int, *, needs_wgrad: bool) -> Sequence[Form | None]:
        """The forms of ``rows`` of the input to keep for backward: wgrad's, and the rows themselves for an observer."""
        kept = self.cast_as(self.wanted_later(), rows) if needs_wgrad else []
        return [*kept, None] if self.observed and None not in kept else kept


def forward(
    inputs: Sequence[Tensor], ws: Sequence[Tensor], group: Group, *, needs_wgrad: bool
) -> tuple[list[Tensor], list[Operand]]:
    """Run fprop: x [t,K], or gate and up, and ws [N,K] -> y [T,N] of each linear, and the input as ``kept_as`` says."""
    x, rows = inputs[0], len(inputs[0])
    wanted, kept_as = group.wanted("fprop", kept=False), group.kept_as(rows, needs_wgrad=needs_wgrad)
    now = group.cast_as(wanted, rows)
    later = group.calls[0].forward_only  # recomputation's forward will cast for backward
    forms = [*now, *([form for form in kept_as if form is None] if later else kept_as)]
    reduce_amax = group.reduce_part if group.gathers else group.calls[0].reduce_amax.get("input")
    made = _cast(inputs, forms, reduce_amax)
    parts, kept = made[: len(now)], made[len(now) :]
    if later:
        kept = [kept.pop(0) if form is None else unset(form, x) for form in kept_as]
    ys = []  # linears that read the same form of the input could share one GEMM here
    wholes = _of_wholes(_gather(parts, group)() if group.gathers else parts, wanted, group, x.dtype)
    for operand, w, call in zip(wholes, ws, group.calls, strict=True):
        weight = (call.weight_casts or Casts()).operand(w, "fprop", call, x.dtype, training=needs_wgrad)
        ys.append(call.backends["fprop"].multiply("fprop", operand, weight, x.dtype, x.dtype))
    if group.watch is not None:
        group.watch(inputs, group, kept)
    return ys, kept


def backward(
    gs: Sequence[Tensor],
    ws: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kept: Sequence[Operand],
    group: Group,
    *,
    needs_inputs: Sequence[bool],
    needs_wgrad: bool,
) -> tuple[Sequence[Tensor | None], list[Tensor | None]]:
    """Gradients of each input [t,K] and each w [N,K] from those of the outputs, gs [T,N], and what forward kept.

    inputs: gate and up if the linears read their product; not needed for x.
    """
    dtype, axis, needs_dgrad, observed = gs[0].dtype, group.axis, any(needs_inputs), group.observed
    wait = _gather(kept if needs_wgrad or observed else (), group) if group.gathers else None
    gemms = [gemm for gemm, needed in (("dgrad", needs_dgrad), ("wgrad", needs_wgrad)) if needed]
    wanted = [_of_gradient(call, gemms) for call in group.calls]
    amaxes = _amaxes(gs, wanted, group)
    total: Tensor | None = None
    made: dict[int, list[Operand]] = {}
    seen: dict[int, Tensor] = {}  # for observers: each linear's own part of the input's gradient
    # the last linear first, as autograd would, so that gradients are added in the same order
    for i, call in reversed([*enumerate(group.calls)]):
        made[i] = cast(gs[i], wanted[i], call.reduce_amax.get("grad_output"), amax=amaxes[i])
        if needs_wgrad and ("wgrad", "grad_output") in call.precision.sources:
            made[i] = [*made[i] * needs_dgrad, call.recast("wgrad", "grad_output", made[i][0], dtype)]
        if needs_dgrad:
            weight = (call.weight_casts or Casts()).operand(ws[i], "dgrad", call, dtype)
            grad = call.backends["dgrad"].multiply("dgrad", made[i].pop(0), weight, dtype, dtype)
            total = grad if total is None else total + grad
            if call.observer is not None:
                seen[i] = grad
            del grad
    finish: Callable[[], Tensor] | None = None
    if total is not None and axis is not None:
        # cloned if an observer reads it later, because the collective overwrites it
        finish = start_sum(total.clone() if len(gs) == len(seen) == 1 else total, axis, scatter=group.gathers)
        total = None
    wholes = kept if wait is None else wait()
    x = next(one.data for one in wholes if one.form is None) if observed else None
    reads: Sequence[Operand | None] = [None] * len(gs)
    if needs_wgrad and len(gs) == len(wholes) == 1 and wholes[0].form is not None:
        reads = wholes  # a single linear keeps exactly what its wgrad reads or recasts
    elif needs_wgrad:
        reads = _of_wholes(wholes, group.wanted_later(), group, dtype)
    grads_w = [_wgrad(gs[i], ws[i], group.calls[i], operands, reads[i], x, seen.get(i)) for i, operands in made.items()]
    total = total if finish is None else finish()
    if total is None or len(needs_inputs) == 1:
        return [total] * len(needs_inputs), grads_w[::-1]
    gate, up = inputs
    return op.swiglu_gradients(total, gate, up, *needs_inputs), grads_w[::-1]


def _of_gradient(call: LinearCall, gemms: Sequence[str]) -> list[Form | None]:
    """The forms that a gradient is cast to for these GEMMs; wgrad's may be made from dgrad's."""
    if "wgrad" in gemms and ("wgrad", "grad_output") in call.precision.sources:
        return [call.source("wgrad", "grad_output")]
    return [call.wanted(gemm, "grad_output") for gemm in gemms]


def _wgrad(
    g: Tensor, w: Tensor, call: LinearCall, made: list[Operand], read: Operand | None, x: Tensor | None,
    grad_x: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The gradient of w [N,K], or None if it is not needed.  A GEMM that accumulates in float32 would go here.

    made: ends with the cast of g [T,N].  read: the kept cast of the input.  x [T,K], grad_x: for an observer.
    """
    product: Callable[[], Tensor] | None = None
    if read is not None:
        read = call.recast("wgrad", "input", read, g.dtype)
        product = partial(call.backends["wgrad"].multiply, "wgrad", made.pop(), read, g.dtype, w.dtype)
    if call.observer is not None:
        assert x is not None
        product = None if product is None else cache(product)
        call.observer(Operands(x, w.to(g.dtype), g, call, grad_x, product))
    return None if product is None else product()


def _cast(inputs: Sequence[Tensor], wanted: Sequence[Form | None], reduce_amax: ReduceAmax | None) -> list[Operand]:
    """Cast the input, x [R, C] or the product of gate and up, to each form; a kernel reads it once for all forms."""
    up = inputs[1] if len(inputs) > 1 else None
    if len(wanted) == 1 or (len(wanted) == 2 and wanted[0] != wanted[1]):
        return cast(inputs[0], wanted, reduce_amax, up=up)
    forms = list(dict.fromkeys(wanted))
    if len(forms) > 2:  # a kernel writes two consecutive forms per launch, so put those of one format together
        forms.sort(key=lambda form: "" if form is None else form.fmt.name)
    made = dict(zip(forms, cast(inputs[0], forms, reduce_amax, up=up), strict=True))
    return [made[form] for form in wanted]


def _gather(parts: Sequence[Operand], group: Group) -> Callable[[], Sequence[Operand]]:
    """Start gathering operands' rows [t,K]; the returned function waits for the whole operands [T,K]."""
    assert group.axis is not None
    waits = []
    for part in parts:
        data = start_gather(part.data, group.axis)
        waits.append((part, data, None if part.scales is None else start_gather(part.scales, group.axis)))
    return lambda: [
        part._replace(data=data(), scales=scales if scales is None else scales()) for part, data, scales in waits
    ]


def _of_wholes(
    wholes: Sequence[Operand], wanted: Sequence[Form | None], group: Group, dtype: torch.dtype
) -> Sequence[Operand]:
    """The whole input in each wanted form; ``wholes`` holds these forms or what they are made from."""
    forms = [one.form for one in wholes]
    if forms == wanted:
        return wholes
    made = dict(zip(forms, wholes, strict=True))
    if missing := [form for form in wanted if form not in made]:
        if None in made:
            reduce_amax = group.calls[0].reduce_amax.get("input")
            made.update(zip(missing, _cast([made[None].data], missing, reduce_amax), strict=True))
        else:  # values, dequantised from the gathered codes
            made.update({form: Operand(form, values(wholes[0], dtype)) for form in set(missing)})
    return [made[form] for form in wanted]


def _amaxes(gs: Sequence[Tensor], wanted: Sequence[Sequence[Form | None]], group: Group) -> list[Tensor | None]:
    """The amax of each whole gradient, from its shard in gs [T,N], with one collective for all.

    None for a gradient whose cast finds its own amax.
    """
    reduce_amax, chosen = group.calls[0].reduce_amax.get("grad_output"), []
    if reduce_amax is not None and len(gs) > 1:
        for i, forms in enumerate(wanted):
            quantised = [form for form in forms if form is not None]
            if any(form.scaled for form in quantised) and not any(form.transformed for form in quantised):
                chosen.append(i)
    if reduce_amax is None or len(chosen) < 2:
        return [None] * len(gs)
    parts = torch.stack([op.finite_amax(gs[i]) for i in chosen])
    wholes = reduce_amax(parts[:, None].expand(-1, 4))[:, 0]  # 16 bytes apart, as if each were allocated alone
    made = dict(zip(chosen, wholes, strict=True))
    return [made.get(i) for i in range(len(gs))]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, needs_wgrad: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(group.calls)
        inputs, ws, shape = tensors[:-n], tensors[-n:], tensors[0].shape
        flat = len(shape) == 2  # views made here are not nodes of autograd's graph
        rows = inputs if flat else [one.flatten(0, -2) for one in inputs]
        ys, kept = forward(rows, ws, group, needs_wgrad=needs_wgrad)
        ctx.group, ctx.needs_wgrad, ctx.shape, ctx.kept_as = group, needs_wgrad, shape, [one.form for one in kept]
        ctx.save_for_backward(*ws, *(rows if len(rows) > 1 else ()), *[part for one in kept for part in one[1:4]])
        return tuple(ys) if flat else tuple([y.view(*shape[:-2], -1, y.shape[1]) for y in ys])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # torch's wrapper costs host time, and matters only under ``create_graph``
        return (once_differentiable(_gradients) if torch.is_grad_enabled() else _gradients)(ctx, *grads)


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    tensors, n, forms = ctx.saved_tensors, len(grads), ctx.kept_as  # read once: recomputation provides them only once
    needs_inputs, first = ctx.needs_input_grad[2:-n], len(tensors) - 3 * len(forms)
    kept = [Operand(form, *tensors[i : i + 3]) for form, i in zip(forms, range(first, len(tensors), 3), strict=True)]
    gs = [g if g.ndim == 2 else g.flatten(0, -2) for g in grads]
    needs_wgrad = ctx.needs_wgrad and any(ctx.needs_input_grad[-n:])
    made, grads_w = backward(
        gs, tensors[:n], tensors[n:first], kept, ctx.group, needs_inputs=needs_inputs, needs_wgrad=needs_wgrad
    )
    return None, None, *[None if one is None else one.view(ctx.shape) for one in made], *grads_w


def run_group(inputs: Sequence[Tensor], ws: Sequence[Tensor], group: Group) -> Sequence[Tensor]:
    """Run a group of linears: y [..., N] of T tokens for each linear, in x.dtype, differentiable once.

    inputs: x [..., K] of t tokens, or gate and up of this shape if the linears read silu(gate) * up.  ws: [N,K] each,
    in x.dtype or float32.
    """
    # here, because gradients are off inside the Function, and its needs_input_grad ignores an outer no_grad
    needs_wgrad = torch.is_grad_enabled() and ws[0].requires_grad
    ys: Sequence[Tensor] = _Linears.apply(group, needs_wgrad, *inputs, *ws)
    return ys
