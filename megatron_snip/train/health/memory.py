"""Whether a run can fit at all, checked before it is built: the OOM killer gives no message."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.model.flops import parameters_by_rank
from megatron_snip.runtime import Runtime
from megatron_snip.train.bf16_adamw import LOW_PARTS
from megatron_snip.train.dry_run.counts import pinned
from megatron_snip.train.host_states import names_on_host
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from megatron_snip.train.optim import MOMENTS

LOGGER = logging.getLogger("megatron_snip")
_GIB = 2**30
#: What a rank holds.
TRAINING, WEIGHTS = "weights, gradients and the optimiser's state", "the weights"
#: Files of a control group, versions 2 and 1: limit, usage, and reclaimable part of the usage.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def warn_about_memory(config: Config, here: Runtime, holds: str = TRAINING, plan: MemoryPlan | None = None) -> None:
    """Warn if what ranks hold (TRAINING or WEIGHTS) alone exceeds the free memory of this machine or its GPU."""
    free, stages, on_gpu = free_memory(here.device), local_stages(config, here), here.device.type == "cuda"
    each = held(config, here.world_size, holds, plan)
    if on_gpu:
        processes = -(-len(stages) // max(1, torch.cuda.device_count()))
        needed = processes * each[stages[here.local_rank]][0]
    else:
        processes, needed = len(stages), sum(sum(each[stage]) for stage in stages)
    if free is None or needed <= free:
        return
    LOGGER.warning(
        f"this {'GPU' if on_gpu else 'machine'} cannot hold the run: {holds} need {needed / _GIB:.1f} GiB for "
        f"{processes} process{'es' if processes > 1 else ''}, activations not counted, and {free / _GIB:.1f} GiB are "
        "free; the system may kill it without notice. Take a smaller model or more machines, or shard more; --dry-run "
        "shows what a layout needs"
    )


def host_shortage(needed: Sequence[float], what: str, way_out: str, most: float) -> str:
    """The error if this machine has less free than its ranks need on the host; "" if it has enough.

    needed: bytes of each of them.  what: who wants them.  way_out: with {} for the part of ``most`` that would fit.
    """
    total = sum(needed)
    free = free_memory(torch.device("cpu")) if total else None
    if free is None or total <= free:
        return ""
    ranks, fits = f"{len(needed)} rank{'s' * (len(needed) > 1)}", math.floor(100 * most * free / total) / 100
    return (
        f"{what} takes {total / _GIB:.4g} GiB of the host for {ranks} on this machine, and {free / _GIB:.1f} GiB are "
        f"free; {way_out.format(fits)}"
    )


def local_stages(config: Config, here: Runtime) -> list[int]:
    """The pipeline rank of each rank on this machine."""
    last, first = here.world_size - 1, here.rank - here.local_rank
    each = here.world_size // config.parallel.pipeline_model_parallel_size
    return [min(first + i, last) // each for i in range(runtime.environment_local_world_size())]


def held(
    config: Config, world_size: int, holds: str = TRAINING, plan: MemoryPlan | None = None, *, page_locked: bool = False
) -> list[tuple[int, int]]:
    """Bytes of a rank of each pipeline rank, on the device and on the host, where AdamW's state may lie.

    plan: the memory plan.  page_locked: whether copies on the host are, as on GPUs; that takes powers of two.
    """
    p, t, dp = config.parallel, config.training, config.data_parallel_size(world_size)
    tied = not config.model.untie_embeddings_and_output_weights
    shards = dp * p.context_parallel_size // config.replicas(dp)
    weight = 4 if t.optimizer_precision == "fp32" else 2  # a gradient is the same
    state = weight * (len(MOMENTS) + len(LOW_PARTS.get(t.optimizer_precision, ())))
    found = []
    for sizes in parameters_by_rank(config.model, p, tied=tied):
        own = {
            name: -(-size // (shards * (1 if "norm" in name else p.tensor_model_parallel_size)))
            for name, size in sizes.items()
        }
        if holds == WEIGHTS:
            found.append((weight * sum(own.values()), 0))
            continue
        copied = tied and p.pipeline_model_parallel_size > 1
        moved = [own[name] for name in names_on_host(sizes, t, plan, copied=copied)]
        host = sum(2 * pinned(weight * size, 2 if page_locked else 1) + state * size for size in moved)
        found.append(((2 * weight + state) * sum(own.values()) - state * sum(moved), host))
    return found


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Free bytes of this rank's GPU or machine, within its control group; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [left for left in (_available(root), *_left_in_groups(root)) if left is not None]
    return min(found, default=None)


def _available(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _left_in_groups(root: Path) -> list[int]:
    """Remaining bytes in each control group around this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    found = []
    for name, limit, usage, droppable in _GROUPS:
        path = Path(own.get(name, "/").lstrip("/"))
        for group in (path, *path.parents):  # a container may see its own group as root
            place = root / "sys/fs/cgroup" / name / group
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number and means no limit
                most, used = (int((place / file).read_text()) for file in (limit, usage))
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                found.append(most - used + int(stat.get(droppable, 0)))
    return found
