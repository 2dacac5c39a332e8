"""The observer of one linear: measures every candidate format during its backward passes.

Per microbatch, X [T,K], W [N,K], G [T,N], and for each format f the operands that f would multiply:

    fprop  s_t = <(G E_W)_t, Q(X)_t> + <(G W)_t, (E_X)_t>  = sum_n G[t,n] dY[t,n],   dY = Q(X) Q(W)^T - X W^T
           (q, k, v: the effect of dY on the attention's output, see block_probe.py)
    wgrad  E_w = Q(G)^T Q(X) - G^T X                       [N,K], summed over microbatches

E_A = Q(A) - A.  The fprop form has no difference of nearly equal products, so GEMMs run in the compute dtype.
For large weights, E_w is kept for every ``row_step``-th output channel; it is most of the memory that a probe adds.
T tokens, K input and N output channels.  Source: docs/numerics.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.mesh import Mesh
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape, Operands
from megatron_snip.quant.kernels.dispatch import transformed
from megatron_snip.quant.linears.matmul import matmul
from megatron_snip.quant.linears.operands import REDUCTION_DIM
from megatron_snip.snip.measure.updates import Updates, square

#: Names of the six quantised operands in statistics: "fprop/input", ...
OPERANDS = tuple(f"{gemm}/{role}" for gemm in GEMMS for role in REDUCTION_DIM[gemm])
#: Number of a weight's output channels that suffices to measure wgrad's error.
ENOUGH_ROWS = 256
_OF_AN_OPERAND = ("error", "nonzero", "underflow", "saturated")


def row_step(out_features: int) -> int:
    """Step between the output channels of a weight whose wgrad error is measured; the same on every layout."""
    return max(1, out_features // ENOUGH_ROWS)


class Sums:
    """Named sums of one linear over microbatches, kept on the device and read once."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, share: float = 1.0) -> None:
        """Add a scalar; share 0 if another tp rank counts it."""
        value = value.double() * share
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def most(self, name: str, value: Tensor) -> None:
        """Keep the largest of some scalars under a name."""
        value = value.double()
        self._sums[name] = torch.maximum(self._sums[name], value) if name in self._sums else value

    def copy(self, name: str, to: str) -> None:
        """Copy a sum to another name."""
        self._sums[to] = self._sums[name]

    @property
    def names(self) -> set[str]:
        """Names of all sums."""
        return set(self._sums)

    def read(self, names: Sequence[str]) -> Tensor:
        """These sums, float64 [len(names)] on the device."""
        return torch.stack([self._sums[name] for name in names])


def _operands(*, updates: bool) -> list[str]:
    """The operands that a probe casts."""
    return [operand for operand in OPERANDS if updates or operand.startswith("fprop")]


def names_of_sums(formats: Sequence[str], *, updates: bool) -> set[str]:
    """Names of all sums of a linear's probe."""
    names = {"norm/X", "norm/W", *(["norm/G", "update"] if updates else [])}
    for fmt in formats:
        names |= {f"token/{fmt}", f"spread/{fmt}", f"top_token/{fmt}", *([f"own/{fmt}"] if updates else [])}
        for operand in _operands(updates=updates):
            names |= {f"{kind}/{fmt}/{operand}" for kind in _OF_AN_OPERAND}
    return names


def _row_sums(x: Tensor) -> Tensor:
    """Sums over the channels of x [T,C]: float32 [T]."""
    return x.sum(dim=1, dtype=torch.float32)


def _fprop_cast(fmt: str, role: str) -> tuple[object, ...]:
    """Everything that decides how fprop casts an operand to a format."""
    whole = get_format(fmt)
    transform = whole.hadamard if whole.transforms(role, 1) else None
    return whole.of(role).element, whole.scale, whole.block_shape(role, 1), whole.stochastic(role, 1), transform


def _casting_alike(formats: Sequence[str]) -> list[list[list[str]]]:
    """Groups of formats that cast fprop's input alike, and in each, groups that cast its weight alike too."""
    groups: dict[object, dict[object, list[str]]] = {}
    for fmt in formats:
        group = groups.setdefault(_fprop_cast(fmt, "input"), {})
        group.setdefault(_fprop_cast(fmt, "weight"), []).append(fmt)
    return [list(group.values()) for group in groups.values()]


def _count_nonzero(x: Tensor) -> Tensor:
    """Number of nonzero elements of x [...], int64 scalar.  Counts on the bits of floats, which is faster."""
    bits = x.view({4: torch.int32, 2: torch.int16}[x.element_size()])
    return torch.count_nonzero(bits + bits)  # shifts out the sign, so that negative zero counts as zero


@dataclass(frozen=True)
class Shown:
    """A microbatch's fprop errors by format: token sums [T], partial over tp.

    For q, k and v instead the output [T,N] and its errors [T,N], to be judged at the attention's output.  For o also
    its input, the attention's output [T,K], and the gradient of that [T,K].  Formats that fprop casts alike share one
    tensor.
    """

    token_sums: dict[str, Tensor]
    output: Tensor | None = None
    errors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    read: Tensor | None = None
    read_grad: Tensor | None = None


