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
from megatron_snip.train.dry_run.counts import Counts, Tracker
from megatron_snip.train.dry_run.units import NONE, Units

OUTSIDE = -1


@dataclass(frozen=True)
class Phase:
    """Bytes at the peak of a phase of ``block``, and block -> bytes kept meanwhile for later backwards.

    kept leaves out the microbatch that the phase itself runs of its block.
    whole: how many microbatches all blocks of the rank keep.
    waiting: blocks between a forward and the next backward, without those whose weights FSDP gathers in this phase.
    flight: block -> how many it keeps, as in kept.  weights: with `Linears`, see there; the larger number of the
    phase's beginning and end.
    """

    block: int
    peak: int
    kept: Mapping[int, int]
    whole: int
    waiting: frozenset[int] = frozenset()
    flight: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Phases:
    """The phases of a stretch in order; of each block, the counts of all its phases, and the bytes that a microbatch
    keeps: block -> bytes.  forwards: how many microbatches ran.  units: what they take, which no phase changes.
    inputs: with `Linears`, see there.
    """

    order: tuple[Phase, ...] = ()
    counts: Mapping[int, Counts] = field(default_factory=dict)
    each: Mapping[int, int] = field(default_factory=dict)
    forwards: int = 1
    units: Units = NONE
    inputs: Mapping[str, Input] = field(default_factory=dict)


class Recorder:
    """Hooks on the blocks of a rank that note where phases begin.  kept: bytes that forwards have made and hold.

    linears: also records what depends on the formats of linears.
    """

    def __init__(
        self, tracker: Tracker, stages: Mapping[int, Any], kept: Callable[[], int], linears: Linears | None = None
    ) -> None:
        self.tracker, self.kept, self.linears = tracker, kept, linears
        self.blocks = [index for stage in stages.values() for index in stage.blocks()]
        self.begin()
        for stage in stages.values():
            for index, block in stage.blocks().items():
                self._watch(index, block, first=index == next(iter(stage.blocks())))
        held = [list(stage.blocks()) for stage in stages.values()]
        #: The block whose weights FSDP gathers while another's backward runs.
        self.next_backward = {b: a for blocks in held for a, b in pairwise(blocks)}

    def begin(self) -> None:
        """Restart with the stretch."""
        self.held: dict[tuple[int, int], int] = {}  # (block, microbatch) -> bytes that its forward keeps
        self.seen: Counter[int] = Counter()  # forwards of each block
        self.open: set[int] = set()  # blocks whose last pass was a forward
        self.marks: list[tuple[int, int, dict[tuple[int, int], int], Counts, frozenset[int]]] = []
        self.each: dict[int, int] = {}
        self.weights: list[Mapping[str, int]] = []
        if self.linears is not None:
            self.linears.begin()
        self._mark(OUTSIDE)

    def _mark(self, block: int, gathers: int = OUTSIDE) -> None:
        waiting, place = frozenset(self.open - {block, gathers}), len(self.tracker.memory.log)
        self.marks.append((place, block, dict(self.held), self.tracker.counts.copy(), waiting))
        self.weights.append(self.linears.weights() if self.linears is not None else {})

    def _watch(self, index: int, block: nn.Module, *, first: bool) -> None:
        before = [0]

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recomputation in backward
            x = args[0]
            if first and isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._mark(OUTSIDE))
            before[0] = self.kept()
            self._mark(index)

        def end(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            microbatch = self.seen[index]
            self.seen[index] += 1
            if out.requires_grad:
                self.open.add(index)
                self.held[index, microbatch] = self.each[index] = self.kept() - before[0]
                out.register_hook(lambda _: self._backward(index, microbatch))
            self._mark(OUTSIDE)

        block.register_forward_pre_hook(begin, prepend=True)
        block.register_forward_hook(end)

    def _backward(self, index: int, microbatch: int) -> None:
        self.held.pop((index, microbatch), None)
        self.open.discard(index)
        self._mark(index, self.next_backward.get(index, OUTSIDE))

    def phases(self) -> Phases:
        """The phases of the stretch that ran."""
        changes = self.tracker.memory.changes()
        live = np.concatenate([[0], np.cumsum(np.array(changes, dtype=np.int64))])
        ends = [*(place for place, *_ in self.marks[1:]), len(changes)]
        last, weights = self.tracker.counts, [*self.weights, self.linears.weights() if self.linears is not None else {}]
        order, counts = [], {block: Counter[tuple[str | int, ...]]() for block in (*self.blocks, OUTSIDE)}
        for number, (place, block, held, before, waiting) in enumerate(self.marks):
            after = self.marks[number + 1][3] if number + 1 < len(self.marks) else last
            for what, count in after.items():
                if more := count - before[what]:
                    counts[block][what] += more
            kept: Counter[int] = Counter()
            for (each, _), size in held.items():
                kept[each] += size
            microbatches = Counter(each for each, _ in held)
            whole = min((microbatches[each] for each in self.blocks), default=0)
            most = {name: max(size, weights[number + 1][name]) for name, size in weights[number].items()}
            peak = int(live[place : ends[number] + 1].max())
            order.append(Phase(block, peak, dict(kept), whole, waiting, dict(microbatches), most))
        inputs = self.linears.inputs if self.linears is not None else {}
        return Phases(tuple(order), counts, dict(self.each), max(self.seen.values(), default=1), inputs=dict(inputs))
