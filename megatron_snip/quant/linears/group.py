"""Forward and backward of a group: linears that read one input, with tp's collectives beside their GEMMs.

    forward    cast this process's rows; gather codes and scales, or the rows themselves for bf16; multiply
    backward   gather what wgrad reads   while  each linear runs dgrad
               sum the input's gradient  while  each linear runs wgrad

A lone linear is a group of one.  Everything that runs linears runs ``forward`` and ``backward``: autograd by this
module, compiled blocks by linear_op.py, recomputation and probes by either.

The input is x, or SwiGLU's product silu(x) * up (arXiv 2002.05202), which is not stored if the cast can compute it.
Forward casts it once, into its forms for fprop and wgrad.  Only the form for wgrad is kept for backward; the input
itself is kept if wgrad is in bf16 or an observer looks.  Under sequence parallelism a process keeps its own rows.  It
casts them before they are gathered if all linears want one form and the bits are those of casting the whole: nothing
rounds stochastically, and blocks and tiles of swizzled scales end where a process's rows end.
Source of the order: Megatron-LM's ColumnParallelLinear, arXiv 2205.05198.
Shapes: T tokens, t of them of this process, K input and N output channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.mesh import Axis
from megatron_snip.quant.casts.cast import OPERANDS, Form, Operand
from megatron_snip.quant.casts.swizzled import TILE_ROWS
from megatron_snip.quant.kernels import op
from megatron_snip.quant.kernels.dispatch import ReduceAmax, cast, values
from megatron_snip.quant.linears.backend import Backend, Backends
from megatron_snip.quant.linears.collectives import start_gather, start_sum
from megatron_snip.quant.linears.operands import Casts, LinearCall, Operands, unset


class Group(NamedTuple):
    """Linears that read the same input, in their present precision: the call of each, and the backends of its GEMMs.

    axis: tp, over which the input's gradient is summed; None if no other process reads the input.  gathers: whether
    each process has a part of the input's rows.  reduce_part: the amax of such a part -> the amax of the whole.
    """

    calls: Sequence[LinearCall]
    backends: Sequence[Backends]
    axis: Axis | None = None
    gathers: bool = False
    reduce_part: ReduceAmax | None = None

    @property
    def observed(self) -> bool:
        """Whether an observer looks at one of the linears."""
        if len(self.calls) == 1:
            return self.calls[0].observer is not None
        return any(call.observer is not None for call in self.calls)

    @property
    def reduce_whole(self) -> ReduceAmax | None:
        """The amax of the input that tp has, or a process of a row-parallel linear -> the amax of the whole input."""
        return self.calls[0].reduce_amax.get("input")

    def reads(self, gemm: str, *, kept: bool) -> list[Form | None]:
        """The form of the input for a GEMM of each linear."""
        pairs = zip(self.calls, self.backends, strict=True)
        return [_form(call, backends, gemm, "input", kept=kept) for call, backends in pairs]

    def sent(self, wanted: Sequence[Form | None], rows: int) -> list[Form | None]:
        """The form in which ``rows`` of the input are gathered: the one that all linears want, or else the rows.

        Codes of two formats would be more bytes than the rows.
        """
        form, *others = dict.fromkeys(wanted)
        if others or form is None or form.key is not None:
            return [None]
        tiles = TILE_ROWS if form.output == "swizzled" else 1  # 128 tokens are whole tiles along either dim
        if rows % max(form.block[0], form.fmt.hadamard if form.transformed else 1, tiles):
            return [None]
        return [form.held("codes") if form.output == "values" else form]

    def kept_as(self, rows: int, *, needs_wgrad: bool) -> list[Form | None]:
        """The forms in which ``rows`` of the input are kept for backward: those for wgrad, or one that gives them all.

        An observer looks at the rows themselves, with or without a wgrad.
        """
        kept = self.reads("wgrad", kept=True) if needs_wgrad else []
        if self.gathers and kept:
            kept = self.sent(kept, rows)
        elif len(kept) > 1:
            kept = list(dict.fromkeys(kept))
        return [*kept, None] if self.observed and None not in kept else kept


def run_group(x: Tensor, ws: Sequence[Tensor], group: Group, up: Tensor | None = None) -> Sequence[Tensor]:
    """x [..., K] of t tokens, ws [N,K] each, of x.dtype or float32 -> y [..., N] of T tokens for each linear.

    up: of x's shape; the linears then read silu(x) * up.  Outputs have x.dtype and are differentiable once.
    """
    # asked here, because gradients are off inside the Function, and its needs_input_grad ignores an outer no_grad
    needs_wgrad = torch.is_grad_enabled() and ws[0].requires_grad
    ys: Sequence[Tensor] = _Linears.apply(x, up, group, needs_wgrad, *ws)
    return ys


def forward(
    x: Tensor, up: Tensor | None, ws: Sequence[Tensor], group: Group, *, needs_wgrad: bool
) -> tuple[list[Tensor], list[Operand]]:
    """x [t,K], or gate and up, and ws [N,K] -> y [T,N] of each linear, and the input in each form of ``kept_as``."""
    wanted, kept_as = group.reads("fprop", kept=False), group.kept_as(len(x), needs_wgrad=needs_wgrad)
    now = group.sent(wanted, len(x)) if group.gathers else wanted
    later = group.calls[0].forward_only  # the forward that runs again will cast for backward
    wanted_now = [*now, *(form for form in kept_as if form is None)] if later else now + kept_as
    made = _cast_once(x, wanted_now, group.reduce_part if group.gathers else group.reduce_whole, up)
    inputs, rest = made[: len(now)], made[len(now) :]
    if group.gathers:
        inputs = _of_wholes(_gather(inputs, group)(), wanted, group, x.dtype)
    kept = [rest.pop(0) if form is None else unset(form, x) for form in kept_as] if later else rest
    ys = []  # linears that read the same form of the input could share one GEMM here
    for operand, w, call, backends in zip(inputs, ws, group.calls, group.backends, strict=True):
        weight = _weight(w, "fprop", call, backends, x.dtype, needs_wgrad)
        ys.append(backends.fprop.multiply("fprop", operand, weight, x.dtype, x.dtype))
    return ys, kept


class _Step(NamedTuple):
    """A linear between its dgrad and its wgrad.

    made: the casts of g [T,N] that are still needed.  grad_x: its own part of the input's gradient, for an observer.
    """

    g: Tensor
    w: Tensor
    call: LinearCall
    backends: Backends
    made: list[Operand]
    grad_x: Tensor | None


def backward(
    gs: Sequence[Tensor],
    ws: Sequence[Tensor],
    kept: Sequence[Operand],
    group: Group,
    *,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input [t,K] and of each w [N,K] from those of the outputs, gs [T,N], and what forward kept."""
    dtype, axis = gs[0].dtype, group.axis
    observed = group.observed
    wait = _gather(kept if needs_wgrad or observed else (), group) if group.gathers else None
    amaxes = _amaxes(gs, group, needs_dgrad, needs_wgrad) if len(gs) > 1 else [None]
    total: Tensor | None = None
    steps: list[_Step] = []
    # the last linear first, as autograd would, so that gradients are added in the same order
    for i in range(len(gs) - 1, -1, -1):
        g, w, call, backends = gs[i], ws[i], group.calls[i], group.backends[i]
        wanted = _of_gradient(call, backends, needs_dgrad, needs_wgrad)
        made, grad = cast(g, wanted, call.reduce_amax.get("grad_output"), amax=amaxes[i]), None
        if needs_dgrad:
            weight = _weight(w, "dgrad", call, backends, dtype)
            grad = backends.dgrad.multiply("dgrad", made.pop(0), weight, dtype, dtype)
            total = grad if total is None else total + grad
            grad = None if call.observer is None else grad
        steps.append(_Step(g, w, call, backends, made, grad))
    finish: Callable[[], Tensor] | None = None
    if total is not None and axis is not None and axis.size > 1:
        if total is steps[0].grad_x:
            total = total.clone()  # the collective overwrites it before the observer sees it
        finish, total = start_sum(total, axis, scatter=group.gathers), None
    wholes = kept if wait is None else wait()
    x = next(one.data for one in wholes if one.form is None) if observed else None
    inputs: Sequence[Operand | None] = [None] * len(steps)
    if needs_wgrad and len(steps) == len(wholes) == 1 and wholes[0].form is not None:
        inputs = wholes  # a lone linear keeps exactly what its wgrad reads
    elif needs_wgrad:
        inputs = _of_wholes(wholes, group.reads("wgrad", kept=True), group, dtype)
    grads_w = [_wgrad(steps.pop(0), operand, x) for operand in inputs[::-1]]
    return total if finish is None else finish(), grads_w[::-1]