class LinearProbe:
    """Accumulates the measurements of one linear in ``sums``; ``weight_error`` is E_w per format, in some rows.

    split_dim: the dimension of the weight that tp splits, output channels (0) or input channels (1).
    Without ``updates``, only fprop's operands are cast and there is no E_w, which is most of the memory that a probe
    adds.
    """

    def __init__(
        self, shape: LinearShape, formats: Sequence[str], mesh: Mesh, split_dim: int, device: torch.device,
        *, updates: bool = True,
    ) -> None:  # fmt: skip
        self.shape, self.formats, self.device = shape, list(formats), device
        self._replicate, self._shard = mesh.replicate, mesh.shard
        self.sums = Sums()
        self._alike = _casting_alike(self.formats)
        # along tp, a tensor is either replicated, and counted once, or sharded
        once = 1.0 if mesh.tp.is_first else 0.0
        column = split_dim == 0
        # a weight is the same on all of dp and cp and in every microbatch
        self._share = {
            "input": once if column else 1.0,
            "weight": 1.0 / mesh.dp_cp.size,
            "grad_output": 1.0 if column else once,
        }
        self._seen = False
        self._nonzero: dict[str, Tensor] = {}
        n = shape.out_features // (mesh.tp.size if column else 1)
        k = shape.in_features // (1 if column else mesh.tp.size)
        self._step = row_step(shape.out_features)
        first = -(mesh.tp.rank * n if column else 0) % self._step
        self._rows = range(first, n, self._step)  # among this rank's output channels
        self._local_rows = n
        # allocated now, so that a lack of memory shows before the pass starts
        self.updates = updates
        self.weight_error = {
            fmt: torch.zeros(len(self._rows), k, device=device) for fmt in (self.formats if updates else ())
        }

    @torch.no_grad()
    def measure(self, operands: Operands) -> Shown:
        """Measure one microbatch."""
        x, w, g = operands.x, operands.w, operands.grad_output
        assert str(operands.call.precision) == "bf16", "products of the pass itself are the exact ones"
        dx = matmul(g, w) if operands.grad_input is None else operands.grad_input
        self._add_norms(x, w, g)
        judged_behind = self.shape.kind in ("q", "k", "v")
        output = matmul(x, w.T) if judged_behind and self.formats else None
        found: dict[str, Tensor] = {}
        for alike in self._alike:
            found |= self._fprop_errors(alike, operands, dx, output)
        if self.updates:  # only now, because casts of W are as large, and freed by now
            rows = slice(self._rows.start, None, self._step)
            if self._step == 1 and operands.grad_weight is not None:
                exact = operands.grad_weight()  # the pass's own
            else:
                exact = matmul(g[:, rows].T, x)
            for fmt in self.formats:
                self._add_backward_errors(fmt, operands, exact)
        self._seen = True
        if judged_behind:
            return Shown({}, output, found)
        if self.shape.kind == "o":
            return Shown(found, read=x, read_grad=dx)
        return Shown(found)

    def collectives(self, cut: Collection[str]) -> int:
        """Number of amax reductions over tp per microbatch.  ``cut``: roles whose tensors tp shards."""
        tensors = [fmt for fmt in self.formats if get_format(fmt).needs_tensor_amax]
        roles = [operand.rpartition("/")[2] for operand in _operands(updates=self.updates)]
        shared = sum(get_format(fmt).shares_weight for fmt in tensors) * ("weight" in cut) * self.updates
        for alike in self._alike:
            if alike[0][0] in tensors:
                shared += (sum(map(len, alike)) - 1) * ("input" in cut)
                shared += sum(len(same) - 1 for same in alike) * ("weight" in cut)
        recast = [role for fmt in tensors for _, role in LinearPrecision.uniform(fmt).sources] if self.updates else []
        return len(tensors) * sum(role in cut for role in roles) + sum(role in cut for role in recast) - shared

    def _fprop_errors(
        self, alike: Sequence[Sequence[str]], operands: Operands, dx: Tensor, output: Tensor | None
    ) -> dict[str, Tensor]:
        """fprop's error per token [T]; or, given the ``output`` [T,N], the error of that [T,N].

        alike: formats that cast the input alike, which is done once, in groups that cast the weight alike too and so
        share an error.
        """
        first = alike[0][0]
        qx, x = self._cast(operands, "fprop", "input", first)
        found: dict[str, Tensor] = {}
        for fmt, *others in alike:
            qw, w = self._cast(operands, "fprop", "weight", fmt)
            error = matmul(qx, qw.T).sub_(output) if output is not None else None
            # in place of the weight cast: copies of a weight dominate a probe's memory
            e_w = self._add_error(f"{fmt}/fprop/weight", qw, w)
            if error is None:  # products are rounded to the compute dtype, which is negligible in a long sum
                error = _row_sums(matmul(operands.grad_output, e_w).mul_(qx))
            found |= dict.fromkeys((fmt, *others), error)
            self._copy("fprop/weight", fmt, others)
            del qw, e_w
        e_x = self._add_error(f"{first}/fprop/input", qx, x)
        if output is None:
            form = operands.call.form("fprop", "input", first)  # errors of a transformed input are transformed, too
            by_input = _row_sums(e_x.mul_(dx if form is None else transformed(dx, form)))
            for same in alike:
                found[same[0]].add_(by_input)
        self._copy("fprop/input", first, list(found)[1:])
        return found

    def _copy(self, operand: str, fmt: str, others: Sequence[str]) -> None:
        """Copy the sums of an operand's cast to formats that have the same cast."""
        for other in others:
            for kind in _OF_AN_OPERAND:
                self.sums.copy(f"{kind}/{fmt}/{operand}", f"{kind}/{other}/{operand}")

    def _add_backward_errors(self, fmt: str, operands: Operands, exact: Tensor) -> None:
        """wgrad's error in some rows, summed over microbatches, and errors of dgrad's and wgrad's operands.

        exact [R,K]: those rows of wgrad's product without quantisation.
        """
        if get_format(fmt).shares_weight:
            for kind in _OF_AN_OPERAND:
                self.sums.copy(f"{kind}/{fmt}/fprop/weight", f"{kind}/{fmt}/dgrad/weight")
        else:
            qw, w = self._cast(operands, "dgrad", "weight", fmt)
            self._add_error(f"{fmt}/dgrad/weight", qw, w)
            del qw
        qg, g = self._cast(operands, "dgrad", "grad_output", fmt)
        self._add_error(f"{fmt}/dgrad/grad_output", qg, g)
        del qg
        qg, g = self._cast(operands, "wgrad", "grad_output", fmt)
        qx, x = self._cast(operands, "wgrad", "input", fmt)
        self.weight_error[fmt].add_(matmul(qg[:, self._rows.start :: self._step].T, qx)).sub_(exact)
        self._add_error(f"{fmt}/wgrad/grad_output", qg, g)
        self._add_error(f"{fmt}/wgrad/input", qx, x)

    def _add_norms(self, x: Tensor, w: Tensor, g: Tensor) -> None:
        for name, role, tensor in (("X", "input", x), ("W", "weight", w), ("G", "grad_output", g)):
            if (role == "weight" and self._seen) or (role == "grad_output" and not self.updates):
                continue
            self.sums.add(f"norm/{name}", square(tensor), self._share[role])
            self._nonzero[role] = _count_nonzero(tensor)

    def _counts(self, operand: str) -> bool:
        """Whether to add an operand's scalars now.  A weight's are added once."""
        return not (operand.endswith("/weight") and self._seen)

    def _cast(self, operands: Operands, gemm: str, role: str, fmt: str) -> tuple[Tensor, Tensor]:
        """The cast operand and the exact one.  Counts elements that underflow or saturate."""
        q, saturated = operands.quantized(gemm, role, fmt)
        form = operands.call.form(gemm, role, fmt)
        exact = operands.tensor(role)
        nonzero = self._nonzero.get(role)
        if form is not None and form.transformed:
            exact = transformed(exact, form)
            nonzero = _count_nonzero(exact)
        if self._counts(operand := f"{fmt}/{gemm}/{role}"):
            assert nonzero is not None
            share = self._share[role]
            self.sums.add(f"nonzero/{operand}", nonzero, share)
            # elements that are nonzero after the cast were nonzero before
            self.sums.add(f"underflow/{operand}", nonzero - _count_nonzero(q), share)
            self.sums.add(f"saturated/{operand}", saturated, share)
        return q, exact

    def _add_error(self, operand: str, q: Tensor, exact: Tensor) -> Tensor:
        """Compute the error of a result of `_cast`, in place of the cast, and add its square."""
        error = q.sub_(exact)
        if self._counts(operand):
            self.sums.add(f"error/{operand}", square(error), self._share[operand.rpartition("/")[2]])
        return error

    def add_updates(self, updates: Updates, clip: float) -> None:
        """Add the squared update and its change by E_w, which by now is summed over microbatches, dp and cp."""
        share, shard = 1.0 / self._replicate.size, self._shard
        whole = updates.changes(self.shape.name, [], clip)[0]
        self.sums.add("update", whole, share)
        here = -(-self._local_rows // shard.size)  # FSDP2 shards rows like torch.chunk
        begin = shard.rank * here
        inside = [i for i, row in enumerate(self._rows) if begin <= row < begin + here]
        part = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
        rows = slice(self._rows[inside[0]] - begin, None, self._step) if inside else slice(0, 0)
        errors = [self.weight_error[fmt][part] for fmt in self.formats]
        seen = len(range(0, self.shape.out_features, self._step))
        for fmt, change in zip(self.formats, updates.changes(self.shape.name, errors, clip, rows)[1:], strict=True):
            self.sums.add(f"own/{fmt}", change, share * self.shape.out_features / seen)
