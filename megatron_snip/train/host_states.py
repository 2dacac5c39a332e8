"""AdamW on the host (--optimizer-cpu-offload): which parameters, and what travels between host and device.

The host holds the main weight, the gradient and AdamW's state of such a parameter; the device keeps the weight that it
computes with, and its gradient until the update.  A step copies all gradients down, on a stream of their own.  It
updates a unit as soon as its gradients have arrived, and copies its new weights up while the next unit is updated.
What follows on the device waits for the last copy.

Blocks that run first stay on the device: the host's share is counted from the end of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor, nn

from megatron_snip.config import TrainingConfig
from megatron_snip.mesh import Mesh
from megatron_snip.train.memory_plan.plan_file import MemoryPlan


def host_parameters(
    stages: Iterable[nn.Module], t: TrainingConfig, mesh: Mesh, plan: MemoryPlan | None = None
) -> list[str]:
    """The parameters of a rank whose state lies on the host, in order of use; the same on all ranks that share them."""
    sizes = {name: p.numel() for stage in stages for name, p in stage.named_parameters()}  # of DTensors: whole
    return names_on_host(sizes, t, plan, copied=mesh.embedding is not None)


def names_on_host(sizes: Mapping[str, int], t: TrainingConfig, plan: MemoryPlan | None, *, copied: bool) -> list[str]:
    """Those of these parameters, in order of use with their sizes, whose state lies on the host.

    copied: whether two pipeline ranks hold copies of a tied embedding.
    """
    if plan is not None and plan.on_host:
        return [name for name in sizes if unit_of(name) in plan.on_host]
    if not t.optimizer_cpu_offload:
        return []
    fraction = t.optimizer_offload_fraction
    # both copies must get the same bits, so below 1 both are updated on the device
    stays = "embed_tokens" if copied and fraction < 1 else None
    return [name for name in last_of(sizes, fraction) if unit_of(name) != stays]


def last_of(sizes: Mapping[str, int], fraction: float) -> list[str]:
    """The fewest last names, in order, whose sizes are at least this share of all."""
    found: list[str] = []
    held, wanted = 0, fraction * sum(sizes.values())
    for name in reversed(list(sizes)):
        if held >= wanted:
            break
        found.append(name)
        held += sizes[name]
    return found[::-1]


def unit_of(name: str) -> str:
    """The unit that a parameter belongs to: layers.3, embed_tokens, norm or lm_head."""
    found = re.match(r"layers\.\d+|[^.]+", name)
    assert found is not None
    return found[0]


class HostCopies:
    """Weights and gradients on the host of some parameters, and their transfers.

    weights: the device's local shards [...] by name, in order of use.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._device = dict(weights)
        #: Main weights, local shards [...].
        self.weights = {name: nn.Parameter(_on_host(weight)) for name, weight in weights.items()}
        #: Gradients, local shards [...]; those that `arrived` names are valid until the next `fetch`.
        self.grads = {name: _on_host(weight) for name, weight in weights.items()}
        device = next((weight.device for weight in weights.values() if weight.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)
        self.stale = True  # whether something else than `send` has written the device's weights
        self._events: dict[str, torch.cuda.Event] = {}  # by unit
        self._fetched: list[str] = []  # names of the gradients of the last `fetch`, in order of use

    @torch.no_grad()
    def fetch(self, grads: Mapping[str, Tensor]) -> None:
        """Start to copy these gradients down, local shards [...], and stale weights.

        A parameter without a gradient is not updated, as by torch's optimisers.
        """
        self._fetched = [name for name in self.weights if name in grads]
        if not self._fetched:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._copying():
            for unit, names in groupby(self.weights, unit_of):
                for name in names:
                    if name in grads:
                        self.grads[name].copy_(grads[name], non_blocking=True)
                    if self.stale:
                        self.weights[name].copy_(self._device[name], non_blocking=True)
                if self._stream is not None:
                    self._events[unit] = self._stream.record_event()
        self.stale = False

    def arrived(self) -> Iterator[list[str]]:
        """The names of what was fetched, unit by unit, each once it is on the host."""
        for unit, names in groupby(self._fetched, unit_of):
            if self._stream is not None:
                self._events[unit].synchronize()
            yield list(names)

    @torch.no_grad()
    def send(self, names: Iterable[str]) -> None:
        """Start to copy main weights up."""
        with self._copying():
            for name in names:
                self._device[name].copy_(self.weights[name], non_blocking=True)

    def _copying(self) -> AbstractContextManager[object]:
        """Within it, copies are the stream's.  torch.cuda.stream(None) would start CUDA where only the CPU is used."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Let the device wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _on_host(weight: Tensor) -> Tensor:
    """Uninitialised memory like a weight [...], page-locked if that is on a GPU."""
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
