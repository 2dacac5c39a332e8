"""A linear's forward and backward as three GEMMs on cast operands, each multiplied by a backend of its own.

What differs between backends is in ``Backend``: what they can run, how operands are laid out, and who multiplies
them.  The input is cast once, in forward, into its two forms, for fprop and wgrad; backward keeps the
second and never sees the unquantised input again, unless wgrad is in bf16 or an observer looks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.formats import Format
from megatron_snip.quant.cast import OPERANDS, Output
from megatron_snip.quant.kernels.op import finite_amax
from megatron_snip.quant.matmul import matmul
from megatron_snip.quant.operands import Casts, LinearCall, Operand, Operands, Wanted, cast_operands


class Sizes(NamedTuple):
    """What a linear multiplies: x [tokens, inputs], w [outputs, inputs], of this process."""

    tokens: int
    inputs: int
    outputs: int


class Backend(ABC):
    """One way to hold and to multiply quantised operands; where it cannot, it says why."""

    name: str  # as the start of a run tells it
    takes_values = False  # for ``codes`` too, which a cast that makes codes to keep gives besides

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run GEMMs of a quantised format anywhere, or None if it can."""
        return None

    def unfit_device(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, or None if it can."""
        return None

    def unfit_sizes(self, sizes: Sizes) -> str | None:
        """Why it cannot run the GEMMs of a linear of these sizes, or None if it can."""
        return None

    @abstractmethod
    def output(self, role: str, *, kept: bool) -> Output:
        """How an operand of a role is held; ``kept`` until backward or longer, so memory counts."""

    @abstractmethod
    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """The product of a GEMM in dtype ``out``, operands dequantised to ``dtype`` where that is needed; a and b as
        the table in operands.py: fprop (X [T,K], W [N,K]), dgrad (G [T,N], W [N,K]), wgrad (G [T,N], X [T,K]).
        """


class Backends(NamedTuple):
    """Who multiplies each GEMM of a linear."""

    fprop: Backend
    dgrad: Backend
    wgrad: Backend


def three_gemms(x: Tensor, w: Tensor, call: LinearCall, backends: Backends) -> Tensor:
    """x [..., K], w [N,K] of x.dtype or float32 -> y [..., N] of x.dtype, differentiable once."""
    # inside the Function gradients are off, and what it says of its inputs ignores no_grad outside
    needs_wgrad = torch.is_grad_enabled() and w.requires_grad
    y: Tensor = _ThreeGemms.apply(x, w, call, backends, needs_wgrad)
    return y


def plain_product(gemm: str, a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """The GEMM of two operands [R, C] as they are: fprop a @ b.T, dgrad a @ b, wgrad a.T @ b, in dtype ``out``."""
    a, b = (a.T if gemm == "wgrad" else a), (b.T if gemm == "fprop" else b)
    if out == a.dtype or a.device.type == "cpu":  # CPUs multiply bf16 into bf16 alone
        y = matmul(a, b)
        return y if y.dtype == out else y.to(out)
    return torch.mm(a, b, out_dtype=out)


def forward(
    x: Tensor, w: Tensor, call: LinearCall, backends: Backends, *, needs_wgrad: bool, up: Tensor | None = None
) -> tuple[Tensor, Operand | None]:
    """x [T,K], w [N,K] -> y [T,N] of x.dtype, and X [T,K] in wgrad's form if that will be needed.

    up [T,K]: the linear reads SwiGLU's product silu(x) * up; nobody shares its casts.
    """
    wanted = [(call.form("fprop", "input"), backends.fprop.output("input", kept=False))]
    form, output = call.form("wgrad", "input") if needs_wgrad else None, backends.wgrad.output("input", kept=True)
    later = call.forward_only and form is not None
    if needs_wgrad and not later:
        wanted.append((form, output))
    reduce_amax = call.reduce_amax.get("input")
    if call.input_casts is None:
        made = cast_operands(x, wanted, reduce_amax, up=up)
    else:
        made = call.input_casts.get(x, wanted, x.dtype, reduce_amax)
    y = fprop(made[0], w, call, backends, x.dtype, needs_wgrad=needs_wgrad)
    if later:
        assert form is not None
        return y, Operand.unset(form, output, x)
    return y, made[1] if needs_wgrad else None


def fprop(
    x: Operand, w: Tensor, call: LinearCall, backends: Backends, dtype: torch.dtype, *, needs_wgrad: bool
) -> Tensor:
    """The cast input [T,K] and w [N,K] -> y [T,N] of a dtype."""
    weight = _weight(w, "fprop", call, backends, dtype, needs_wgrad)
    return backends.fprop.multiply("fprop", x, weight, dtype, dtype)


class Backward:
    """A linear's two GEMMs in backward, each made when it is asked for: dgrad first, where it is needed.

    g: the gradient of y [T,N]; w [N,K]; amax: one of ``whole_amaxes``.
    """

    def __init__(
        self, g: Tensor, w: Tensor, call: LinearCall, backends: Backends, amax: Tensor | None = None, *,
        needs_dgrad: bool, needs_wgrad: bool,
    ) -> None:  # fmt: skip
        self.g, self.w, self.call, self.backends = g, w, call, backends
        wanted = _of_gradient(call, backends, needs_dgrad, needs_wgrad)
        # the rest of what is needed
        self._cast = cast_operands(g, wanted, call.reduce_amax.get("grad_output"), amax=amax)
        self._grad_x: Tensor | None = None

    def dgrad(self) -> Tensor:
        """The gradient of x [T,K]."""
        dtype, call, backends = self.g.dtype, self.call, self.backends
        weight = _weight(self.w, "dgrad", call, backends, dtype)
        grad = backends.dgrad.multiply("dgrad", self._cast.pop(0), weight, dtype, dtype)
        if call.observer is not None:
            self._grad_x = grad
        return grad

    def wgrad(self, kept: Operand | None, x: Tensor | None) -> Tensor | None:
        """The gradient of w [N,K] from X [T,K] in wgrad's form, if there is one.

        x: the input itself, where an observer looks.
        """
        product: Callable[[], Tensor] | None = None if kept is None else partial(self._product, kept)
        if (observer := self.call.observer) is not None:
            assert x is not None
            product = None if product is None else cache(product)
            w = self.w.to(self.g.dtype)
            observer.backward(Operands(x, w, self.g, self.call, self._grad_x, product))
        return None if product is None else product()

    def _product(self, kept: Operand) -> Tensor:
        return self.backends.wgrad.multiply("wgrad", self._cast.pop(), kept, self.g.dtype, self.w.dtype)


def backward(
    g: Tensor,
    w: Tensor,
    kept: Operand | None,
    x: Tensor | None,
    call: LinearCall,
    backends: Backends,
    amax: Tensor | None = None,
    *,
    needs_dgrad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x [T,K] and w [N,K] from that of y, g [T,N]; w's where ``forward`` kept X for it.

    x: the input itself, where an observer looks; amax: one of ``whole_amaxes``.
    """
    both = Backward(g, w, call, backends, amax, needs_dgrad=needs_dgrad, needs_wgrad=kept is not None)
    grad_x = both.dgrad() if needs_dgrad else None
    return grad_x, both.wgrad(kept, x)


def _of_gradient(call: LinearCall, backends: Backends, needs_dgrad: bool, needs_wgrad: bool) -> list[Wanted]:
    gemms = [gemm for gemm, needed in (("dgrad", needs_dgrad), ("wgrad", needs_wgrad)) if needed]
    return [
        (call.form(gemm, "grad_output"), getattr(backends, gemm).output("grad_output", kept=False)) for gemm in gemms
    ]


def whole_amaxes(
    grads: Sequence[Tensor],
    calls: Sequence[LinearCall],
    backends: Sequence[Backends],
    *,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> list[Tensor | None]:
    """The largest magnitude of each whole gradient, by one collective for these shards [T,N] of all.

    For linears of one input, whose gradients are there at once.  None where the cast finds its own.
    """
    made: list[Tensor | None] = [None] * len(grads)
    reduce_amax = calls[0].reduce_amax.get("grad_output")
    if reduce_amax is None or len(grads) == 1:
        return made
    chosen = []
    for i, (call, each) in enumerate(zip(calls, backends, strict=True)):
        forms = [form for form, _ in _of_gradient(call, each, needs_dgrad, needs_wgrad) if form is not None]
        if any(form.scaled for form in forms) and not any(form.transformed for form in forms):
            chosen.append(i)
    if len(chosen) > 1:
        parts = torch.stack([finite_amax(grads[i]) for i in chosen])
        wholes = reduce_amax(parts[:, None].expand(-1, 4))[:, 0]  # 16 bytes apart, as if each were allocated alone
        for i, amax in zip(chosen, wholes, strict=True):
            made[i] = amax
    return made


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, at no cost where gradients are off already: in all but a ``create_graph``."""
    refusing = once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Tensor) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, call: LinearCall, backends: Backends, needs_wgrad: bool) -> Tensor:
        rows = x if x.ndim == 2 else x.flatten(0, -2)  # here, where a view is no node of the graph
        y, kept = forward(rows, w, call, backends, needs_wgrad=needs_wgrad)
        tensors = (None, None, None) if kept is None else (kept.data, kept.scales, kept.tensor_scale)
        ctx.save_for_backward(*tensors, w, rows if call.observer is not None else None)
        ctx.shape = x.shape
        ctx.form, ctx.output = (None, None) if kept is None else (kept.form, kept.output)
        # what linears share of the input is for their forward alone: holding it would hold the input itself
        ctx.call, ctx.backends = call if call.input_casts is None else call.for_backward(), backends
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        data, scales, whole, w, x = ctx.saved_tensors
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        kept = Operand(ctx.form, ctx.output, data, scales, whole) if needs_wgrad and data is not None else None
        g = grads[0] if grads[0].ndim == 2 else grads[0].flatten(0, -2)
        grad_x, grad_w = backward(g, w, kept, x, ctx.call, ctx.backends, needs_dgrad=needs_dgrad)
        return None if grad_x is None else grad_x.view(ctx.shape), grad_w, None, None, None


def _weight(
    w: Tensor, gemm: str, call: LinearCall, backends: Backends, dtype: torch.dtype, training: bool = False
) -> Operand:
    """The weight [N,K] for a GEMM, from the casts that are kept if there are any.

    Tensor-core bytes that are kept are made for dgrad with those for fprop: one read serves both.  A gathered copy that
    no later microbatch will read is freed.
    """
    kept = call.weight_casts is not None
    casts = call.weight_casts if call.weight_casts is not None else Casts()
    backend: Backend = getattr(backends, gemm)
    output = backend.output("weight", kept=kept)
    wanted = [(call.form(gemm, "weight"), output)]
    if training and kept and output in OPERANDS and output == backends.dgrad.output("weight", kept=kept):
        wanted.append((call.form("dgrad", "weight"), output))
    made = casts.get(w, wanted, dtype, call.reduce_amax.get("weight"), for_now=backend.takes_values)[0]
    if casts.frees and call.observer is None and (training or gemm == "dgrad") and w.untyped_storage().size():
        gemms = (("fprop", backends.fprop), ("dgrad", backends.dgrad))
        casts.free_tensor(w, [(call.form(g, "weight"), b.output("weight", kept=kept)) for g, b in gemms], dtype)
    return made
