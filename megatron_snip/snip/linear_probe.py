"""The observer of one linear: what its backward passes show of every candidate format.

Per microbatch, X [T,K], W [N,K], G [T,N], and for each format f the operands that f would multiply:

    fprop  s_t = <(G E_W)_t, Q(X)_t> + <(G W)_t, (E_X)_t>  = sum_n G[t,n] dY[t,n],   dY = Q(X) Q(W)^T - X W^T
           (q, k, v: what dY does to the attention's output, see attention_probe.py)
    wgrad  E_w = Q(G)^T Q(X) - G^T X                       [N,K], summed over microbatches
    dgrad  E_d = Q(G) Q(W) - G W                           [T,K], in the residual stream's size where a norm was

E_A = Q(A) - A.  The fprop form has no difference of nearly equal products, so GEMMs run in the compute dtype.
T tokens, K input and N output channels.  Source: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.mesh import Axis
from megatron_snip.quant import GEMMS, Operands
from megatron_snip.quant.hadamard import hadamard
from megatron_snip.quant.operands import REDUCTION_DIM
from megatron_snip.snip.attention_probe import READ, READER, AttentionProbe
from megatron_snip.snip.residual import ResidualProbe

#: Names of the six quantised operands, as statistics name them: "fprop/input", ...
OPERANDS = tuple(f"{gemm}/{role}" for gemm in GEMMS for role in REDUCTION_DIM[gemm])
#: Tensors whose Frobenius norms are measured.
NORMS = ("X", "W", "Y", "G", "dX", "dW")


@dataclass(frozen=True)
class Place:
    """Where a linear stands.

    How tp splits it, on how many dp processes it is, the norm that gave its input if any, the attention that it belongs
    to if any, and ``scatter``, which sums a gradient-sized tensor over dp and gives the part of it that this process's
    optimiser holds.
    """

    axis: Axis
    column_parallel: bool
    dp: int
    norm: ResidualProbe | None
    attention: AttentionProbe | None
    scatter: Callable[[Tensor], Tensor]


class Sums:
    """Named sums of one linear over microbatches, kept on the device until they are read once."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, share: float = 1.0) -> None:
        """Add a scalar; share 0 where another process along tp counts it."""
        value = value.double() * share
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def copy(self, name: str, to: str) -> None:
        """Another name for a sum."""
        self._sums[to] = self._sums[name]

    def read(self) -> dict[str, float]:
        """All sums by name, in one transfer."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))


def _row_sums(x: Tensor) -> Tensor:
    """Sums over the channels of x [T,C]: float32 [T]."""
    return x.sum(dim=1, dtype=torch.float32)


def _known(errors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {fmt: error for fmt, error in errors.items() if error is not None}


def _weight_is_shared(fmt: str) -> bool:
    """Whether fprop and dgrad see the same quantised weight: square blocks, rounded to nearest."""
    form = get_format(fmt)
    return form.block_shape("weight", 0) == form.block_shape("weight", 1) and "weight" not in form.stochastic_roles


def _count_nonzero(x: Tensor) -> Tensor:
    """How many elements of x [...] are not zero: int64 scalar.  Of floats the bits are counted, which is faster."""
    bits = x.view({4: torch.int32, 2: torch.int16}[x.element_size()])
    return torch.count_nonzero(bits + bits)  # without the sign: a negative zero is one


def square(x: Tensor) -> Tensor:
    """Squared Frobenius norm of x [...], float64 scalar; rows in float32, of which a CPU adds up no more well."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).double().square().sum()


