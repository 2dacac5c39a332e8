"""What of a dry run's memory depends on the formats of linears: kept inputs, and casts of weights.

`memory_plan.joint` mixes dry runs that differ in formats as `memory_plan.program` mixes those that differ in choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_snip.parallel.data import local_of
from megatron_snip.quant import name_stream
from megatron_snip.quant.casts.cast import Operand
from megatron_snip.quant.linears.group import Group
from megatron_snip.train.dry_run.counts import Tracker


@dataclass(frozen=True)
class Input:
    """A tensor that some linears of a block read together.

    linears: their names.  kept: bytes of its casts that a microbatch keeps for wgrad, 0 if forward runs again.  rows:
    bytes of the tensor itself on this rank.  gathers: whether linears of different formats keep these rows in place of
    casts (see `quant.linears.group`).
    """

    linears: tuple[str, ...]
    kept: int
    rows: int
    gathers: bool


class Linears:
    """Notes what the linears of a rank keep.  linears: by name, as `LlamaStage.linears` gives them."""

    def __init__(self, tracker: Tracker, linears: Mapping[str, Any]) -> None:
        self.tracker, self.linears = tracker, linears
        self.names = {name_stream(name): name for name in linears}
        self.inputs: dict[str, Input] = {}  # by the first linear
        for linear in linears.values():
            linear.region.watch = self._note

    def _note(self, inputs: Sequence[Tensor], group: Group, kept: Sequence[Operand]) -> None:
        names = tuple(self.names[call.key.stream] for call in group.calls if call.key is not None)
        if torch._C._current_graph_task_id() == -1 and names[0] not in self.inputs:
            parts = [part for one in kept for part in one[1:4] if isinstance(part, Tensor)]
            size = 0 if group.calls[0].forward_only else self._bytes(*parts)
            self.inputs[names[0]] = Input(names, size, self._bytes(inputs[0]), group.gathers)

    def weights(self) -> dict[str, int]:
        """Linear -> bytes of its weight, or FSDP2's gathered copy or codes, and of the weight's casts."""
        found = {}
        for name, linear in self.linears.items():
            casts = [] if linear.weight_casts is None else linear.weight_casts.tensors()
            codes = [part for sent in linear.codes.values() for part in (sent.data, sent.scales)]
            found[name] = self._bytes(local_of(linear.weight), *casts, *codes)
        return found

    def _bytes(self, *tensors: Tensor) -> int:
        """Bytes of the storages of some tensors [...], each counted once."""
        entries = {id(entry): entry.size for tensor in tensors if (entry := self.tracker.memory.of(tensor)) is not None}
        return sum(entries.values())
