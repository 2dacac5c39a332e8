"""The operands of a linear's three GEMMs: which form each is cast into, and casts that are kept.

fprop  Y[T,N]  = Q(X)[T,K]   @ Q(W)[N,K].T   reduces K: X tiles along dim 1, W dim 1
dgrad  dX[T,K] = Q(G)[T,N]   @ Q(W)[N,K]     reduces N: G tiles along dim 1, W dim 0
wgrad  dW[N,K] = Q(G)[T,N].T @ Q(X)[T,K]     reduces T: G tiles along dim 0, X dim 0

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
from megatron_snip.quant.cast import OPERANDS, Form, Output, Quantized, allocate, swiglu_product
from megatron_snip.quant.dispatch import ReduceAmax, cast, dequantize
from megatron_snip.quant.precision import LinearPrecision
from megatron_snip.quant.rounding import RoundingKey

#: gemm -> role -> reduction dim, as the table above.
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
    """Everything about one call of a linear but its tensors.

    key: of this linear, row0 = global row of x's first token.  input_col0, output_col0: global channel of
    x's and y's first column.  weight_casts: kept from call to call while the weight does not change.
    reduce_amax: by role, for operands that are shards.
    forward_only: another forward comes before the backward (recomputation), so nothing is cast for wgrad yet.
    """

    precision: LinearPrecision
    key: RoundingKey | None
    input_col0: int = 0
    output_col0: int = 0
    observer: LinearObserver | None = None
    weight_casts: Casts | None = None
    reduce_amax: Mapping[str, ReduceAmax] = MappingProxyType({})
    forward_only: bool = False

    def form(self, gemm: str, role: str, fmt: str | None = None) -> Form | None:
        """The form of an operand of a GEMM, in its own format by default; None stays as it is (bf16).

        A weight's rows are output channels, those of the others tokens.
        """
        form = _form(fmt or getattr(self.precision, gemm), gemm, role)
        if form is None or role not in form.fmt.stochastic_roles:
            return form
        assert self.key is not None, "quantized_linear refuses this call"
        col0 = self.output_col0 if role == "grad_output" else self.input_col0
        return form.with_key(self.key.for_operand(role, self.output_col0 if role == "weight" else None, col0))


@cache
def _form(name: str, gemm: str, role: str) -> Form | None:
    """The form of an operand but for its key; None for a format that does not quantise."""
    fmt = get_format(name)
    return Form(fmt, role, REDUCTION_DIM[gemm][role]) if fmt.quantised else None


@dataclass(frozen=True)
class Operands:
    """What a linear multiplies, before quantisation: x [T,K], w [N,K], and in backward grad_output [T,N].

    grad_input [T,K] and grad_weight() [N,K] are what dgrad and wgrad make of them, in the linear's own precision, where
    somebody needs them; the second is made when it is first asked for.  They are autograd's: nobody may write to them.
    """

    x: Tensor
    w: Tensor
    grad_output: Tensor
    call: LinearCall
    grad_input: Tensor | None = None
    grad_weight: Callable[[], Tensor] | None = None

    def quantized(self, gemm: str, role: str, fmt: str) -> Tensor:
        """One operand of one GEMM in a format, with this linear's own random bits; shape and dtype kept.

        A format that does not quantise gives the operand itself.
        """
        tensor = {"input": self.x, "weight": self.w, "grad_output": self.grad_output}[role]
        form = self.call.form(gemm, role, fmt)
        return (
            tensor
            if form is None
            else cast(tensor, [form], ["values"], None, self.call.reduce_amax.get(role))[0].values
        )

    def quantized_with_count(self, gemm: str, role: str, fmt: str) -> tuple[Tensor, Tensor]:
        """``quantized`` [R, C], and how many elements were beyond the largest value: int64 scalar.

        A float32 scale, or one that is rounded up, leaves no finite element beyond it.
        """
        tensor = {"input": self.x, "weight": self.w, "grad_output": self.grad_output}[role]
        form = self.call.form(gemm, role, fmt)
        if form is None or form.fmt.scale in ("fp32", "fp32_pow2", "e8m0_ceil"):
            return self.quantized(gemm, role, fmt), torch.zeros((), dtype=torch.int64, device=tensor.device)
        made = cast(tensor, [form], ["codes"], None, self.call.reduce_amax.get(role), count=True)[0]
        assert made.scales is not None and made.saturated is not None
        codes = Quantized(made.values, made.scales, form.fmt, form.block, made.tensor_scale)
        return dequantize(codes, tensor.dtype), made.saturated


#: A form, None for the tensor itself, and how it is to be held.
Wanted = tuple[Form | None, Output]


class Operand(NamedTuple):
    """One operand [R, C] of one GEMM as an implementation wants it.

    data: the tensor itself where form is None; values, codes or tensor-core bytes as ``Output`` says.
    scales: of codes and bytes, as cast.Cast has them; tensor_scale: float32 scalar that multiplies them.
    """

    form: Form | None
    output: Output
    data: Tensor
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None

    @classmethod
    def unset(cls, wanted: Wanted, x: Tensor) -> Operand:
        """For codes of x [R, C] that nobody will read: no cast, the same sizes, NaN for scales."""
        form, output = wanted
        assert form is not None
        made = allocate(x, form, output, count=False)
        assert made.scales is not None
        made.scales.fill_(torch.nan if made.scales.is_floating_point() else _NAN_BYTE)
        if made.tensor_scale is not None:
            made.tensor_scale.fill_(torch.nan)
        return cls(form, output, made.values, made.scales, made.tensor_scale)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantised [R, C] of a dtype; not for tensor-core bytes."""
        if self.form is None or self.output == "values":
            return self.data
        assert self.output == "codes" and self.scales is not None
        return dequantize(Quantized(self.data, self.scales, self.form.fmt, self.form.block, self.tensor_scale), dtype)


