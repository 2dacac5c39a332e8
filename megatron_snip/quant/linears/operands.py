"""The operands of a linear's three GEMMs: the form of each, and the casts of weights that are kept.

fprop  Y[T,N]  = Q(X)[T,K]   @ Q(W)[N,K].T   sums over K: tiles along dim 1 of X and of W
dgrad  dX[T,K] = Q(G)[T,N]   @ Q(W)[N,K]     sums over N: tiles along dim 1 of G, dim 0 of W
wgrad  dW[N,K] = Q(G)[T,N].T @ Q(X)[T,K]     sums over T: tiles along dim 0 of G and of X

T tokens, K input channels, N output channels, G = dL/dY.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.quant.casts.cast import OPERANDS, Form, Operand, Output, allocate
from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.kernels.dispatch import ReduceAmax, cast, values
from megatron_snip.quant.linears.precision import LinearPrecision

#: GEMM -> role -> reduction dim, as in the table above.
REDUCTION_DIM = {
    "fprop": {"input": 1, "weight": 1},
    "dgrad": {"grad_output": 1, "weight": 0},
    "wgrad": {"grad_output": 0, "input": 0},
}


_NAN_BYTE = 0xFF  # of E8M0 and of E4M3


class LinearObserver(Protocol):
    """Sees a linear's unquantised operands."""

    def backward(self, operands: Operands) -> None:
        """Called once per backward, after dgrad's GEMM and before wgrad's, recomputed or not."""


class LinearCall(NamedTuple):
    """Everything about one call of a linear except its tensors.

    key: the linear's own; its row0 is the global row of x's first token.  input_col0, output_col0: the global channels
    of the first columns of x and y.  weight_casts: casts of the weight, kept from call to call until it changes.
    reduce_amax: by role, for operands that are shards.
    forward_only: recomputation will run forward again before backward, so forward casts nothing for wgrad yet.
    """

    precision: LinearPrecision
    key: RoundingKey | None
    input_col0: int = 0
    output_col0: int = 0
    observer: LinearObserver | None = None
    weight_casts: Casts | None = None
    reduce_amax: Mapping[str, ReduceAmax] = MappingProxyType({})
    forward_only: bool = False

    def form(self, gemm: str, role: str, fmt: str | None = None, output: Output = "values") -> Form | None:
        """The form of an operand of a GEMM, by default in the GEMM's own format; None stays as it is (bf16).

        A weight's rows are output channels, those of the other operands tokens.
        """
        form = _form(fmt or getattr(self.precision, gemm), gemm, role, output)
        if form is None or not form.fmt.stochastic(role, form.dim):
            return form
        assert self.key is not None, "quantized_linear refuses this call"
        col0 = self.output_col0 if role == "grad_output" else self.input_col0
        return form.with_key(self.key.for_operand(role, self.output_col0 if role == "weight" else None, col0))


@cache
def _form(name: str, gemm: str, role: str, output: Output) -> Form | None:
    """The form of an operand without its key; None for a format that does not quantise."""
    fmt = get_format(name)
    return Form(fmt, role, REDUCTION_DIM[gemm][role], output=output) if fmt.quantised else None


@dataclass(frozen=True)
class Operands:
    """What a linear multiplies, before quantisation: x [T,K], w [N,K] and grad_output [T,N].

    grad_input [T,K] and grad_weight() [N,K] are the results of dgrad and wgrad in the linear's own precision, or None
    if autograd does not need them.  The first call of grad_weight computes it.  Autograd uses both: do not write to
    them.
    """

    x: Tensor
    w: Tensor
    grad_output: Tensor
    call: LinearCall
    grad_input: Tensor | None = None
    grad_weight: Callable[[], Tensor] | None = None

    def tensor(self, role: str) -> Tensor:
        """The unquantised operand of a role: [T,K], [N,K] or [T,N]."""
        return {"input": self.x, "weight": self.w, "grad_output": self.grad_output}[role]

    def quantized(self, gemm: str, role: str, fmt: str) -> Tensor:
        """One operand of one GEMM, quantised and dequantised with this linear's random bits: its shape and dtype.

        A format that does not quantise gives the operand itself.
        """
        tensor, form = self.tensor(role), self.call.form(gemm, role, fmt)
        return cast(tensor, [form], self.call.reduce_amax.get(role))[0].data

    def quantized_with_count(self, gemm: str, role: str, fmt: str) -> tuple[Tensor, Tensor]:
        """``quantized`` [R, C], and the number of elements beyond the format's largest value: int64 scalar.

        Float32 scales, and scales that are rounded up, leave no finite element beyond it.
        """
        form = self.call.form(gemm, role, fmt, "codes")
        if form is None or form.fmt.scale in ("fp32", "fp32_pow2", "e8m0_ceil"):
            return self.quantized(gemm, role, fmt), torch.zeros((), dtype=torch.int64, device=self.x.device)
        tensor = self.tensor(role)
        made = cast(tensor, [form], self.call.reduce_amax.get(role), count=True)[0]
        assert made.saturated is not None
        return values(made, tensor.dtype), made.saturated