def _wgrad(step: _Step, kept: Operand | None, x: Tensor | None) -> Tensor | None:
    """The gradient of w [N,K], or None if it is not needed.  A GEMM that accumulates in float32 would go here.

    x [T,K]: the input itself, if an observer looks.
    """
    g, w, call, backends, made, grad_x = step
    product: Callable[[], Tensor] | None = None
    if kept is not None:
        product = partial(backends.wgrad.multiply, "wgrad", made.pop(), kept, g.dtype, w.dtype)
    if call.observer is not None:
        assert x is not None
        product = None if product is None else cache(product)
        call.observer.backward(Operands(x, w.to(g.dtype), g, call, grad_x, product))
    return None if product is None else product()


def _cast_once(
    x: Tensor, wanted: Sequence[Form | None], reduce_amax: ReduceAmax | None, up: Tensor | None = None
) -> list[Operand]:
    """``cast``, for linears of which several may want the same form."""
    if len(wanted) == 1 or (len(wanted) == 2 and wanted[0] != wanted[1]):
        return cast(x, wanted, reduce_amax, up=up)
    forms = list(dict.fromkeys(wanted))
    if len(forms) > 2:  # a kernel writes two consecutive forms per launch: put those of one format together
        forms.sort(key=lambda form: "" if form is None else form.fmt.name)
    made = dict(zip(forms, cast(x, forms, reduce_amax, up=up), strict=True))
    return [made[form] for form in wanted]


