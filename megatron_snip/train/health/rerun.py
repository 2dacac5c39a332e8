"""Repeat a suspicious iteration before it counts (--rerun-mode validate_results).

The same microbatches in the same precision with the same random bits give the same result, bit for bit, on a device
that works.  So a second result shows the cause:

    equal              the data or the model; the iteration counts as usual (no update if it is not finite)
    differs, is good   a device or its memory, once; the second result counts and the suspects are logged
    differs, is bad    a device, again; the run ends with SuspectDevice and names the suspects

Other iterations cost nothing: no work, memory or communication.  The decision uses reduced values (see loss_spikes.py),
so all ranks repeat together, and only then gather their local results.
If kernels may add in any order (GPUs without deterministic algorithms), bits prove nothing.  There, two results differ
only if one is suspicious and the other is not.
Source: Megatron-LM core 0.16.1, rerun_state_machine.py, including its exit status for a result that fails again.
Megatron exits when an equal result is bad, to try another device; here the iteration is skipped or counted as usual.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_snip import runtime
from megatron_snip.parallel.data import is_copy, local_gradients
from megatron_snip.parallel.pipeline import Batch
from megatron_snip.runtime import SuspectDevice
from megatron_snip.snip.measure.probe import Pass
from megatron_snip.train.health.loss_spikes import LossWatch
from megatron_snip.train.step import Stepper

LOGGER = logging.getLogger("megatron_snip")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LocalResult:
    """One rank's result of a pass; numbers as bits, so that NaN equals itself."""

    share: bytes  # of the loss, before reduction
    square: bytes  # of the squared gradient norm, before reduction
    gradients: tuple[tuple[int, str, int], ...]  # stage, parameter, sum over the bits of its local gradient


@dataclass(frozen=True)
class Found:
    """One rank's two results."""

    host: str
    pp: int
    dp: int
    tp: int
    first: LocalResult
    second: LocalResult
    worst: tuple[float, int, int]  # largest loss of a microbatch in nats per token, its first and last sample

    @property
    def depth(self) -> tuple[int, int]:
        """(stage, index in it) of the parameter where backward first differs; (-1, -1) if none does."""
        pairs = enumerate(zip(self.first.gradients, self.second.gradients, strict=True))
        return max(((one[0], place) for place, (one, other) in pairs if one != other), default=(-1, -1))


def bits_sum(tensor: Tensor) -> int:
    """Sum of a tensor's [...] values read as integers: any changed bit changes the sum."""
    return int(tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))


def suspects(found: Sequence[Found]) -> tuple[list[int], str]:
    """The ranks that may have computed wrongly, and the evidence; none if all results are equal.

    It knows only what each rank keeps of the first pass.  If a replica's losses differ, any of its ranks may be at
    fault.  If they agree, the fault was in backward, on the rank with the difference nearest to the loss; the others
    inherit it.  Data parallelism reduces gradients before they are compared, so they cannot tell replicas apart.
    """
    replicas = {one.dp for one in found if one.first.share != one.second.share}
    if replicas:
        return [rank for rank, one in enumerate(found) if one.dp in replicas], "the loss"
    deepest = max(one.depth for one in found)
    if deepest >= (0, 0):
        nearest = [one for one in found if one.depth == deepest]
        places, name = {(one.pp, one.tp) for one in nearest}, nearest[0].first.gradients[deepest[1]][1]
        return [rank for rank, one in enumerate(found) if (one.pp, one.tp) in places], f"the gradient of {name}"
    ranks = [rank for rank, one in enumerate(found) if one.first.square != one.second.square]
    return ranks, "the gradient norm" if ranks else ""


def told(ranks: Sequence[int], found: Sequence[Found]) -> str:
    """Suspects as text: rank 1 (host a), or one of rank 0 (host a), rank 1 (host b)."""
    names = ", ".join(f"rank {rank} (host {found[rank].host})" for rank in ranks)
    return f"one of {names}" if len(ranks) > 1 else names


