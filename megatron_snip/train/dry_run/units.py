"""What the units of a rank take that a memory plan may move or keep: AdamW's state, and gathered parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megatron_snip.parallel.data import keeps_weights, local_of
from megatron_snip.train.dry_run.counts import Tracker, pinned
from megatron_snip.train.host_states import unit_of
from megatron_snip.train.setup import Parts


@dataclass(frozen=True)
class State:
    """AdamW's state of a unit: bytes on the device, or on the host with main weights and gradients.

    copied: bytes that an update sends in each direction.  touched: bytes of the host that it reads and writes.
    """

    device: int = 0
    host: int = 0
    copied: int = 0
    touched: int = 0

    def __add__(self, other: State) -> State:
        return State(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Units:
    """states: by unit that is on the device.  gathered: block -> bytes of its whole parameters, where FSDP frees them;
    of weights that are gathered as codes, these.

    sent: block -> bytes that one gathering of them brings to a rank.
    """

    states: Mapping[str, State] = field(default_factory=dict)
    gathered: Mapping[int, int] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)


def units_of(parts: Parts, tracker: Tracker) -> Units:
    """The units of a dry run's rank."""
    optimizer, granule = parts.optimizer, tracker.memory.granule

    def rounded(size: int) -> int:
        return -(-size // granule) * granule

    states: dict[str, State] = {}
    for name, p in optimizer.parameters.items():
        weight, stored = local_of(p.detach()).nbytes, [one.nbytes for one in optimizer.stored(name).values()]
        # AdamW reads and writes everything but the gradient, which it reads
        of = State(
            sum(map(rounded, stored)), 2 * pinned(rounded(weight), granule) + sum(map(rounded, stored)), weight,
            3 * weight + 2 * sum(stored),
        )  # fmt: skip
        states[unit_of(name)] = states.get(unit_of(name), State()) + of
    ranks, gathered, sent = parts.mesh.shard.size, {}, {}
    frees = ranks > 1 and not keeps_weights(parts.stepper.config.parallel.data_parallel_sharding_strategy)
    for stage in parts.stages.values() if frees else ():
        for index, block in stage.blocks().items():
            whole = [size for module in block.modules() for size in _whole(module, ranks, stage.build.dtype.itemsize)]
            gathered[index] = sum(map(rounded, whole))
            sent[index] = sum(whole) * (ranks - 1) // ranks
    return Units(states, gathered, sent)


def _whole(module: nn.Module, ranks: int, itemsize: int) -> list[int]:
    """Bytes of a module's own parameters as the last pass gathered them from the ranks that shard them.

    Of codes, FSDP2's buffers: scales of blocks that ranks cut come more than once.
    """
    codes = getattr(module, "codes", None)  # of the weight of a linear
    if codes:
        parts = [part for one in codes.values() for part in (one.data, one.scales)]
        return [(part if part._base is None else part._base).nbytes for part in parts]
    return [ranks * local_of(p.detach()).numel() * itemsize for p in module.parameters(recurse=False)]