def _gather(parts: Sequence[Operand], group: Group) -> Callable[[], Sequence[Operand]]:
    """Begin to gather operands' rows [t,K]; the returned function waits for the whole operands [T,K]."""
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
) -> list[Operand]:
    """The whole input in each wanted form; ``wholes`` holds these forms or what they are made of."""
    made = {one.form: one for one in wholes}
    if missing := [form for form in wanted if form not in made]:
        if None in made:
            made.update(zip(missing, _cast_once(made[None].data, missing, group.reduce_whole), strict=True))
        else:  # values, of the codes that were sent
            (whole,) = wholes
            made.update({form: Operand(form, values(whole, dtype)) for form in set(missing)})
    return [made[form] for form in wanted]


def _form(call: LinearCall, backends: Backends, gemm: str, role: str, *, kept: bool) -> Form | None:
    """The form of an operand of a GEMM, held as the GEMM's backend wants it."""
    backend: Backend = getattr(backends, gemm)
    return call.form(gemm, role, output=backend.output(role, kept=kept))


def _of_gradient(call: LinearCall, backends: Backends, needs_dgrad: bool, needs_wgrad: bool) -> list[Form | None]:
    gemms = [gemm for gemm, needed in (("dgrad", needs_dgrad), ("wgrad", needs_wgrad)) if needed]
    return [_form(call, backends, gemm, "grad_output", kept=False) for gemm in gemms]


