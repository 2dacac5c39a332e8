"""Steps of gpu.py: the 1B model in each precision, where its time goes, and a resume that must go on bit for bit."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from gpu import ROOT, Contact, Table, call

MODEL = ROOT / "examples/llama_1b/llama_1b.toml"
#: A model for the rehearsal and for the resume.
SMALL = [
    *("--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "2"),
    *("--num-query-groups", "2", "--kv-channels", "64", "--seq-length", "128", "--max-position-embeddings", "128"),
    *("--vocab-size", "512", "--global-batch-size", "2", "--snip-probe-tokens", "512", "--snip-trial-tokens", "512"),
]
#: name, options; a plan comes from SNIP's own probe at the third iteration.
RUNS = {
    "bf16": ["--precision", "bf16"],
    "fp8": ["--precision", "fp8"],
    "75% plan": ["--precision", "snip", "--snip-start", "3", "--snip-interval", "1000"],
    "fp4": ["--precision", "fp4"],
    "75% plan, recompute": ["--precision", "snip", "--snip-start", "3", "--recompute-granularity", "full"],
}


def run_folder(contact: Contact, name: str) -> Path:
    """Where a run writes."""
    return contact.folder / "runs" / name.replace(" ", "_").replace("%", "").replace(",", "")


def train(
    contact: Contact,
    name: str,
    options: list[str],
    launcher: tuple[str, ...] = (sys.executable,),
    enough: int | None = None,
) -> list[dict[str, Any]]:
    """Run the program; its metrics.

    enough: it begins anew and is ended after so many iterations, before it saves 15 GB.
    """
    folder = run_folder(contact, name)
    metrics = folder / "metrics.jsonl"
    if enough is not None:
        shutil.rmtree(folder, ignore_errors=True)
    words = [*launcher, "pretrain_llama.py", "--config", str(MODEL), "--mock-data", "--run-dir", str(folder),
             "--log-interval", "5", "--lr-warmup-iters", "2", "--snip-apply-lag", "2", "--log-throughput",
             "--log-memory", "--eval-iters", "0", *(SMALL if contact.rehearse else []), *contact.options,
             *options]  # fmt: skip

    def until() -> bool:
        return enough is not None and metrics.exists() and metrics.read_bytes().count(b"\n") >= enough

    folder.mkdir(parents=True, exist_ok=True)
    seconds = max(60.0, contact.left())
    status = call(words, folder / "output.txt", seconds, until)
    if enough is not None:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if status != 0:
        text = (folder / "output.txt").read_text()
        if "NCCL" in text and not contact.options and launcher == (sys.executable,):
            # one process needs no NCCL, which may not start on a machine without a network
            contact.options += ["--device", "cuda", "--distributed-backend", "gloo"]
            (folder / "output.txt").rename(contact.folder / "nccl.txt")
            return train(contact, name, options, launcher, enough)
        lines = text.strip().splitlines()
        why = next((line for line in lines if line.startswith("error")), " ".join(lines[-1:]))
        how = f"did not end in {seconds:.0f} s" if status is None else f"ended with {status}"
        raise RuntimeError(f"{name} {how}: {why}")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def training(contact: Contact) -> Table:
    """Fourteen iterations of the 1B model in each precision: tokens a second, and what a probe takes."""
    columns = ("precision", "tokens/s", "by BF16's", "peak GiB", "loss at the end", "probe, s", "probe in iterations")
    table = Table("Training Llama 1B", columns)
    iterations, batch = (8, 2) if contact.rehearse else (14, 4)
    base: float | None = None
    for name, options in list(RUNS.items())[-1 if contact.rehearse else 0 :]:
        if contact.left() < 30:
            table.bad.append(f"{name}: left out, the time was over")
            continue
        sizes = [] if contact.rehearse else ["--global-batch-size", str(batch)]
        try:
            rows = train(contact, name, ["--train-iters", str(iterations), *sizes, *options], enough=iterations)
        except RuntimeError as error:
            table.bad.append(str(error))
            continue
        timed = [row for row in rows if row["iteration"] > iterations // 2]
        seconds = statistics.median(row["iteration-time"] for row in timed)
        tokens = batch * (128 if contact.rehearse else 8192) / seconds
        base = tokens if name == "bf16" else base
        probe = next((row["snip/probe_seconds"] for row in rows if "snip/probe_seconds" in row), None)
        cost = (f"{probe:.2f}", f"{probe / seconds:.2f}") if probe else ("-", "-")
        peak = rows[-1].get("mem-max-allocated-bytes", 0) / 2**30
        loss = rows[-1]["lm loss"]
        if loss is None:
            table.bad.append(f"{name}: the loss is not finite")
        ratio = f"{tokens / base:.2f}" if base else "-"
        table.rows.append((name, f"{tokens:.0f}", ratio, f"{peak:.1f}", f"{loss:.4f}" if loss else "-", *cost))
        contact.keep(table)
    table.notes.append(f"{batch} sequences an iteration, one microbatch each; medians of the second half")
    if contact.options:
        table.notes.append(f"NCCL did not start, see nccl.txt: {' '.join(contact.options)}")
    return table


#: Kinds of kernels and what their names have; the first that fits counts.
KINDS = {
    "attention": "sdpa|flash|fmha|cudnn|attention",
    "GEMMs in FP8": r"nvjet_sm\d+_qq|scaled_mm",
    "GEMMs in BF16": "nvjet|gemm|cutlass|aten::mm$",
    "casts": "cast_kernel|amax_kernel|hadamard_kernel",
    "cross entropy": "softmax_kernel|gradient_kernel",
    "SwiGLU's backward, rotary positions": "swiglu|rotate",
    "optimiser": "multi_tensor|adamw",
    "norms": "layer_norm|rms_norm|GammaBeta",
    "the rest": "",
}


def profile(contact: Contact) -> Table:
    """Milliseconds of an iteration's kernels by kind, in BF16 and in FP8, and what the GPU waits for the host."""
    names = ("bf16", "fp8")[-1 if contact.rehearse else 0 :]
    table = Table("Where an iteration of Llama 1B goes", ("kernels, ms", *names))
    spent: dict[str, list[str]] = {kind: [] for kind in (*KINDS, "all kernels", "waiting for the host")}
    first = 2 if contact.rehearse else 7
    for name in names:
        options = ["--precision", name, "--train-iters", str(first + 2), "--profile"]
        options += ["--profile-step-start", str(first), "--profile-step-end", str(first)]
        options += [] if contact.rehearse else ["--global-batch-size", "4"]
        train(contact, f"profile {name}", options, enough=first + 2)
        (path,) = (run_folder(contact, f"profile {name}") / "profile").glob("*.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for kind, milliseconds in by_kind(events, "cpu_op" if contact.rehearse else "kernel").items():
            spent[kind].append(f"{milliseconds:.1f}")
    table.rows += [(kind, *each) for kind, each in spent.items()]
    table.notes.append("4 microbatches; the profiler slows the host, so that the GPU waits longer than in training")
    return table


def by_kind(events: list[dict[str, Any]], category: str) -> dict[str, float]:
    """Milliseconds of the events of a category by kind, all of them, and those between them in which none runs."""
    chosen = sorted((one for one in events if one.get("cat") == category), key=lambda one: one["ts"])
    spent, waits, end = dict.fromkeys(KINDS, 0.0), 0.0, chosen[0]["ts"]
    for one in chosen:
        spent[next(kind for kind, words in KINDS.items() if re.search(words, one["name"]))] += one["dur"] / 1e3
        waits += max(0.0, one["ts"] - end) / 1e3
        end = max(end, one["ts"] + one["dur"])
    return {**spent, "all kernels": sum(spent.values()), "waiting for the host": waits}


def resume(contact: Contact) -> Table:
    """Six iterations, and three with a save and three more: equal metrics, bit for bit."""
    table = Table("Resume", ("metrics that differ",))
    options = [*SMALL, "--train-iters", "6", *RUNS["75% plan"], "--deterministic-mode"]
    for name in ("whole", "cut"):
        shutil.rmtree(run_folder(contact, name), ignore_errors=True)
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
