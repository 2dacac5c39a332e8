"""Whether a run can fit at all, checked before it is built: the OOM killer gives no message."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.model.flops import parameters
from megatron_snip.runtime import Runtime

LOGGER = logging.getLogger("megatron_snip")
_GIB = 2**30
#: What a rank holds: bytes per parameter, all in float32, and in words.
TRAINING = (16, "weights, gradients and the optimiser's state")
WEIGHTS = (4, "the weights")
_MOMENTS = 8  # bytes per parameter, which --optimizer-cpu-offload moves away
#: Files of a control group, versions 2 and 1: limit, usage, and reclaimable part of the usage.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def warn_about_memory(config: Config, here: Runtime, holds: tuple[int, str] = TRAINING) -> None:
    """Warn if what ranks hold (TRAINING or WEIGHTS) alone exceeds the free memory of this machine or its GPU."""
    free, processes = free_memory(here.device), runtime.environment_local_world_size()
    if here.device.type == "cuda":
        processes = -(-processes // max(1, torch.cuda.device_count()))
    t, each = config.training, float(holds[0])
    if holds == TRAINING and t.optimizer_cpu_offload and here.device.type == "cuda":
        each -= _MOMENTS * t.optimizer_offload_fraction
    needed = processes * held(config, here.world_size, each)
    if free is None or needed <= free:
        return
    what = "this GPU" if here.device.type == "cuda" else "this machine"
    LOGGER.warning(
        f"{what} cannot hold the run: {holds[1]} need {needed / _GIB:.1f} GiB for "
        f"{processes} process{'es' if processes > 1 else ''}, activations not counted, and {free / _GIB:.1f} GiB are "
        "free; the system may kill it without notice. Take a smaller model or more machines, or shard more; --dry-run "
        "shows what a layout needs"
    )


def check_host_memory(gib: float, what: str) -> None:
    """Raise UserError if this machine has less free than ``gib`` GiB for each of its ranks.  what: who wants them."""
    free, ranks = free_memory(torch.device("cpu")), runtime.environment_local_world_size()
    if free is not None and ranks * gib * _GIB > free:
        raise UserError(
            f"{what}: {gib:.4g} GiB of the host for each of {ranks} rank{'s' if ranks > 1 else ''} on this machine are "
            f"{ranks * gib:.4g} GiB, and {free / _GIB:.1f} GiB are free; give --memory-plan auto "
            f"--host-memory-gib with at most {free / _GIB / ranks:.1f}"
        )


def held(config: Config, world_size: int, each: float = TRAINING[0]) -> int:
    """Average bytes per rank, at ``each`` bytes per parameter."""
    p, dp = config.parallel, config.data_parallel_size(world_size)
    count = parameters(config.model, tied=not config.model.untie_embeddings_and_output_weights)
    whole = dp * p.context_parallel_size
    shards = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * (whole // config.replicas(dp))
    return int(each * count) // shards


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