class LinearProbe:
    """Sums what one linear's backward passes show.

    ``sums`` holds scalars; ``token_sums`` one number a token and format, partial along tp until ``reduced``;
    ``weight_error`` E_w of each format, float32, this process's part of [N,K].  With ``loss_only`` no more than
    token_sums is computed.
    """

    def __init__(self, kind: str, formats: Sequence[str], place: Place, *, loss_only: bool = False) -> None:
        self.kind = kind  # the end of its name, such as q_proj
        self.place, self.formats, self.loss_only = place, list(formats), loss_only
        self.sums = Sums()
        self.token_sums: dict[str, list[Tensor]] = {fmt: [] for fmt in formats}
        self.weight_error: dict[str, Tensor] = {}
        # along tp a tensor is either whole on every process, and counted once, or cut into shards
        once = 1.0 if place.axis.is_first else 0.0
        column = place.column_parallel
        # and a weight is the same on all of dp and in every microbatch
        self._share = {
            "input": once if column else 1.0,
            "weight": 1.0 / place.dp,
            "grad_output": 1.0 if column else once,
        }
        self._seen = False
        self._nonzero: dict[str, Tensor] = {}
        self._dgrad_share = once if column else 1.0

    @torch.no_grad()
    def backward(self, operands: Operands) -> None:
        """Add one microbatch."""
        x, w, g, attention = operands.x, operands.w, operands.grad_output, self.place.attention
        assert str(operands.call.precision) == "bf16", "products of the pass itself are the exact ones"
        dx = g @ w if operands.grad_input is None else operands.grad_input
        if not self.loss_only:
            self._add_norms(x, w, g)
            self._add_dgrad("signal", dx, operands)
        output = x @ w.T if attention is not None and self.kind in READ else None
        errors = {fmt: self._add_errors(fmt, operands, dx, output) for fmt in self.formats}
        if attention is not None and self.formats:
            assert operands.call.key is not None, "the key tells the microbatch"
            row0 = operands.call.key.row0
            if self.kind == READER:
                attention.reader(row0, x, dx)
            elif output is not None:
                attention.output(row0, self.kind, output, _known(errors), self.token_sums)
            del output, errors
        if not self.loss_only:
            del dx
            # only now: casts of W are as large, and gone
            grad_w = g.T @ x if operands.grad_weight is None else operands.grad_weight()
            for fmt in self.formats:
                self._add_weight_error(fmt, operands, grad_w)
        self._seen = True

    def _add_errors(self, fmt: str, operands: Operands, dx: Tensor, output: Tensor | None) -> Tensor | None:
        """The norm of dgrad's error, and fprop's error token by token.

        Of a linear that is judged behind the attention, fprop's error of its ``output`` [T,N] is returned instead.
        """
        shared = _weight_is_shared(fmt)
        if not (shared or self.loss_only):
            qw, w = self._cast(operands, "dgrad", "weight", fmt)
            self._add_dgrad_error(fmt, operands, dx, qw)
            self._add_error(f"{fmt}/dgrad/weight", qw, w, in_place=True)
            del qw
        qw, w = self._cast(operands, "fprop", "weight", fmt)
        if shared and not self.loss_only:
            self._add_dgrad_error(fmt, operands, dx, qw)
        qx, x = self._cast(operands, "fprop", "input", fmt)
        error = (qx @ qw.T).sub_(output) if output is not None else None
        if not (self.loss_only and output is not None):
            # in the cast's own place: a weight's copies are what a probe's memory is made of
            e_w = self._add_error(f"{fmt}/fprop/weight", qw, w, in_place=True)
            e_x = self._add_error(f"{fmt}/fprop/input", qx, x)
            if output is None:  # products are rounded to the compute dtype, which does not show in a long sum of them
                of_weight, of_input = (operands.grad_output @ e_w).mul_(qx), e_x.mul_(dx)
                self.token_sums[fmt].append(_row_sums(of_weight).add_(_row_sums(of_input)))
        if shared and not self.loss_only:
            for kind in ("error", "nonzero", "underflow", "saturated"):
                self.sums.copy(f"{kind}/{fmt}/fprop/weight", f"{kind}/{fmt}/dgrad/weight")
        return error

    def _add_dgrad_error(self, fmt: str, operands: Operands, dx: Tensor, qw: Tensor) -> None:
        """The norm of dgrad's error with its weight in a format, ``qw`` [N,K]."""
        qg, g = self._cast(operands, "dgrad", "grad_output", fmt)
        self._add_error(f"{fmt}/dgrad/grad_output", qg, g)
        self._add_dgrad(f"error/{fmt}", (qg @ qw).sub_(dx), operands)

    def _add_weight_error(self, fmt: str, operands: Operands, grad_w: Tensor) -> None:
        """wgrad's error, summed over microbatches."""
        qg, g = self._cast(operands, "wgrad", "grad_output", fmt)
        self._add_error(f"{fmt}/wgrad/grad_output", qg, g)
        qx, x = self._cast(operands, "wgrad", "input", fmt)
        self._add_error(f"{fmt}/wgrad/input", qx, x)
        # scattered at once, so that what stays until the end is in the optimiser's sharding
        error = self.place.scatter((qg.T @ qx).float().sub_(grad_w))
        if fmt in self.weight_error:
            self.weight_error[fmt].add_(error)
        else:
            self.weight_error[fmt] = error

    def _add_norms(self, x: Tensor, w: Tensor, g: Tensor) -> None:
        for name, role, tensor in (("X", "input", x), ("G", "grad_output", g)):
            self.sums.add(f"norm/{name}", square(tensor), self._share[role])
        self._nonzero = {"input": _count_nonzero(x), "grad_output": _count_nonzero(g)}
        self.sums.add("elements/G", torch.tensor(float(g.numel()), device=g.device), self._share["grad_output"])
        if not self._seen:
            self.sums.add("norm/W", square(w), self._share["weight"])
            self._nonzero["weight"] = _count_nonzero(w)

    def _counts(self, operand: str) -> bool:
        """Whether an operand's scalars are to be summed now: a weight's once."""
        return not (self.loss_only or (operand.endswith("/weight") and self._seen))

    def _cast(self, operands: Operands, gemm: str, role: str, fmt: str) -> tuple[Tensor, Tensor]:
        """An operand in a format and as it was; counts the elements lost at both ends."""
        q, saturated = operands.quantized_with_count(gemm, role, fmt)
        form = operands.call.form(gemm, role, fmt)
        exact = {"input": operands.x, "weight": operands.w, "grad_output": operands.grad_output}[role]
        nonzero = self._nonzero.get(role)
        if form is not None and form.transformed:
            exact = hadamard(exact)
            nonzero = _count_nonzero(exact)
        if self._counts(operand := f"{fmt}/{gemm}/{role}"):
            assert nonzero is not None
            share = self._share[role]
            self.sums.add(f"nonzero/{operand}", nonzero, share)
            # what is not zero was not zero before
            self.sums.add(f"underflow/{operand}", nonzero - _count_nonzero(q), share)
            self.sums.add(f"saturated/{operand}", saturated, share)
        return q, exact

    def _add_error(self, operand: str, q: Tensor, exact: Tensor, *, in_place: bool = False) -> Tensor:
        """Counts and gives the error of what `_cast` gave."""
        error = q.sub_(exact) if in_place else q - exact
        if self._counts(operand):
            self.sums.add(f"error/{operand}", square(error), self._share[operand.rpartition("/")[2]])
        return error

    def _add_dgrad(self, name: str, dx: Tensor, operands: Operands) -> None:
        """|dX|_F^2, of a linear behind a norm in the residual stream's size: dx [T,K], partial if column-parallel."""
        if self.place.column_parallel and self.place.axis.size > 1:
            dx = dx.to(torch.float32, copy=True)  # the caller's own is needed in parts
            dist.all_reduce(dx, group=self.place.axis.group)
        if name == "signal":
            self.sums.add("norm/dX", square(dx), self._dgrad_share)
        if self.place.norm is None:
            self.sums.add(f"dgrad/{name}", square(dx), self._dgrad_share)
            return
        assert operands.call.key is not None, "the key tells the microbatch"
        self.sums.add(f"dgrad/{name}", self.place.norm.residual_square(dx, operands.call.key.row0), self._dgrad_share)