def cast_operands(
    x: Tensor,
    wanted: Sequence[Wanted],
    reduce_amax: ReduceAmax | None = None,
    dtype: torch.dtype | None = None,
    up: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Operand]:
    """``x`` [R, C], rounded to ``dtype`` first, in each wanted form, from one read where a kernel can; no gradient.

    up, amax: as ``dispatch.cast`` has them.
    """
    if torch.is_grad_enabled():  # not where a Function casts, for which this would be dear
        with torch.no_grad():
            return cast_operands(x, wanted, reduce_amax, dtype, up, amax)
    forms: list[Form] = []
    outputs: list[Output] = []
    for form, output in wanted:
        if form is not None:
            forms.append(form)
            outputs.append(output)
    if len(forms) < len(wanted):  # x itself is wanted
        x, up = x if up is None else swiglu_product(x, up), None
        x, dtype = x if dtype is None else x.to(dtype), None
    made = iter(cast(x, forms, outputs, amax, reduce_amax, dtype=dtype, up=up) if forms else ())
    operands = []
    for form, output in wanted:
        if form is None:
            operands.append(Operand(None, output, x))
        else:
            data, scales, _, whole = next(made)
            operands.append(Operand(form, output, data, scales, whole))
    return operands


class Casts:
    """Casts of one weight, each made once while it stays as it is: from one optimiser step to the next.

    A tensor that was replaced or changed in place is cast anew.

    frees: the tensor is a gathered copy, whose memory its owner allocates again to gather it again.
    """

    def __init__(self, *, frees: bool = False) -> None:
        self.frees = frees
        self._of: tuple[int, int, torch.Size, torch.dtype] | None = None
        self._tensor: Tensor | None = None  # kept alive, so that no other tensor can have its address
        self._made: dict[Wanted, Operand] = {}

    def clear(self) -> None:
        """Forget and free all casts."""
        self._of = self._tensor = None
        self._made.clear()

    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [part for made in self._made.values() for part in made if isinstance(part, Tensor)]

    def renewed(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``x`` [...] was replaced or changed since the last call or ``clear``; its casts then go."""
        of = _identity(x, dtype)
        if of == self._of:
            return False
        self.clear()
        self._of, self._tensor = of, x.detach()
        return True

    def free_tensor(self, x: Tensor, needed: Sequence[Wanted], dtype: torch.dtype) -> None:
        """Free the memory of ``x`` [R, C], as FSDP2 does, if all that is needed until ``clear`` has been made."""
        if all(form is not None and _shared(form, output) in self._made for form, output in needed):
            x.untyped_storage().resize_(0)
            self._of = _identity(x, dtype)

    def get(
        self,
        x: Tensor,
        wanted: Sequence[Wanted],
        dtype: torch.dtype,
        reduce_amax: ReduceAmax | None = None,
        *,
        for_now: bool = False,
    ) -> list[Operand]:
        """``x`` [R, C], rounded to ``dtype`` first, in each wanted form.

        for_now: codes that had to be made are kept, but given as values, made by the same read.
        """
        self.renewed(x, dtype)
        wanted = [_shared(*one) for one in wanted]
        if missing := [key for key in wanted if key not in self._made]:
            assert x.untyped_storage().size(), "free_tensor is called when nothing else will be cast"
            missing = list(dict.fromkeys(missing))
            codes: list[Wanted] = [key for key in missing if for_now and key[1] == "codes"]
            now: list[Wanted] = [(form, "values") for form, _ in codes]
            made = cast_operands(x, [*missing, *now], reduce_amax, dtype)
            self._made.update(zip(missing, made, strict=False))
            used = dict(zip(codes, made[len(missing) :], strict=True))
            return [used.get(key, self._made[key]) for key in wanted]
        return [self._made[key] for key in wanted]


def _identity(x: Tensor, dtype: torch.dtype) -> tuple[int, int, torch.Size, torch.dtype]:
    version = -1 if x.is_inference() else x._version  # inference tensors have none
    return x.data_ptr(), version, x.shape, dtype


@lru_cache(maxsize=256)
def _shared(form: Form | None, output: Output) -> Wanted:
    """Square blocks rounded to nearest are the same along both dims: one cast serves both."""
    if form is None:
        return None, "values"
    if output not in OPERANDS and form.key is None and form.block[0] == form.block[1] and not form.transformed:
        return dataclasses.replace(form, dim=1), output
    return form, output
