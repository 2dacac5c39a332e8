"""Steps of gpu.py: the 1B model in each precision, and a resume that must go on bit for bit."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu import ROOT, Contact, Table

MODEL = ROOT / "examples/llama_1b/llama_1b.toml"
#: A model for the rehearsal and for the resume.
SMALL = [
    *("--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "2"),
    *("--num-query-groups", "2", "--kv-channels", "64", "--seq-length", "128", "--max-position-embeddings", "128"),
    *("--vocab-size", "512", "--global-batch-size", "2"),
]
#: name, options; a plan comes from SNIP's own probe at the third iteration.
RUNS = {
    "bf16": ["--precision", "bf16"],
    "fp8": ["--precision", "fp8"],
    "fp4": ["--precision", "fp4"],
    "75% plan": ["--precision", "snip", "--snip-start", "3", "--snip-interval", "1000"],
    "75% plan, recompute": ["--precision", "snip", "--snip-start", "3", "--recompute-granularity", "full"],
}


def run_folder(contact: Contact, name: str) -> Path:
    """Where a run writes."""
    return contact.folder / "runs" / name.replace(" ", "_").replace("%", "").replace(",", "")


def train(
    contact: Contact, name: str, options: list[str], launcher: tuple[str, ...] = (sys.executable,)
) -> list[dict[str, Any]]:
    """Run the program; its metrics."""
    folder = run_folder(contact, name)
    words = [*launcher, "pretrain_llama.py", "--config", str(MODEL), "--mock-data", "--run-dir", str(folder),
             "--log-interval", "5", "--lr-warmup-iters", "2", "--snip-apply-lag", "2", "--log-throughput",
             "--log-memory", *(SMALL if contact.rehearse else []), *options]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=max(60.0, contact.left()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = next((line for line in lines if line.startswith("error")), " ".join(lines[-1:]))
        raise RuntimeError(f"{name} ended with {done.returncode}: {why}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def training(contact: Contact) -> Table:
    """Twenty iterations of the 1B model in each precision: tokens a second, and what a probe takes."""
    columns = ("precision", "tokens/s", "by BF16's", "peak GiB", "loss at the end", "probe, s", "probe in iterations")
    table = Table("Training Llama 1B", columns)
    iterations, batch = (8, 2) if contact.rehearse else (20, 8)
    base: float | None = None
    for name, options in list(RUNS.items())[-1 if contact.rehearse else 0 :]:
        if contact.left() < 30:
            table.bad.append(f"{name}: left out, the time was over")
            continue
        sizes = [] if contact.rehearse else ["--global-batch-size", str(batch)]
        rows = train(contact, name, ["--train-iters", str(iterations), *sizes, *options])
        timed = [row for row in rows if row["iteration"] > iterations // 2]
        seconds = statistics.median(row["iteration-time"] for row in timed)
        tokens = batch * (128 if contact.rehearse else 8192) / seconds
        base = base or tokens
        probe = next((row["snip/probe_seconds"] for row in rows if "snip/probe_seconds" in row), None)
        cost = (f"{probe:.2f}", f"{probe / seconds:.2f}") if probe else ("-", "-")
        peak = rows[-1].get("mem-max-allocated-bytes", 0) / 2**30
        loss = f"{rows[-1]['lm loss']:.4f}"
        table.rows.append((name, f"{tokens:.0f}", f"{tokens / base:.2f}", f"{peak:.1f}", loss, *cost))
    table.notes.append(f"{batch} sequences an iteration, one microbatch each; medians of the second half")
    return table


def resume(contact: Contact) -> Table:
    """Six iterations, and three with a save and three more: equal metrics, bit for bit."""
    table = Table("Resume", ("metrics that differ",))
    options = [*SMALL, "--train-iters", "6", *RUNS["75% plan"], "--deterministic-mode"]
    whole = train(contact, "whole", options)
    saves = str(run_folder(contact, "cut") / "checkpoints")
    train(contact, "cut", [*options, "--exit-interval", "3"])
    cut = train(contact, "cut", [*options, "--load", saves])
    differ = [
        f"iteration {one['iteration']}: {key} is {one[key]} and {other.get(key)}"
        for one, other in zip(whole, cut, strict=True)
        for key in ("iteration", "lm loss", "grad-norm", "snip/plan_hash")
        if one.get(key) != other.get(key)
    ]
    table.rows.append((str(len(differ)),))
    table.bad += differ
    return table