class Rerun:
    """Repeats suspicious iterations.  Every rank makes one and calls it in the same way."""

    def __init__(self, stepper: Stepper, watch: LossWatch, seed: int) -> None:
        self.stepper, self.watch, self.seed = stepper, watch, seed
        self.counts = {"reruns": 0, "differed": 0}  # of the whole run
        self._row: dict[str, Any] = {}
        by_bits = stepper.pipeline.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        self.by_bits = by_bits  # whether results that differ only in bits count as different

    def validated(self, first: Pass, batch: Batch, iteration: int) -> Pass:
        """The pass that counts, with its gradients in place.  Raises SuspectDevice on all ranks if neither is good."""
        if not self.watch.suspicious(first.loss, first.grad_norm):
            return first
        before = self._local_result()
        self.stepper.optimizer.zero_grad()
        runtime.seed_iteration(self.seed, iteration)
        second, _ = self.stepper.gradients(batch, iteration)
        found = self._gather(before, batch)
        bad = self.watch.suspicious(second.loss, second.grad_norm)
        ranks, what = suspects(found)
        differ = bool(ranks) and (self.by_bits or not bad)
        self.counts["reruns"] += 1
        self.counts["differed"] += differ
        self._row = {f"rerun/{name}": count for name, count in self.counts.items()}
        losses = f"loss {first.loss:.6g}, gradient norm {first.grad_norm:.6g}"
        if not differ:
            self._log_equal(found, iteration, losses)
            return second
        self._row["rerun/suspects"] = who = told(ranks, found)
        again = f"the same microbatches again gave {second.loss:.6g} and {second.grad_norm:.6g}, {what} differs first"
        if bad:
            raise SuspectDevice(
                f"iteration {iteration}: {losses}; {again}: a device computes wrongly, {who}; "
                "take its host out and continue from the last checkpoint"
            )
        LOGGER.warning(f"iteration {iteration}: {losses}; {again}: the second result counts, suspect {who}")
        return second

    def row(self) -> dict[str, Any]:
        """Metrics of the last iteration, once; empty if it was not repeated."""
        row, self._row = self._row, {}
        return row

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return dict(self.counts)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.counts = dict(state)

    def _local_result(self) -> LocalResult:
        share, square = self.stepper.local
        sums = [
            # a tied embedding's gradient is a sum over two stages; its copy counts as the first stage's
            (0 if is_copy(tags, self.stepper.mesh) else stage, name, bits_sum(gradient))
            for stage, module in self.stepper.pipeline.stages.items()
            for name, tags, gradient in local_gradients([module])  # in forward's order
        ]
        sums.sort(key=lambda found: found[0])
        return LocalResult(struct.pack("d", share), struct.pack("d", square), tuple(sums))

    def _gather(self, first: LocalResult, batch: Batch) -> list[Found]:
        """All ranks' results, by rank.  Every rank must call it."""
        mesh, host = self.stepper.mesh, socket.gethostname()
        places = (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank)
        return mesh.gathered(Found(host, *places, first, self._local_result(), self._worst_microbatch(batch)))

    def _worst_microbatch(self, batch: Batch) -> tuple[float, int, int]:
        """This rank's microbatch with the largest loss; one that is not finite ranks above all others."""
        losses = self.stepper.pipeline.losses
        if not losses:
            return -math.inf, 0, 0
        worst = max(range(len(losses)), key=lambda m: (not math.isfinite(losses[m]), losses[m]))
        samples = batch.sample_index[worst]
        return losses[worst] * len(losses) * self.stepper.mesh.dp_cp.size, int(samples.min()), int(samples.max())

    def _log_equal(self, found: Sequence[Found], iteration: int, losses: str) -> None:
        worst = max((one.worst for one in found), key=lambda w: (math.isnan(w[0]) or w[0] == math.inf, w[0]))
        LOGGER.warning(
            f"iteration {iteration}: {losses}, and the same when repeated: the data or the model is to blame; the "
            f"microbatch of samples {worst[1]} to {worst[2]} has the largest loss, {worst[0]:.6g}"
        )
