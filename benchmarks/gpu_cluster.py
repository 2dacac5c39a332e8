"""What several GPUs of a node tell: tokens a second over tp, dp and pp, and how much of NCCL's time is hidden.

    python benchmarks/gpu_cluster.py --gpus 8 --output gpu-cluster
    python benchmarks/gpu_cluster.py --gpus 2 --rehearse --output try    # over gloo on a CPU, small

OUTPUT/gpu.json and gpu.md are written as those of gpu.py, and the traces of rank 0 stay in OUTPUT/runs.  Send us the
first two: nobody has run this on a cluster yet.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gpu
import torch
from gpu import Contact, Report, Table
from harness import machine

Interval = tuple[float, float]


def layouts(gpus: int) -> dict[str, list[str]]:
    """tp, dp and pp alone and in pairs, as options; tp at most 8, which is what one node connects well."""
    found: dict[str, list[str]] = {}
    for tp in (n for n in (1, 2, 4, 8) if gpus % n == 0):
        for pp in (n for n in (1, 2, 4, 8) if gpus % (tp * n) == 0):
            dp = gpus // tp // pp
            if sorted((tp, pp, dp))[0] > 1 and gpus > 8:
                continue  # three at once on large machines alone
            axes = [f"{axis} {n}" for axis, n in (("tp", tp), ("pp", pp), ("dp", dp)) if n > 1]
            words = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
            found[" x ".join(axes)] = [*words, *(["--sequence-parallel"] if tp > 1 else [])]
    return found


def run_layouts(contact: Contact, gpus: int, wanted: str | None) -> Table:
    """Twelve iterations of the 1B model in each layout, in BF16 and in FP8; a layout that fails leaves the others."""
    columns = ("layout", "precision", "tokens/s a GPU", "NCCL, ms an iteration", "of it beside other kernels")
    table = Table(f"{gpus} GPUs", columns)
    batch = 2 * gpus if contact.rehearse else 8 * gpus
    for layout, words in layouts(gpus).items():
        for precision in ("fp8",) if contact.rehearse else ("bf16", "fp8"):
            if wanted not in (None, layout):
                continue
            if contact.left() < 30:
                table.bad.append(f"{layout} {precision}: left out, the time was over")
                continue
            try:
                table.rows.append((layout, precision, *run_layout(contact, gpus, layout, precision, words, batch)))
            except (RuntimeError, OSError) as error:
                table.bad.append(f"{layout} {precision}: {error}")
            contact.keep(table)
    table.notes.append(f"{batch} sequences an iteration; medians of iterations 5 to 10, traces of 11 and 12 of rank 0")
    return table


def run_layout(
    contact: Contact, gpus: int, layout: str, precision: str, words: list[str], batch: int
) -> tuple[str, str, str]:
    """Tokens a second and GPU, milliseconds of NCCL an iteration, and the share of them that is hidden."""
    from gpu_training import run_folder, train

    name = f"{layout} {precision}"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=one_node", "--nproc_per_node", str(gpus))
    options = [*words, "--global-batch-size", str(batch), "--precision", precision, "--train-iters", "12",
               "--untie-embeddings-and-output-weights", "--profile", "--profile-step-start", "11",
               "--profile-step-end", "12"]  # fmt: skip
    rows = train(contact, name, options, launcher, enough=12)
    seconds = statistics.median(row["iteration-time"] for row in rows if 5 <= row["iteration"] <= 10)
    tokens = batch * (128 if contact.rehearse else 8192) / seconds / gpus
    taken, hidden = nccl(read_trace(run_folder(contact, name) / "profile"))
    return f"{tokens:.0f}", f"{taken / 2e3:.1f}", f"{hidden / taken:.0%}" if taken else "-"


def read_trace(folder: Path) -> list[Mapping[str, Any]]:
    """Events of the one trace in a folder."""
    (path,) = sorted(folder.glob("rank_0000_*.json.gz"))
    with gzip.open(path, "rt") as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    return events


def nccl(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Microseconds in which a kernel of NCCL ran, and in which another kernel ran too."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    for event in kernels:
        spans[event["name"].startswith("nccl")].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    ours, others = union(spans[True]), union(spans[False])
    return sum(end - begin for begin, end in ours), overlap(ours, others)


def union(spans: list[Interval]) -> list[Interval]:
    """The same time as intervals that do not meet."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """Time in both; each is sorted and meets itself nowhere."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def main(words: list[str] | None = None) -> int:
    """Run every layout of so many GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of gpu.json and gpu.md")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--layout", help="one alone, such as 'tp 2 x dp 4'")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--minutes", type=float, default=30.0, help="nothing begins after so many")
    args = parser.parse_args(words)
    if not args.rehearse and torch.cuda.device_count() < args.gpus:
        parser.error(f"--gpus {args.gpus}, and {torch.cuda.device_count()} are here; --rehearse runs on the CPU")
    if args.gpus < 2:
        parser.error(f"--gpus {args.gpus}: give 2 or more; gpu.py measures one")
    if args.layout not in (None, *layouts(args.gpus)):
        parser.error(f"--layout {args.layout} unknown; known: {', '.join(layouts(args.gpus))}")
    args.output.mkdir(parents=True, exist_ok=True)
    contact = Contact(args.rehearse, args.output.resolve(), time.monotonic() + 60 * args.minutes)
    report = Report(contact.folder, machine(contact.device), {})
    seconds = 60 * args.minutes
    gpu.run({"layouts": (lambda contact: run_layouts(contact, args.gpus, args.layout), seconds)}, contact, report)
    return int(report.bad)


if __name__ == "__main__":
    sys.exit(main())
