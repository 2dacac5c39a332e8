"""What watches a run or steadies its pace and changes none of its numbers: profiler, memory, garbage collection."""

from __future__ import annotations

import gc
import logging
import resource
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_snip.config import Config

LOGGER = logging.getLogger("megatron_snip")
#: Dense BF16 TFLOP/s by a part of the device's name, as their vendor's data sheets tell; the first that fits counts.
PEAK_TFLOPS = {
    "GB200": 2500.0, "B200": 2250.0, "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0,
    "H100": 989.4, "H800": 989.4, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0,
}  # fmt: skip


def peak_tflops(device: torch.device) -> float | None:
    """Dense BF16 TFLOP/s that a GPU of this name can reach; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_row(device: torch.device) -> dict[str, int]:
    """Bytes of memory in use and at most, under Megatron's names on a GPU; on a CPU the process's resident memory."""
    if device.type == "cuda":
        return {
            "mem-allocated-bytes": torch.cuda.memory_allocated(device),
            "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(device),
            "mem-reserved-bytes": torch.cuda.memory_reserved(device),
        }
    return {"mem-max-resident-bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


class Instruments:
    """The profiler and the garbage collector of one process.  `close` gives the collector back."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self.log, self.training, self.rank, self.device = config.logging, config.training, rank, device
        self._profiler: Any = None
        if self.training.manual_gc:
            gc.disable()
            gc.collect()

    def before_step(self, iteration: int) -> None:
        """Begin to profile where it is due."""
        log = self.log
        if log.profile and iteration == log.profile_step_start and self.rank in log.profile_ranks:
            gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self._profiler.start()

    def after_step(self, iteration: int) -> dict[str, int]:
        """Write the profile where it ends, collect garbage where that is due; what the iteration's row gets."""
        if self._profiler is not None and iteration == self.log.profile_step_end:
            self._write_profile(iteration)
        interval = self.training.manual_gc_interval
        if self.training.manual_gc and interval and iteration % interval == 0:
            gc.collect()
        return memory_row(self.device) if self.log.log_memory else {}

    def close(self, iteration: int) -> None:
        """End a profile that has not come to its last iteration, and let the collector run by itself again."""
        if self._profiler is not None:
            self._write_profile(iteration)
        if self.training.manual_gc:
            gc.enable()

    def _write_profile(self, iteration: int) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        first = self.log.profile_step_start
        path = Path(self.log.run_dir) / f"profile/rank_{self.rank:04d}_iter_{first:07d}_{iteration:07d}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk, say: the run itself goes well
            LOGGER.warning(f"{path} was not written: {error}")
            return
        LOGGER.info(f"profile of iterations {first} to {iteration}: {path}")
