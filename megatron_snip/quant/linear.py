"""A linear whose three GEMMs each have their own format.

fprop  Y[T,N]  = Q(X)[T,K]   @ Q(W)[N,K].T   reduces K: X tiles along dim 1, W dim 1
dgrad  dX[T,K] = Q(G)[T,N]   @ Q(W)[N,K]     reduces N: G tiles along dim 1, W dim 0
wgrad  dW[N,K] = Q(G)[T,N].T @ Q(X)[T,K]     reduces T: G tiles along dim 0, X dim 0

T tokens, K input channels, N output channels, G = dL/dY.  "emulated" quantises and dequantises
each operand and multiplies in x.dtype; an operand in bf16 format passes unchanged.
Tensors are plain and 2-D: a DTensor's amax would hide an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_snip.formats import get_format
from megatron_snip.quant.dispatch import fake_quantize
from megatron_snip.quant.precision import LinearPrecision
from megatron_snip.quant.rounding import RoundingKey

#: gemm -> role -> reduction dim, as the table above.
REDUCTION_DIM = {
    "fprop": {"input": 1, "weight": 1},
    "dgrad": {"grad_output": 1, "weight": 0},
    "wgrad": {"grad_output": 0, "input": 0},
}


@dataclass(frozen=True)
class Operands:
    """What a linear multiplies, before quantisation: x [T,K], w [N,K], and in backward grad_output [T,N]."""

    x: Tensor
    w: Tensor
    grad_output: Tensor | None
    key: RoundingKey | None
    input_col0: int
    output_col0: int

    def quantized(self, gemm: str, role: str, fmt: str) -> Tensor:
        """One operand of one GEMM in a format, with this linear's own random bits; shape and dtype kept.

        A format that does not quantise gives the operand itself.  The weight's rows are output channels.
        """
        tensor = {"input": self.x, "weight": self.w, "grad_output": self.grad_output}[role]
        assert tensor is not None, "grad_output is known in backward only"
        form = get_format(fmt)
        if not form.quantised:
            return tensor
        key = self.key
        if key is not None and role in form.stochastic_roles:
            col0 = self.output_col0 if role == "grad_output" else self.input_col0
            key = key.for_operand(gemm, role, self.output_col0 if role == "weight" else None, col0)
        return fake_quantize(tensor, form, role=role, dim=REDUCTION_DIM[gemm][role], key=key)


class LinearObserver(Protocol):
    """Sees a linear's unquantised operands."""

    def backward(self, operands: Operands) -> None:
        """Called once per backward, before its GEMMs, recomputed or not."""


#: (x, w, precision, key, input_col0, output_col0, observer) -> y
LinearImplementation = Callable[
    [Tensor, Tensor, LinearPrecision, RoundingKey | None, int, int, LinearObserver | None], Tensor
]
_IMPLEMENTATIONS: dict[str, LinearImplementation] = {}


def quantized_linear(
    x: Tensor,
    w: Tensor,
    precision: LinearPrecision,
    *,
    key: RoundingKey | None,
    impl: str = "emulated",
    input_col0: int = 0,
    output_col0: int = 0,
    observer: LinearObserver | None = None,
) -> Tensor:
    """``x @ w.T`` with every GEMM in its format: x [T,K], w [N,K] -> y [T,N] of x.dtype, differentiable.

    key: of this linear (stream = ``name_stream(name)``), row0 = global row of x's first token; each
    operand's own key is derived from it.  It may be None where nothing rounds stochastically.
    input_col0, output_col0: global channel of x's and y's first column, for tensor-parallel shards.
    Raises ValueError for an unknown impl, shapes or dtypes that do not match, and a missing key.
    """
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"linear implementation {impl!r} is unknown; known: {', '.join(_IMPLEMENTATIONS)}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {list(x.shape)} and w {list(w.shape)} do not match; give x [T,K] and w [N,K]")
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype}, w is {w.dtype}; convert one of them")
    if key is None:
        _refuse_stochastic(precision, torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
    return _IMPLEMENTATIONS[impl](x, w, precision, key, input_col0, output_col0, observer)


def linear_implementations() -> list[str]:
    """Names that ``quantized_linear``'s impl takes."""
    return list(_IMPLEMENTATIONS)


def register_linear(name: str) -> Callable[[LinearImplementation], LinearImplementation]:
    """Decorator: add a linear implementation to the table.  Raises ValueError if the name is taken."""

    def add(implementation: LinearImplementation) -> LinearImplementation:
        if name in _IMPLEMENTATIONS:
            raise ValueError(f"linear implementation {name!r} is taken; choose another name")
        _IMPLEMENTATIONS[name] = implementation
        return implementation

    return add


@register_linear("emulated")
def emulated_linear(
    x: Tensor,
    w: Tensor,
    precision: LinearPrecision,
    key: RoundingKey | None,
    input_col0: int = 0,
    output_col0: int = 0,
    observer: LinearObserver | None = None,
) -> Tensor:
    """Quantise, dequantise, multiply in x.dtype: x [T,K], w [N,K] -> y [T,N].

    Other arguments as ``quantized_linear``.
    """
    y: Tensor = _Emulated.apply(x, w, precision, key, input_col0, output_col0, observer)
    return y


class _Emulated(torch.autograd.Function):
    """Keeps x and w alone for backward, which quantises them anew along its own dims."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        precision: LinearPrecision,
        key: RoundingKey | None,
        input_col0: int,
        output_col0: int,
        observer: LinearObserver | None,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.call = (precision, key, input_col0, output_col0, observer)
        operands = Operands(x, w, None, key, input_col0, output_col0)
        fmt = precision.fprop
        return operands.quantized("fprop", "input", fmt) @ operands.quantized("fprop", "weight", fmt).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        precision, key, input_col0, output_col0, observer = ctx.call
        operands = Operands(x, w, grads[0], key, input_col0, output_col0)
        if observer is not None:
            observer.backward(operands)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            fmt = precision.dgrad
            grad_x = operands.quantized("dgrad", "grad_output", fmt) @ operands.quantized("dgrad", "weight", fmt)
        if ctx.needs_input_grad[1]:
            fmt = precision.wgrad
            grad_w = operands.quantized("wgrad", "grad_output", fmt).T @ operands.quantized("wgrad", "input", fmt)
        return grad_x, grad_w, None, None, None, None, None


def _refuse_stochastic(precision: LinearPrecision, training: bool) -> None:
    """Without a key: raise ValueError now for any GEMM that would round stochastically later."""
    for gemm, dims in REDUCTION_DIM.items():
        fmt = get_format(getattr(precision, gemm))
        stochastic = sorted(fmt.stochastic_roles & dims.keys())
        if stochastic and (gemm == "fprop" or training):
            raise ValueError(
                f"{gemm} in {fmt.name} rounds {stochastic[0]} stochastically, key is None; give a RoundingKey"
            )
