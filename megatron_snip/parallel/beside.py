"""Column-parallel linears of one input as one step of autograd, with tp's collectives beside their GEMMs.

    forward    cast this process's rows; gather codes and scales, or the rows themselves for bf16; multiply
    backward   gather what wgrad reads   beside  dgrad of each linear
               sum the input's gradient  beside  wgrad of each linear

Under sequence parallelism backward keeps this process's rows alone, in wgrad's form.  Rows are cast before they are
gathered where all linears want one form and that gives the bits of casting the whole: nothing rounds stochastically,
and blocks, and tiles of swizzled scales, end where rows do.  One process alone has nothing to gather or to sum.
Source of the order: Megatron-LM's ColumnParallelLinear, arXiv 2205.05198.
Shapes: T tokens of B sequences, t of them of this process, K input and N output channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.quant.cast import Form, Output
from megatron_snip.quant.dispatch import ReduceAmax
from megatron_snip.quant.operands import LinearCall, Operand, Wanted, cast_operands
from megatron_snip.quant.swizzled import TILE_ROWS
from megatron_snip.quant.three_gemms import Backends, Backward, differentiable_once, fprop, whole_amaxes

# torch 2.13 renamed both; the old names warn there and the new ones are missing before
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ITSELF: Wanted = (None, "values")


@dataclasses.dataclass(frozen=True)
class Group:
    """Linears that read the same x, as they are now: their calls, who multiplies, and how tp cuts x.

    gathers: whether a process has a part of x's rows.  reduce_part, reduce_whole: the amax of such a part, and of all
    that tp has of x, -> that of x wherever it lies; None where it is the same.
    """

    axis: Axis
    gathers: bool
    calls: Sequence[LinearCall]
    backends: Sequence[Backends]
    reduce_part: ReduceAmax | None
    reduce_whole: ReduceAmax | None

    def inputs(self, gemm: str, *, kept: bool) -> list[Wanted]:
        """The form of X for a GEMM of each linear, and how it is held."""
        return [
            (call.form(gemm, "input"), getattr(backends, gemm).output("input", kept=kept))
            for call, backends in zip(self.calls, self.backends, strict=True)
        ]

    def may_cast_parts(self, wanted: Sequence[Wanted], rows: int) -> bool:
        """Whether casting ``rows`` apart gives the bits of casting all at once, and sends less.

        Codes in two formats are more than the rows themselves.
        """
        if not self.gathers:
            return True
        return len(set(wanted)) == 1 and all(form is not None and _ends_with(form, to, rows) for form, to in wanted)


def _ends_with(form: Form, output: Output, rows: int) -> bool:
    tiles = TILE_ROWS if output == "swizzled" else 1  # 128 tokens are whole tiles along either dim
    size = max(form.block[0], form.fmt.hadamard if form.transformed else 1, tiles)
    return form.key is None and rows % size == 0


def linears_beside(x: Tensor, ws: Sequence[Tensor], group: Group) -> list[Tensor]:
    """x [..., K] of t tokens, ws [N,K] each -> ys [T,N] of each linear, differentiable once."""
    needs_wgrad = torch.is_grad_enabled() and ws[0].requires_grad
    return list(_Linears.apply(x, group, needs_wgrad, *ws))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, needs_wgrad: bool, *ws: Tensor) -> tuple[Tensor, ...]:
        part = x.flatten(0, -2)
        kept_as = _kept_as(group, len(part), needs_wgrad=needs_wgrad)
        made, kept = _cast(part, group, kept_as)
        inputs = _inputs(made, part, group)
        ys = tuple(
            fprop(operand, w, call, backends, x.dtype, needs_wgrad=needs_wgrad)
            for operand, w, call, backends in zip(inputs, ws, group.calls, group.backends, strict=True)
        )
        ctx.group, ctx.shape, ctx.kept_as, ctx.needs_wgrad = group, x.shape, kept_as, needs_wgrad
        ctx.save_for_backward(*ws, *(t for one in kept for t in (one.data, one.scales, one.tensor_scale)))
        return ys

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, needs_wgrad = ctx.group, ctx.needs_wgrad
        tensors = ctx.saved_tensors  # once: a recomputation gives them no second time
        ws, saved = tensors[: len(grads)], tensors[len(grads) :]
        waits = {key: _gather(Operand(*key, *saved[3 * i : 3 * i + 3]), group) for i, key in enumerate(ctx.kept_as)}
        needs_dgrad, total, sum_of = ctx.needs_input_grad[0], None, None
        needs: dict[str, bool] = {"needs_dgrad": needs_dgrad, "needs_wgrad": needs_wgrad}
        steps = []
        linears = zip(grads, ws, group.calls, group.backends, whole_amaxes(grads, group.calls, group.backends, **needs))
        # autograd would run the linear that ran last first, and add in this order
        for g, w, call, backends, amax in reversed(list(linears)):
            step = Backward(g, w, call, backends, amax, **needs)
            steps.append(step)
            if needs_dgrad:
                grad = step.dgrad()
                total = grad if total is None else total + grad
        if total is not None:
            sum_of = start_sum(total, group.axis, scatter=group.gathers)
            total = None
        operands, x = _wgrad_inputs({key: waits.pop(key)() for key in list(waits)}, group, needs_wgrad=needs_wgrad)
        grads_w = [step.wgrad(operand, x) for step, operand in zip(steps, operands[::-1], strict=True)]
        return sum_of().view(ctx.shape) if sum_of is not None else None, None, None, *grads_w[::-1]


def _kept_as(group: Group, rows: int, *, needs_wgrad: bool) -> list[Wanted]:
    """The forms of this process's rows that backward needs: wgrad's, or one that all of them can be made of.

    An observer looks at the rows themselves, whether there is a wgrad or not.
    """
    wanted = group.inputs("wgrad", kept=True) if needs_wgrad else []
    kept = list(dict.fromkeys(wanted)) if group.may_cast_parts(wanted, rows) else [_ITSELF]
    kept = [_ITSELF if form is None else (form, output) for form, output in kept]
    observed = any(call.observer is not None for call in group.calls)
    return list(dict.fromkeys([*kept, *([_ITSELF] if observed else [])]))


def _cast(part: Tensor, group: Group, kept_as: Sequence[Wanted]) -> tuple[Mapping[Wanted, Operand], list[Operand]]:
    """What of fprop's input is cast before it is gathered, by form, and what is kept; from one read of the rows."""
    now: list[Wanted] = []
    wanted = group.inputs("fprop", kept=False)
    if group.may_cast_parts(wanted, len(part)):
        now = [(form, _sent_as(output) if group.gathers else output) for form, output in dict.fromkeys(wanted)]
    later = group.calls[0].forward_only  # backward comes after another forward, which casts for it
    cast = [*now, *(key for key in kept_as if key[0] is not None and not later)]
    if len(cast) > 2:  # a kernel writes two forms that follow each other: those of one format, as one linear alone
        cast.sort(key=_format_name)
    made = dict(zip(cast, cast_operands(part, cast, group.reduce_part), strict=True))
    kept = []
    for form, output in kept_as:
        if form is None:
            kept.append(Operand(None, output, part))
        else:
            kept.append(Operand.unset(form, output, part) if later else made[form, output])
    return {key: made[key] for key in now}, kept


