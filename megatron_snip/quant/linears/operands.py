"""The operands of a linear's three GEMMs: their forms, the backends that multiply them, and cached casts of weights.

fprop  Y[T,N]  = Q(X)[T,K]   @ Q(W)[N,K].T   sums over K: tiles along dim 1 of X and of W
dgrad  dX[T,K] = Q(G)[T,N]   @ Q(W)[N,K]     sums over N: tiles along dim 1 of G, dim 0 of W
wgrad  dW[N,K] = Q(G)[T,N].T @ Q(X)[T,K]     sums over T: tiles along dim 0 of G and of X

T tokens, K input channels, N output channels, G = dL/dY.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format, get_format
from megatron_snip.quant.casts.cast import OPERANDS, Form, Operand, Output, allocate
from megatron_snip.quant.casts.codes import Sent, in_pairs
from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.kernels.dispatch import ReduceAmax, cast, operand_of, values
from megatron_snip.quant.linears.precision import LinearPrecision

#: GEMM -> role -> reduction dim, as in the table above.
REDUCTION_DIM = {
    "fprop": {"input": 1, "weight": 1},
    "dgrad": {"grad_output": 1, "weight": 0},
    "wgrad": {"grad_output": 0, "input": 0},
}


_NAN_BYTE = 0xFF  # of E8M0 and of E4M3


class Sizes(NamedTuple):
    """Sizes of a linear on this rank: x [tokens, inputs], w [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int


class Backend(ABC):
    """One way to store and multiply quantised operands."""

    name: str  # printed at the start of a run
    takes_values = False  # whether it also takes values instead of codes; a cast makes both from one read

    def unfit_format(self, fmt: Format) -> str | None:
        """Why this backend cannot run GEMMs of a quantised format on any device, or None if it can."""
        return None

    def unfit_device(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, or None if it can."""
        return None

    def unfit_sizes(self, fmt: Format, sizes: Sizes) -> str | None:
        """Why it cannot run the GEMMs of a linear of these sizes in a format, or None if it can."""
        return None

    @abstractmethod
    def output(self, role: str, *, kept: bool) -> Output:
        """How to store an operand of a role.  kept: whether it lives until backward or longer, so memory matters."""

    @abstractmethod
    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """The product of a GEMM in dtype ``out``; operands that must be dequantised are converted to ``dtype``.

        a and b: fprop (X [T,K], W [N,K]), dgrad (G [T,N], W [N,K]), wgrad (G [T,N], X [T,K]).
        """


#: GEMM -> the backend that runs it, for one linear.
Backends = Mapping[str, Backend]


#: Sees a linear's unquantised operands, once per backward, after dgrad's GEMM and before wgrad's.
LinearObserver = Callable[["Operands"], None]


class LinearCall(NamedTuple):
    """Everything about one call of a linear except its tensors.

    key: the linear's own; its row0 is the global row of x's first token.
    input_col0, output_col0: the global channels of the first columns of x and y.
    weight_casts: caches the weight's casts across calls.  reduce_amax: by role, for operands that are shards.
    forward_only: recomputation will run forward again before backward, so forward casts nothing for wgrad.
    codes: the weight's casts by `weight_codes` if they were gathered in its place; the weight then has no memory.
    backends: empty until chosen; stays empty if the linear's implementation runs all three GEMMs itself.
    """

    precision: LinearPrecision
    key: RoundingKey | None
    input_col0: int = 0
    output_col0: int = 0
    observer: LinearObserver | None = None
    weight_casts: Casts | None = None
    reduce_amax: Mapping[str, ReduceAmax] = MappingProxyType({})
    forward_only: bool = False
    codes: Mapping[Form, Sent] = MappingProxyType({})
    backends: Backends = MappingProxyType({})

    def on(self, backends: Backends) -> LinearCall:
        """This call on these backends."""
        return LinearCall(*self[:-1], backends)  # faster than _replace

    def wanted(self, gemm: str, role: str, *, kept: bool = False) -> Form | None:
        """The form in which a GEMM's backend reads an operand.  kept: whether it lives until backward or longer."""
        return self.form(gemm, role, output=self.backends[gemm].output(role, kept=kept))

    def source(self, gemm: str, role: str, *, kept: bool = False) -> Form | None:
        """The form that an operand of a GEMM is recast from; None if it is cast from the tensor itself."""
        first = self.precision.sources.get((gemm, role))
        return None if first is None else self.wanted(first, role, kept=kept)

    def recast(self, gemm: str, role: str, made: Operand, dtype: torch.dtype) -> Operand:
        """The operand that a GEMM reads, from ``made``: ``made`` itself, or a new cast of its values in ``dtype``."""
        if (gemm, role) not in self.precision.sources:
            return made
        return cast(values(made, dtype), [self.wanted(gemm, role)], self.reduce_amax.get(role))[0]

    def cast_weight(self, w: Tensor, forms: Sequence[Form | None], dtype: torch.dtype) -> list[Operand]:
        """The weight w [N,K], rounded to ``dtype``, in these forms: cast, or laid out from the gathered codes."""
        if self.codes:
            pairs = [(form, _as_codes(form)) for form in forms if form is not None]
            assert len(pairs) == len(forms), "a weight that a GEMM multiplies in bf16 is gathered itself"
            return [operand_of(self.codes[codes], form, codes, dtype) for form, codes in pairs]
        assert w.untyped_storage().size(), "a copy is freed when nothing else will be cast"
        return cast(w, forms, self.reduce_amax.get("weight"), dtype=dtype)

    def form(self, gemm: str, role: str, fmt: str | None = None, output: Output = "values") -> Form | None:
        """The form of an operand of a GEMM, by default in the GEMM's own format; None if it is not cast (bf16).

        A weight's rows are output channels; the other operands' rows are tokens.
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
    fmt, dim = get_format(name), REDUCTION_DIM[gemm][role]
    if not fmt.quantised:
        return None
    if role == "weight" and fmt.shares_weight and output not in OPERANDS:
        dim = 1  # square blocks are the same along both dims, so one cast serves both
    return Form(fmt, role, dim, output=output)


def _as_codes(form: Form) -> Form:
    """The form of a weight's codes that this form of it is laid out from."""
    return Form(form.fmt, form.role, 1 if form.fmt.shares_weight else form.dim, output="codes")


@cache
def weight_codes(precision: LinearPrecision) -> tuple[Form, ...]:
    """The casts of a weight that fprop and dgrad read, as codes; () if it has to be there itself, or would be smaller.

    That is so if one of them multiplies the weight in bf16, rounds it stochastically or transforms it.
    """
    found: dict[Form, float] = {}
    for gemm in ("fprop", "dgrad"):
        if (gemm, "weight") in precision.sources:
            continue
        fmt, dim = get_format(getattr(precision, gemm)), REDUCTION_DIM[gemm]["weight"]
        if not fmt.quantised or fmt.stochastic("weight", dim) or fmt.transforms("weight", dim):
            return ()
        form = _as_codes(Form(fmt, "weight", dim))
        found[form] = (4 if in_pairs(form) else 8) + 32 / (form.block[0] * form.block[1])
    return tuple(found) if sum(found.values()) < get_format("bf16").bits_per_element else ()


@dataclass(frozen=True)
class Operands:
    """What a linear multiplies, before quantisation: x [T,K], w [N,K] and grad_output [T,N].

    grad_input [T,K] and grad_weight() [N,K] are the results of dgrad and wgrad in the linear's own precision, or None
    if autograd does not need them.  Autograd uses both, so do not write to them.
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

    def quantized(self, gemm: str, role: str, fmt: str) -> tuple[Tensor, Tensor]:
        """One operand of one GEMM, quantised and dequantised with this linear's random bits, in its shape and dtype.

        The second value, an int64 scalar, is the number of elements beyond the format's largest value.  It is 0 with
        float32 scales and scales that are rounded up.  A format that does not quantise returns the operand itself.
        """
        tensor, form = self._read(gemm, role, fmt), self.call.form(gemm, role, fmt, "codes")
        exact = form is None or not form.fmt.saturates
        if exact:
            form = self.call.form(gemm, role, fmt)
        made = cast(tensor, [form], self.call.reduce_amax.get(role), count=not exact)[0]
        if made.saturated is None:
            return made.data, torch.zeros((), dtype=torch.int64, device=tensor.device)
        return values(made, tensor.dtype), made.saturated

    def _read(self, gemm: str, role: str, fmt: str) -> Tensor:
        """What a GEMM's cast reads in a linear that is all in one format: the tensor, or the values of another cast."""
        first = LinearPrecision.uniform(fmt).sources.get((gemm, role))
        return self.tensor(role) if first is None else self.quantized(first, role, fmt)[0]


def unset(form: Form, x: Tensor) -> Operand:
    """A placeholder for a cast of x [R, C] that is never read: the same shapes, undefined codes, NaN scales."""
    made = allocate(x, form, count=False)
    assert made.scales is not None
    made.scales.fill_(torch.nan if made.scales.is_floating_point() else _NAN_BYTE)
    if made.tensor_scale is not None:
        made.tensor_scale.fill_(torch.nan)
    return made


class Casts:
    """Caches the casts of one weight until it is replaced or changed in place.

    frees: whether the weight is a gathered copy that may be freed; its owner reallocates it for the next gather.
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
        """All cached tensors."""
        return [part for made in self._made.values() for part in made if isinstance(part, Tensor)]

    def renewed(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Forget the casts if ``x`` [...] was replaced or changed since the last call; return whether it was."""
        of = _identity(x, dtype)
        if of == self._of:
            return False
        self.clear()
        self._of, self._tensor = of, x.detach()
        return True

    def operand(self, w: Tensor, gemm: str, call: LinearCall, dtype: torch.dtype, *, training: bool = False) -> Operand:
        """The weight w [N,K] as an operand of one of the call's GEMMs, rounded to ``dtype`` first.

        One read makes all missing casts: codes to keep and values for this GEMM, or in training the tensor-core
        operands of fprop and dgrad.  A gathered copy that no other GEMM will read is then freed, as FSDP2 does.
        """
        self.renewed(w, dtype)
        again = ("dgrad", "weight") in call.precision.sources
        if again and gemm == "dgrad":
            return call.recast("dgrad", "weight", self.operand(w, "fprop", call, dtype), dtype)
        kept = call.weight_casts is self
        wanted = [call.wanted(gemm, "weight", kept=kept)]
        if training and kept and not again and wanted[0] is not None and wanted[0].output in OPERANDS:
            other = call.wanted("dgrad", "weight", kept=kept)
            wanted += [other] if other is not None and other.output == wanted[0].output else []
        now, made, values_too = wanted[0], [], []
        if missing := [form for form in wanted if form not in self._made]:
            missing = list(dict.fromkeys(missing))
            casts_codes = now is not None and now in missing and now.output == "codes" and not call.codes
            if now is not None and casts_codes and call.backends[gemm].takes_values:
                values_too = [now.held("values")]
            made = call.cast_weight(w, [*missing, *values_too], dtype)
            self._made.update(zip(missing, made, strict=False))
        operand = made[-1] if values_too else self._made[now]
        gathered = [sent.data for sent in call.codes.values()] or [w]
        gathered = [one for one in gathered if self.frees and one.untyped_storage().size()]
        if gathered and call.observer is None and (training or gemm == "dgrad"):
            needed = [call.wanted(one, "weight", kept=kept) for one in ("fprop", "dgrad")[: 1 if again else 2]]
            if all(form is not None and form in self._made for form in needed):
                read = {made.data.untyped_storage()._cdata for made in self._made.values()}
                for one in gathered:
                    if one.untyped_storage()._cdata not in read:
                        one.untyped_storage().resize_(0)
                self._of = _identity(w, dtype)
        return operand


def _identity(x: Tensor, dtype: torch.dtype) -> tuple[int, int, torch.Size, torch.dtype]:
    version = -1 if x.is_inference() else x._version  # inference tensors have none
    return x.data_ptr(), version, x.shape, dtype