def unset(form: Form, x: Tensor) -> Operand:
    """A stand-in for a cast of x [R, C] that nobody will read: the same sizes, undefined codes, NaN for scales."""
    made = allocate(x, form, count=False)
    assert made.scales is not None
    made.scales.fill_(torch.nan if made.scales.is_floating_point() else _NAN_BYTE)
    if made.tensor_scale is not None:
        made.tensor_scale.fill_(torch.nan)
    return made


class Casts:
    """Casts of one weight, each made once between two optimiser steps.

    If the tensor is replaced or changed in place, it is cast again.
    frees: the tensor is a gathered copy.  Its owner allocates its memory again when it gathers it again.
    """

    def __init__(self, *, frees: bool = False) -> None:
        self.frees = frees
        self._of: tuple[int, int, torch.Size, torch.dtype] | None = None
        self._tensor: Tensor | None = None  # kept alive, so that no other tensor gets its address
        self._made: dict[Form | None, Operand] = {}

    def clear(self) -> None:
        """Forget and free all casts."""
        self._of = self._tensor = None
        self._made.clear()

    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [part for made in self._made.values() for part in made if isinstance(part, Tensor)]

    def renewed(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``x`` [...] was replaced or changed since the last call or ``clear``; if so, forget its casts."""
        of = _identity(x, dtype)
        if of == self._of:
            return False
        self.clear()
        self._of, self._tensor = of, x.detach()
        return True

    def free_tensor(self, x: Tensor, needed: Sequence[Form | None], dtype: torch.dtype) -> None:
        """Free the memory of ``x`` [R, C], as FSDP2 does, if all casts that are needed before ``clear`` are here."""
        if all(form is not None and _shared(form) in self._made for form in needed):
            x.untyped_storage().resize_(0)
            self._of = _identity(x, dtype)

    def get(
        self,
        x: Tensor,
        wanted: Sequence[Form | None],
        dtype: torch.dtype,
        reduce_amax: ReduceAmax | None = None,
        *,
        for_now: bool = False,
    ) -> list[Operand]:
        """``x`` [R, C], rounded to ``dtype`` first, in each wanted form.

        for_now: for codes that are not here yet, return values, which the same read makes; the codes are kept.
        """
        self.renewed(x, dtype)
        wanted = [None if form is None else _shared(form) for form in wanted]
        if not (missing := [form for form in wanted if form not in self._made]):
            return [self._made[form] for form in wanted]
        missing = list(dict.fromkeys(missing))
        assert x.untyped_storage().size(), "free_tensor is called when nothing else will be cast"
        codes = [form for form in missing if for_now and form is not None and form.output == "codes"]
        made = cast(x, [*missing, *(form.held("values") for form in codes)], reduce_amax, dtype=dtype)
        self._made.update(zip(missing, made, strict=False))
        used = dict(zip(codes, made[len(missing) :], strict=True))
        return [used[form] if form in used else self._made[form] for form in wanted]


def _identity(x: Tensor, dtype: torch.dtype) -> tuple[int, int, torch.Size, torch.dtype]:
    version = -1 if x.is_inference() else x._version  # inference tensors have none
    return x.data_ptr(), version, x.shape, dtype


@lru_cache(maxsize=256)
def _shared(form: Form) -> Form:
    """Square blocks that are rounded to nearest are the same along both dims, so one cast serves both."""
    square = form.block[0] == form.block[1]
    if square and form.output not in OPERANDS and form.key is None and not form.transformed:
        return dataclasses.replace(form, dim=1)
    return form
