"""A stretch of a dry run cut into phases: a microbatch's forward or backward of one block, and what lies between.

Each phase has the bytes at its peak, and those that blocks keep meanwhile for backwards to come.  From dry runs that
differ in what blocks keep, `memory_plan.program` adds up the peaks of any mixture of them.
Convention: a block is its global index; -1 is outside of blocks (embedding, output layer, loss, optimiser).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_snip.train.dry_run.by_linear import Input, Linears
from megatron_snip.train.dry_run.counts import HOST, Counts, Tracker
from megatron_snip.train.dry_run.units import Units

OUTSIDE = -1
_OF_FORWARD = ("activations", "casts", HOST)


@dataclass(frozen=True)
class Phase:
    """Bytes at the peak of a phase of ``block``, and block -> bytes kept meanwhile for later backwards.

    kept leaves out the microbatch that the phase itself runs of its block.  It counts a block's tensors as long as they
    are on the device: those that leave for the host until they have left, and again from when they return.
    host: block -> bytes on the host.
    whole: how many microbatches all blocks of the rank keep.
    waiting: blocks between a forward and the next backward, without those whose weights FSDP gathers in this phase.
    flight: block -> how many it keeps, as in kept.  weights: with `Linears`, see there; the larger number of the
    phase's beginning and end.
    """

    block: int
    peak: int
    kept: Mapping[int, int]
    whole: int
    host: Mapping[int, int] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()
    flight: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Phases:
    """The phases of a stretch in order.  Of each block, the counts of all its phases and of its forwards alone, and the
    bytes that a microbatch keeps on the device and on the host: block -> bytes.  forwards: how many microbatches ran.
    units: what they take, which no phase changes.  inputs: with `Linears`, see there.
    """

    order: tuple[Phase, ...] = ()
    counts: Mapping[int, Counts] = field(default_factory=dict)
    each: Mapping[int, int] = field(default_factory=dict)
    forwards: int = 1
    forward_counts: Mapping[int, Counts] = field(default_factory=dict)
    each_host: Mapping[int, int] = field(default_factory=dict)
    units: Units = field(default_factory=Units)
    inputs: Mapping[str, Input] = field(default_factory=dict)


@dataclass
class _Mark:
    """Where a phase begins in the log, and what holds then.  kept: bytes at its beginning or end, whichever is more."""

    place: int
    block: int
    forward: bool
    before: Counts
    kept: Counter[int]
    host: Counter[int]
    flight: Counter[int]
    waiting: frozenset[int]
    weights: Counter[str]


class Recorder:
    """Hooks on the blocks of a rank that note where phases begin.

    serve_all: storages made by forwards that serve all microbatches.  leave: frees what has left for the host.
    linears: also records what depends on the formats of linears.
    """

    def __init__(
        self,
        tracker: Tracker,
        stages: Mapping[int, Any],
        serve_all: Callable[[], set[int]],
        leave: Callable[[], None],
        linears: Linears | None = None,
    ) -> None:
        self.tracker, self.serve_all, self.leave, self.linears = tracker, serve_all, leave, linears
        self.blocks = [index for stage in stages.values() for index in stage.blocks()]
        #: The block whose weights FSDP gathers while another's backward runs.
        self.next_backward = {b: a for stage in stages.values() for a, b in pairwise(stage.blocks())}
        self.begin()
        for stage in stages.values():
            numbers = list(stage.blocks())
            for index, block in stage.blocks().items():
                first = index == numbers[0]
                # the pipeline holds what it receives
                self._watch(index, block, ends_backward=first, holds_input=stage.first or not first)

    def begin(self) -> None:
        """Restart with the stretch."""
        self.held: dict[tuple[int, int], list[Any]] = {}  # (block, microbatch) -> storages that its forward keeps
        self.seen: Counter[int] = Counter()  # forwards of each block
        self.waiting: set[int] = set()  # blocks whose last pass was a forward
        self.marks: list[_Mark] = []
        self.each: dict[int, int] = {}
        self.each_host: dict[int, int] = {}
        self._open(OUTSIDE)

    def _sizes(self) -> tuple[Counter[int], Counter[int]]:
        """Bytes by block on the device and on the host."""
        kept: Counter[int] = Counter()
        host: Counter[int] = Counter()
        for (block, _), entries in self.held.items():
            there = sum(entry.size for entry in entries if entry.kind == HOST)
            here = sum(one.size for entry in entries for one in (*entry.fetched, entry) if one.kind != HOST)
            kept[block] += here
            host[block] += there
            # once nothing is on its way
            self.each[block] = min(here, self.each.get(block, here))
            self.each_host[block] = max(there, self.each_host.get(block, there))
        return kept, host

    def _weights(self) -> Counter[str]:
        return Counter({} if self.linears is None else self.linears.weights())

    def _close(self) -> None:
        """End the current phase."""
        mark = self.marks[-1]
        mark.kept |= self._sizes()[0]  # the maximum

    def _open(self, block: int, *, forward: bool = False, gathers: int = OUTSIDE) -> None:
        flight = Counter(each for each, _ in self.held)
        place, waiting = len(self.tracker.memory.log), frozenset(self.waiting - {block, gathers})
        counts = self.tracker.counts.copy()
        self.marks.append(_Mark(place, block, forward, counts, *self._sizes(), flight, waiting, self._weights()))

    def _watch(self, index: int, block: nn.Module, *, ends_backward: bool, holds_input: bool) -> None:
        memory, before = self.tracker.memory, [0]
        inputs: list[list[Any]] = [[]]

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recomputation in backward
            x = args[0]
            if ends_backward and isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._outside())
            self._close()
            # the block that reads x decides whether it is kept, not the one that made it
            read = memory.of(x) if holds_input else None
            inputs[0] = [] if read is None else [read]
            before[0] = len(memory.log)
            self._open(index, forward=True)

        def end(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            self.leave()
            self._close()
            microbatch = self.seen[index]
            self.seen[index] += 1
            if out.requires_grad:
                left_out = {*self.serve_all(), id(memory.of(out))}
                made = {id(entry): entry for entry, _ in memory.log[before[0] :] if entry.kind in _OF_FORWARD}
                self.held[index, microbatch] = [
                    *inputs[0], *(entry for key, entry in made.items() if entry.size and key not in left_out)
                ]  # fmt: skip
                self.waiting.add(index)
                out.register_hook(lambda _: self._backward(index, microbatch))
            self._open(OUTSIDE)

        block.register_forward_pre_hook(begin, prepend=True)
        block.register_forward_hook(end)

    def _backward(self, index: int, microbatch: int) -> None:
        self._close()
        self.held.pop((index, microbatch), None)
        self.waiting.discard(index)
        self._open(index, gathers=self.next_backward.get(index, OUTSIDE))

    def _outside(self) -> None:
        self._close()
        self._open(OUTSIDE)

    def phases(self) -> Phases:
        """The phases of the stretch that ran."""
        self._close()
        changes = self.tracker.memory.changes()
        live = np.concatenate([[0], np.cumsum(np.array(changes, dtype=np.int64))])
        ends = [*(mark.place for mark in self.marks[1:]), len(changes)]
        weights = [*(mark.weights for mark in self.marks), self._weights()]
        order, blocks = [], (*self.blocks, OUTSIDE)
        counts: dict[int, Counts] = {block: Counter() for block in blocks}
        forward: dict[int, Counts] = {block: Counter() for block in blocks}
        for number, mark in enumerate(self.marks):
            after = self.marks[number + 1].before if number + 1 < len(self.marks) else self.tracker.counts
            for what, count in after.items():
                if more := count - mark.before[what]:
                    counts[mark.block][what] += more
                    if mark.forward:
                        forward[mark.block][what] += more
            whole = min((mark.flight[each] for each in self.blocks), default=0)
            peak = int(live[mark.place : ends[number] + 1].max())
            most = dict(weights[number] | weights[number + 1])
            at = Phase(mark.block, peak, dict(mark.kept), whole, dict(mark.host), mark.waiting, dict(mark.flight), most)
            order.append(at)
        return Phases(
            tuple(order), counts, dict(self.each), max(self.seen.values(), default=1), forward, dict(self.each_host),
            inputs={} if self.linears is None else dict(self.linears.inputs),
        )  # fmt: skip
