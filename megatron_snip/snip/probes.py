"""The statistics pass: one forward and backward of the coming batch in BF16 format, without an update.

Per linear and format it measures (docs/numerics.md):
    token_square_sum  sum_t (sum_n G[t,n] dY[t,n])^2,  dY = Q(X) Q(W)^T - X W^T     for the loss divergence
    own_sq            |u(g + E_w) - u(g)|_F^2,         E_w = Q(G)^T Q(X) - G^T X    for the weight divergence
u is AdamW's update as a function of the clipped gradient, elementwise with the real moments.  Partial sums
over n are reduced over tp before squaring; E_w is summed over microbatches and reduce-scattered over dp into
the optimiser's own sharding.  Nothing of the training state is changed.
T tokens, K input channels, N output channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from megatron_snip.mesh import Mesh
from megatron_snip.quant import LinearObserver, LinearPrecision, Operands
from megatron_snip.snip.stats import LinearStats, ProbeStats


class ProbedLinear(Protocol):
    """What a probe needs of a parallel linear."""

    precision: LinearPrecision
    observer: LinearObserver | None


class OptimizerView(Protocol):
    """What a probe reads of the optimiser; names are parameters', tensors the local parts."""

    steps: int

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Adam's m and v, [...]."""
        ...

    def gradient(self, name: str) -> Tensor:
        """The gradient, [...]."""
        ...


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's constants and the clipping, on which its update depends."""

    beta1: float
    beta2: float
    eps: float
    clip_grad: float


@dataclass(frozen=True)
class Pass:
    """What a forward and backward over a batch gives on every process."""

    loss: float  # nats, over the global batch
    grad_norm: float  # of the whole model, before clipping
    clip: float  # what gradients are multiplied by


def adam_update(grad: Tensor, m: Tensor, v: Tensor, step: int, adam: AdamSettings) -> Tensor:
    """AdamW's update without learning rate and weight decay: u(grad), all [...] float32.

    step counts from 1: the update that is about to be made.
    """
    m = (adam.beta1 * m + (1.0 - adam.beta1) * grad) / (1.0 - adam.beta1**step)
    v = (adam.beta2 * v + (1.0 - adam.beta2) * grad * grad) / (1.0 - adam.beta2**step)
    return m / (v.sqrt() + adam.eps)


class LinearProbe:
    """The observer of one linear: sums what its backward passes show."""

    def __init__(self, formats: Sequence[str]) -> None:
        self.token_sums: dict[str, list[Tensor]] = {fmt: [] for fmt in formats}
        self.weight_error: dict[str, Tensor | None] = dict.fromkeys(formats)

    @torch.no_grad()
    def backward(self, operands: Operands) -> None:
        """Add one microbatch; products in float32, so that their small differences keep their digits."""
        assert operands.grad_output is not None
        x, w, g = operands.x.float(), operands.w.float(), operands.grad_output.float()
        y, grad_w = x @ w.T, g.T @ x
        for fmt, sums in self.token_sums.items():
            qx, qw = operands.quantized("fprop", "input", fmt), operands.quantized("fprop", "weight", fmt)
            sums.append((g * (qx.float() @ qw.float().T - y)).sum(dim=1))
            qg = operands.quantized("wgrad", "grad_output", fmt)
            qx = operands.quantized("wgrad", "input", fmt)
            error = qg.float().T @ qx.float() - grad_w
            so_far = self.weight_error[fmt]
            self.weight_error[fmt] = error if so_far is None else so_far.add_(error)


def _shard_like_optimizer(error: Tensor, mesh: Mesh) -> Tensor:
    """This process's part [N/tp, K] of a sum over dp -> the rows of the whole sum that its optimiser holds."""
    if mesh.dp.size == 1:
        return error
    partial = DTensor.from_local(error, mesh.device_mesh["dp"], [Partial()], run_check=False)
    return partial.redistribute(placements=[Shard(0)]).to_local()