def _format_name(wanted: Wanted) -> str:
    form, _ = wanted
    return "" if form is None else form.fmt.name


def _sent_as(output: Output) -> Output:
    return "codes" if output == "values" else output


def _inputs(made: Mapping[Wanted, Operand], part: Tensor, group: Group) -> list[Operand]:
    """fprop's input of each linear, whole: gathered as it was cast, or cast once it is gathered."""
    wanted = group.inputs("fprop", kept=False)
    if not made:
        whole = _gather(Operand(None, "values", part), group)().data
        distinct = list(dict.fromkeys(wanted))
        found = dict(zip(distinct, cast_operands(whole, distinct, group.reduce_whole), strict=True))
    elif group.gathers:
        waits = {key: _gather(operand, group) for key, operand in made.items()}
        wholes = {key: wait() for key, wait in waits.items()}
        found = {}
        for form, output in dict.fromkeys(wanted):
            whole_operand = wholes[form, _sent_as(output)]
            values = output == "values" and form is not None
            found[form, output] = Operand(form, output, whole_operand.values(part.dtype)) if values else whole_operand
    else:
        found = dict(made)
    return [found[key] for key in wanted]


def _wgrad_inputs(
    wholes: Mapping[Wanted, Operand], group: Group, *, needs_wgrad: bool
) -> tuple[list[Operand | None], Tensor | None]:
    """wgrad's input of each linear, whole, if there is a wgrad, and the input itself if it was kept."""
    x = wholes[_ITSELF].data if _ITSELF in wholes else None
    if not needs_wgrad:
        return [None] * len(group.calls), x
    wanted = [_ITSELF if form is None else (form, output) for form, output in group.inputs("wgrad", kept=True)]
    missing = [key for key in dict.fromkeys(wanted) if key not in wholes]
    found = dict(wholes)
    if missing:
        assert x is not None
        found |= zip(missing, cast_operands(x, missing, group.reduce_whole), strict=True)
    return [found[key] for key in wanted], x


def _gather(part: Operand, group: Group) -> Callable[[], Operand]:
    """Begin to gather an operand's rows; the call that is returned waits for the whole."""
    if not group.gathers:
        return lambda: part
    data = start_gather(part.data, group.axis)
    scales = None if part.scales is None else start_gather(part.scales, group.axis)
    return lambda: part._replace(data=data(), scales=None if scales is None else scales())


def start_gather(part: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Begin to gather rows, [r, C] of each process -> [tp r, C], laid out as the parts are.

    The call that is returned waits for the whole.  It copies only parts whose columns lie one after another.
    """
    columns_first = not part.is_contiguous()
    flat = part.T if columns_first else part
    assert flat.is_contiguous(), "rows or columns lie one after another"
    whole = flat.new_empty((axis.size * flat.shape[0], flat.shape[1]))
    work = all_gather(whole, flat, group=axis.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        if columns_first:
            return whole.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1).T
        return whole

    return wait


def start_sum(x: Tensor, axis: Axis, *, scatter: bool) -> Callable[[], Tensor]:
    """Begin to sum partial sums x [T, C], which may be overwritten, over tp.

    The call that is returned waits for the sum [T, C], or with ``scatter`` this process's [t, C] of it.
    """
    if axis.size == 1:
        return lambda: x
    if not scatter:
        work, out = dist.all_reduce(x, group=axis.group, async_op=True), x
    else:
        out = x.new_empty((len(x) // axis.size, x.shape[1]))
        work = reduce_scatter(out, x, group=axis.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out

    return wait
