"""The probe: one more forward and backward over the next batch, in BF16, without an update.

Each linear's LinearProbe sees X, W, G and every format's error.  Training state does not change.  All ranks agree on a
failure of one rank, and all end the probe.  Source: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.mesh import Mesh
from megatron_snip.quant import LinearObserver, LinearPrecision, LinearShape, StepContext
from megatron_snip.snip.measure.block_probe import Attend, BlockProbe, Failure
from megatron_snip.snip.measure.linear_probe import LinearProbe, names_of_sums
from megatron_snip.snip.measure.statistics import Floats, Statistics
from megatron_snip.snip.measure.updates import Updates


class ProbeFailed(RuntimeError):
    """A probe failed on some rank.  Every rank raises it, with the same message."""


class ProbedLinear(Protocol):
    """What probes and plans need from a parallel linear."""

    precision: LinearPrecision
    split_dim: int


@dataclass(frozen=True)
class Pass:
    """Result of forward and backward over a batch, the same on every rank."""

    loss: float  # nats, over the global batch
    grad_norm: float  # of the whole model, before clipping
    clip: float  # factor applied to gradients
    tokens: int | None = None  # 1 / weight of a local token in the loss, if that is not 1 / Probe.tokens


#: Runs the next batch (0), or the n-th after it, forward and backward, and leaves its gradients.  The context has the
#: settings of the pass except the iteration.
PassRunner = Callable[[int, StepContext], Pass]


class Probe:
    """Runs probes.  Every rank makes one, over the linears and blocks of its own stages, and makes the same calls."""

    def __init__(
        self,
        linears: Mapping[str, ProbedLinear],
        attends: Mapping[int, Attend],
        *,
        shapes: Sequence[LinearShape],
        formats: Iterable[str],
        updates: Updates | None = None,
        mesh: Mesh,
        tokens: int,
        device: torch.device,
        own_attends: bool = True,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.linears, self.attends, self.updates = linears, attends, updates
        self.shapes = tuple(shapes)  # of the whole model
        self.formats = sorted(fmt for fmt in set(formats) if get_format(fmt).quantised)
        self.mesh, self.tokens, self.device = mesh, tokens, device
        self.seen = 0  # tokens of the last run's batches together
        self.own_attends = own_attends  # ``attends`` are the model's own attention, bit for bit
        self.progress: Callable[[], object] | None = None  # called after each linear of each microbatch
        self.gather = gather  # under context parallelism: local tokens of sequences [T, C] -> whole sequences

    def run(
        self,
        run_pass: PassRunner,
        zero_grad: Callable[[], None],
        iteration: int,
        batches: int = 1,
        *,
        updates: bool = True,
        enough: Callable[[Statistics, int], bool] | None = None,
    ) -> Statistics:
        """Measure one batch, or the mean of several.  ``run_pass`` leaves gradients, ``zero_grad`` drops them.

        enough: whether the statistics of this many tokens suffice.  By default, and at most, ``batches`` are measured.
        updates: also measure errors of the backward GEMMs' operands, and the effect of wgrad's error on the optimiser's
        update; weight divergences need both.
        Raises ProbeFailed on all ranks if the loss is not finite, or if any work beyond that of an iteration fails,
        such as running out of memory.  Errors in the model's own pass are raised as in any iteration.
        """
        found: list[Statistics] = []
        for ahead in range(batches):
            found.append(self._one_batch(run_pass, zero_grad, iteration, ahead, updates))
            self.seen = sum(one.tokens for one in found)
            if enough is not None and enough(Statistics.mean(found), self.seen):
                break
        return Statistics.mean(found)

    def _one_batch(
        self, run_pass: PassRunner, zero_grad: Callable[[], None], iteration: int, ahead: int, updates: bool
    ) -> Statistics:
        failure = Failure()
        try:
            probes = self._attempt(failure, lambda: self._make_probes(updates))
            assert probes is not None
            result = run_pass(ahead, self._context(probes, failure))
            if not math.isfinite(result.loss):
                failure.note(f"the loss is {result.loss}")
            self._note_idle(probes, failure)
            self._agree(failure)
            if updates:
                self._sum_weight_errors(probes.values())
                self._attempt(failure, lambda: self._add_updates(probes.values(), result.clip))
            return self._reduce(probes, result, iteration, updates=updates)
        finally:
            zero_grad()

    def _note_idle(self, probes: Mapping[str, LinearProbe], failure: Failure) -> None:
        """Fail if backward did not reach a linear."""
        if not self.formats or failure.happened:
            return
        idle = [name for name, probe in probes.items() if not any(s.startswith("token/") for s in probe.sums.names)]
        if idle:
            failure.note(f"no gradient reached {', '.join(idle)}; leave {'it' if len(idle) == 1 else 'them'} out")

    def _attempt(self, failure: Failure, work: Callable[[], Any]) -> Any:
        """Run ``work``, which must not use collectives, and return its result if it succeeded on all ranks."""
        found = None
        try:
            found = work()
        except Exception as error:
            failure.note(error)
        self._agree(failure)
        return found

    def _agree(self, failure: Failure) -> None:
        """Raise ProbeFailed on every rank if any rank failed.  Every rank must call it."""
        if self.mesh.world_size > 1:
            failed = torch.tensor([float(bool(failure.text))], device=self.device)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.mesh.world)
            if not failed.item():
                return
        rank, text = self.mesh.first_problem(failure.text)
        if text:
            raise ProbeFailed(f"the probe failed on rank {rank}: {text}")

    def _make_probes(self, updates: bool) -> dict[str, LinearProbe]:
        shapes = {shape.name: shape for shape in self.shapes}
        return {
            name: LinearProbe(shapes[name], self.formats, self.mesh, linear.split_dim, self.device, updates=updates)
            for name, linear in self.linears.items()
        }

    def _context(self, probes: Mapping[str, LinearProbe], failure: Failure) -> StepContext:
        """A pass in BF16 in which every linear passes its operands to its probe."""
        failure.probes = list(probes.values())
        groups: dict[tuple[int, str], dict[str, LinearProbe]] = {}
        for name, probe in probes.items():  # a linear without a known block or kind is judged alone
            block, kind = probe.shape.block, probe.shape.kind
            groups.setdefault((block, "" if kind and block in self.attends else name), {})[name] = probe
        observers: dict[str, LinearObserver] = {}
        for (block, alone), mine in groups.items():
            attend = None if alone else self.attends.get(block)
            together = BlockProbe(
                mine, attend, self.mesh.tp, failure,
                own=self.own_attends, cp=self.mesh.cp, gather=self.gather, progress=self.progress,
            )  # fmt: skip
            observers |= {name: partial(together.see, name) for name in mine}
        return StepContext(precision=LinearPrecision.uniform("bf16"), observers=observers)

    def _sum_weight_errors(self, probes: Iterable[LinearProbe]) -> None:
        """Sum over dp and cp, in place.  u is not linear, so errors are first summed over the whole batch."""
        for probe in probes if self.mesh.dp_cp.size > 1 else ():
            for error in probe.weight_error.values():
                dist.all_reduce(error, group=self.mesh.dp_cp.group)

    def _add_updates(self, probes: Iterable[LinearProbe], clip: float) -> None:
        assert self.updates is not None, "nobody asks a probe without an optimiser for updates"
        for probe in probes:
            probe.add_updates(self.updates, clip)
            probe.weight_error.clear()

    def _reduce(self, probes: Mapping[str, LinearProbe], result: Pass, iteration: int, *, updates: bool) -> Statistics:
        """All-reduce a matrix indexed by global linear over all ranks: the sums, and the largest token sums."""
        found = [probe.sums.names for probe in probes.values()]  # empty on a rank without blocks
        names = sorted(set().union(*found) if found else names_of_sums(self.formats, updates=updates))
        table = torch.zeros(len(self.shapes), len(names), dtype=torch.float64, device=self.device)
        for row, shape in enumerate(self.shapes):
            if shape.name in probes:
                table[row] = probes[shape.name].sums.read(names)
        if result.tokens is not None:  # so that T/2 times the token sums is the cost of this rank's tokens
            table[:, [name.startswith(("token/", "top_token/")) for name in names]] *= result.tokens / self.tokens
            table[:, [name.startswith("spread/") for name in names]] *= (result.tokens / self.tokens) ** 2
        if self.mesh.world_size > 1:
            tops = [column for column, name in enumerate(names) if name.startswith("top_token/")]
            most = table[:, tops].nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum may lose NaN
            dist.all_reduce(table, group=self.mesh.world)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.world)
            table[:, tops] = most
        sums = dict(zip(names, table.T.cpu().numpy()))
        columns: dict[str, Floats] = {}
        for name, values in sums.items():
            kind, _, operand = name.partition("/")
            if kind in ("underflow", "saturated"):
                columns[name] = values / np.maximum(sums[f"nonzero/{operand}"], 1.0)
            elif kind != "nonzero":
                columns[name] = np.where(np.isfinite(values), values, np.nan)
        matrix = np.stack(list(columns.values()), axis=1)
        return Statistics(iteration, result.loss, self.tokens, self.shapes, tuple(columns), matrix)