class StatisticsProbe:
    """Runs the pass; every process makes one over the linears of its own stages and calls it alike."""

    def __init__(
        self,
        linears: Mapping[str, ProbedLinear],
        *,
        names: Sequence[str],
        formats: Iterable[str],
        optimizer: OptimizerView,
        adam: AdamSettings,
        mesh: Mesh,
        tokens: int,
        device: torch.device,
    ) -> None:
        self.linears, self.names, self.optimizer, self.adam = linears, list(names), optimizer, adam
        self.formats = sorted(set(formats) - {"bf16"})
        self.mesh, self.tokens, self.device = mesh, tokens, device

    def run(self, gradients: Callable[[], Pass], zero_grad: Callable[[], None], iteration: int) -> ProbeStats:
        """Measure.  `gradients` runs the batch and leaves gradients, `zero_grad` drops them again."""
        probes = {name: LinearProbe(self.formats) for name in self.linears}
        before = {name: linear.precision for name, linear in self.linears.items()}
        try:
            for name, linear in self.linears.items():
                linear.precision, linear.observer = LinearPrecision.uniform("bf16"), probes[name]
            result = gradients()
            return self._reduce(self._local_sums(probes, result.clip), result, iteration)
        finally:
            for name, linear in self.linears.items():
                linear.precision, linear.observer = before[name], None
            zero_grad()

    @torch.no_grad()
    def _local_sums(self, probes: Mapping[str, LinearProbe], clip: float) -> dict[str, dict[str, Any]]:
        """This process's share of every sum; shares add up over all processes."""
        token_sums = self._token_square_sums(probes)
        out: dict[str, dict[str, Any]] = {}
        for name, probe in probes.items():
            m, v = self.optimizer.moments(f"{name}.weight")
            grad = self.optimizer.gradient(f"{name}.weight").float() * clip
            step = self.optimizer.steps + 1
            update = adam_update(grad, m, v, step, self.adam)
            own = {}
            for fmt in self.formats:
                error = probe.weight_error[fmt]
                assert error is not None, f"{name}: no backward was seen"
                error = _shard_like_optimizer(error, self.mesh) * clip
                own[fmt] = _square_sum(adam_update(grad + error, m, v, step, self.adam) - update)
                probe.weight_error[fmt] = None  # as large as a gradient: free it now
            out[name] = {"token": token_sums[name], "own": own, "update": _square_sum(update)}
        return out

    def _token_square_sums(self, probes: Mapping[str, LinearProbe]) -> dict[str, dict[str, float]]:
        """Per linear and format; one all-reduce over tp, since a square of a partial sum would be wrong."""
        if not probes or not self.formats:
            return {name: {} for name in probes}
        rows = [torch.cat(probe.token_sums[fmt]) for probe in probes.values() for fmt in self.formats]
        sums = torch.stack(rows)
        if self.mesh.tp.size > 1:
            dist.all_reduce(sums, group=self.mesh.tp.group)
        squares = sums.double().square().sum(dim=1).tolist()
        share = 1.0 if self.mesh.tp.is_first else 0.0  # equal on all of tp: counted once
        it = iter(squares)
        return {name: {fmt: next(it) * share for fmt in self.formats} for name in probes}

    def _reduce(self, local: Mapping[str, Mapping[str, Any]], result: Pass, iteration: int) -> ProbeStats:
        """One all-reduce over the world of a vector indexed by global linear."""
        width = 1 + 2 * len(self.formats)
        table = torch.zeros(len(self.names), width, dtype=torch.float64)
        for i, name in enumerate(self.names):
            if sums := local.get(name):
                own, token = sums["own"], sums["token"]
                row = [sums["update"], *(own[f] for f in self.formats), *(token[f] for f in self.formats)]
                table[i] = torch.tensor(row, dtype=torch.float64)
        table = table.to(self.device)
        dist.all_reduce(table, group=self.mesh.world)
        rows, n = table.tolist(), len(self.formats)
        linears = {
            name: LinearStats(
                update_norm_sq=row[0],
                own_sq=dict(zip(self.formats, row[1 : 1 + n], strict=True)),
                token_square_sum=dict(zip(self.formats, row[1 + n :], strict=True)),
            )
            for name, row in zip(self.names, rows, strict=True)
        }
        return ProbeStats(iteration=iteration, loss=result.loss, tokens=self.tokens, linears=linears)


def _square_sum(x: Tensor) -> float:
    """Squared Frobenius norm of x [...]; NaN where x is not finite."""
    value = float(torch.linalg.vector_norm(x.float()).double().square())
    return value if math.isfinite(value) else math.nan
