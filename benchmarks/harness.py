"""What the benchmarks share: interleaved timing, the machine's description, tables and JSON.

Cases of one run take turns, so that a noisy machine disturbs all of them alike; figures are medians, and
what counts is the ratio between two of them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

Case = Callable[[], object]


#: Cycles, about a millisecond, that a GPU waits while the host launches a case: more than the host takes for one.
_AHEAD = 2_000_000


def _once(case: Case, device: str, ahead: bool) -> float:
    """Seconds of one call."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if ahead:
            torch.cuda._sleep(_AHEAD)
        start.record()
        case()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    case()
    return time.perf_counter() - begin


def interleaved(
    cases: Mapping[str, Case], device: str, repeats: int = 9, warmup: int = 2, *, ahead: bool = False
) -> dict[str, float]:
    """Median seconds of each case; all of them run once, then all again, and so on.

    ahead: a GPU begins when the host has launched all of a case, so that its kernels' time is measured alone.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + repeats):
        for name, case in cases.items():
            taken = _once(case, device, ahead)
            if turn >= warmup:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def live_peak(case: Case, device: str) -> int:
    """Bytes of tensors alive at once at most while a case runs, beyond those that were there before.

    As the allocator counts them: what a process holds besides, to give it out again, is not in it.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        case()
    events = profiler.profiler.kineto_results.events()
    level = itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    return max(level, default=0)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine(device: str) -> dict[str, str]:
    """Hardware, versions and the command, as they go with every result."""
    versions = {}
    for package in ("torch", "triton", "torchao", "transformer-engine", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "date": date.today().isoformat(),
        "hardware": f"{hardware}, {torch.get_num_threads()} threads" if device == "cpu" else hardware,
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": " ".join(["python", *sys.argv]),
    }


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], about: Mapping[str, str]) -> str:
    """A result as markdown."""
    lines = [f"## {title}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def save(path: str | None, about: Mapping[str, str], results: Any) -> None:
    """The same as JSON, where a file is asked for."""
    if path:
        Path(path).write_text(json.dumps({"about": dict(about), "results": results}, indent=1) + "\n")
