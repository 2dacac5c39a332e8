"""Tools that observe a run or steady its pace without changing results: profiler, memory, garbage collection."""

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
#: Dense BF16 TFLOP/s from the vendor's data sheets, by part of the device's name; the first match counts.
PEAK_TFLOPS = {
    "GB200": 2500.0, "B200": 2250.0, "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0,
    "H100": 989.4, "H800": 989.4, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0,
}  # fmt: skip


def peak_tflops(device: torch.device) -> float | None:
    """Peak dense BF16 TFLOP/s of this GPU; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_row(device: torch.device) -> dict[str, int]:
    """Bytes of memory in use and peak, with Megatron's names on a GPU; on a CPU, peak resident memory."""
    if device.type == "cuda":
        return {
            "mem-allocated-bytes": torch.cuda.memory_allocated(device),
            "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(device),
            "mem-reserved-bytes": torch.cuda.memory_reserved(device),
        }
    return {"mem-max-resident-bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


class Instruments:
    """The profiler and the garbage collector of one rank.  `close` restores the collector."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self.log, self.training, self.rank, self.device = config.logging, config.training, rank, device
        self._profiler: Any = None
        if self.training.manual_gc:
            gc.disable()
            gc.collect()

    def before_step(self, iteration: int) -> None:
        """Start to profile if it is due."""
        log = self.log
        due = log.profile and iteration == log.profile_step_start and self.rank in log.profile_ranks
        if due and self._profiler is None:  # it may run still, if the guard went back within the profile's iterations
            gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self._profiler.start()

    def after_step(self, iteration: int) -> dict[str, int]:
        """Write a finished profile, and collect garbage if due.  Returns columns for the iteration's row."""
        if self._profiler is not None and iteration == self.log.profile_step_end:
            self._write_profile(iteration)
        interval = self.training.manual_gc_interval
        if self.training.manual_gc and interval and iteration % interval == 0:
            gc.collect()
        return memory_row(self.device) if self.log.log_memory else {}

    def close(self, iteration: int) -> None:
        """Write a profile that has not reached its last iteration, and enable automatic garbage collection."""
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
        except (OSError, RuntimeError) as error:  # a full disk, for example; the run itself is fine
            LOGGER.warning(f"{path} was not written: {error}")
            return
        LOGGER.info(f"profile of iterations {first} to {iteration}: {path}")