def _amaxes(gs: Sequence[Tensor], group: Group, needs_dgrad: bool, needs_wgrad: bool) -> list[Tensor | None]:
    """The amax of each whole gradient of which gs [T,N] are shards, by one collective for all.

    None for a gradient whose cast finds its amax itself.
    """
    made: list[Tensor | None] = [None] * len(gs)
    reduce_amax = group.calls[0].reduce_amax.get("grad_output")
    if reduce_amax is None:
        return made
    chosen = []
    for i, (call, backends) in enumerate(zip(group.calls, group.backends, strict=True)):
        forms = [form for form in _of_gradient(call, backends, needs_dgrad, needs_wgrad) if form is not None]
        if any(form.scaled for form in forms) and not any(form.transformed for form in forms):
            chosen.append(i)
    if len(chosen) > 1:
        parts = torch.stack([op.finite_amax(gs[i]) for i in chosen])
        wholes = reduce_amax(parts[:, None].expand(-1, 4))[:, 0]  # 16 bytes apart, as if each were allocated alone
        for i, amax in zip(chosen, wholes, strict=True):
            made[i] = amax
    return made


def _weight(
    w: Tensor, gemm: str, call: LinearCall, backends: Backends, dtype: torch.dtype, training: bool = False
) -> Operand:
    """The weight [N,K] for a GEMM, from the kept casts if there are any.

    If tensor-core bytes are kept, fprop makes those for dgrad, too: one read serves both.  This frees a gathered copy
    that no later microbatch will read.
    """
    kept = call.weight_casts is not None
    casts = call.weight_casts if call.weight_casts is not None else Casts()
    backend: Backend = getattr(backends, gemm)
    form = _form(call, backends, gemm, "weight", kept=kept)
    wanted = [form]
    if training and kept and form is not None and form.output in OPERANDS:
        again = _form(call, backends, "dgrad", "weight", kept=kept)
        wanted += [again] if again is not None and again.output == form.output else []
    made = casts.get(w, wanted, dtype, call.reduce_amax.get("weight"), for_now=backend.takes_values)[0]
    if casts.frees and call.observer is None and (training or gemm == "dgrad") and w.untyped_storage().size():
        casts.free_tensor(w, [_form(call, backends, g, "weight", kept=kept) for g in ("fprop", "dgrad")], dtype)
    return made


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, which costs nothing while gradients are off: always but for ``create_graph``."""
    refusing = once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Tensor) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, group: Group, needs_wgrad: bool, *ws: Tensor
    ) -> tuple[Tensor, ...]:
        flat = x.ndim == 2  # views made here are no nodes of autograd's graph
        rows, more = (x, up) if flat else (x.flatten(0, -2), up if up is None else up.flatten(0, -2))
        ys, kept = forward(rows, more, ws, group, needs_wgrad=needs_wgrad)
        ctx.group, ctx.needs_wgrad, ctx.kept_as = group, needs_wgrad, []
        ctx.shape, ctx.of_product = x.shape, up is not None
        saved = list(ws)
        for form, *parts in kept:
            ctx.kept_as.append(form)
            saved += parts[:3]  # type: ignore[arg-type]  # None is saved, too
        ctx.save_for_backward(*saved, *(() if up is None else (x, up)))
        return tuple(ys) if flat else tuple([y.view(*x.shape[:-2], -1, y.shape[1]) for y in ys])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, n = ctx.saved_tensors, len(grads)  # once: a recomputation gives them no second time
        kept = [Operand(form, *tensors[n + 3 * i : n + 3 * i + 3]) for i, form in enumerate(ctx.kept_as)]
        needs_x, needs_up, _, _, *needs_ws = ctx.needs_input_grad
        gs = [g if g.ndim == 2 else g.flatten(0, -2) for g in grads]
        grad, grads_w = backward(
            gs, tensors[:n], kept, ctx.group, needs_dgrad=needs_x or needs_up,
            needs_wgrad=ctx.needs_wgrad and any(needs_ws),
        )  # fmt: skip
        grad, grad_up = None if grad is None else grad.view(ctx.shape), None
        if grad is not None and ctx.of_product:
            gate, up = tensors[-2:]
            grad, grad_up = op.swiglu_gradients(grad, gate, up, needs_x, needs_up)
        return grad, grad_up, None, None, *grads_w
