"""What a probe costs: its time in plain BF16 iterations, and the memory it adds.

    python benchmarks/probe_cost.py                      # CPU, a small Llama in bf16
    python benchmarks/probe_cost.py --device cuda --hidden-size 4096 --num-layers 8 --seq-length 4096
    python benchmarks/probe_cost.py --formats fp8,fp4,mxfp8,mxfp4,nvfp4

An iteration is forward, backward and update in bf16; a probe measures --formats, by default fp8 and fp4.  Iterations
and probes take turns.  Memory is that of the tensors alive at once, by the allocator's count, beyond an iteration's own
peak, against what is allowed: the largest layer's activations once more and one gradient copy a format.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from harness import interleaved, live_peak, machine, report, save

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.train.setup import Parts, build, check

MOST_ITERATIONS = 6  # that a probe of one batch with two formats may take


def make_parts(args: argparse.Namespace) -> tuple[Config, Parts]:
    """A run over made-up data."""
    options = {
        "num_layers": args.num_layers, "hidden_size": args.hidden_size, "ffn_hidden_size": args.hidden_size * 11 // 4,
        "num_attention_heads": args.hidden_size // 64, "seq_length": args.seq_length, "vocab_size": 8192,
        "micro_batch_size": 1, "global_batch_size": args.microbatches, "bf16": True, "mock_data": True,
        "precision": "snip", "snip_options": args.formats, "snip_start": 10**6, "train_iters": 10**6,
        "distributed_backend": "nccl" if args.device == "cuda" else "gloo",
    }  # fmt: skip
    config, plan = check(Config().replace(**options), 1)
    return config, build(config, runtime.start(config.parallel.distributed_backend, 10.0), plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("num-layers", 4), ("hidden-size", 1024), ("seq-length", 1024), ("microbatches", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--formats", default="fp8,fp4", help="comma-separated (default: fp8,fp4)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config, parts = make_parts(args)
    batch, probe = parts.train_loader.batch(0), parts.coordinator.probe

    def iteration() -> None:
        parts.stepper.step(batch, 1)

    def probing(updates: bool) -> None:
        probe.run(parts.stepper.pass_runner(batch, 1), parts.optimizer.zero_grad, 1, updates=updates)

    cases = {"iteration": iteration, "probe": lambda: probing(False), "probe with updates": lambda: probing(True)}
    peaks = {}
    for name, case in cases.items():
        case()
        peaks[name] = live_peak(case, args.device)
    added = {name: peaks[name] - peaks["iteration"] for name in list(cases)[1:]}
    seconds = interleaved(cases, args.device, args.repeats, warmup=1)
    m = config.model
    weights = sum(linear.weight.numel() for linear in parts.linears.values())
    tokens = m.seq_length * config.training.micro_batch_size
    allowed = len(args.formats.split(",")) * 4 * weights + tokens * 2 * (4 * m.hidden_size + 3 * m.ffn_hidden_size)
    base = seconds["iteration"]
    rows = [[name, f"{taken * 1e3:.0f}", f"{taken / base:.2f}"] for name, taken in seconds.items()]
    rows.append(["probe at an interval of 1000", "", f"{seconds['probe'] / base / 10:.2f}% of the run"])
    for name, much in added.items():
        rows.append(
            [f"memory added by the {name} (MiB)", f"{much / 2**20:.0f}", f"{much / allowed:.2f} of the allowed"]
        )
    reached = seconds["probe with updates"] / base <= MOST_ITERATIONS and max(added.values()) <= allowed
    rows.append([f"{MOST_ITERATIONS} iterations, memory as allowed", "", "reached" if reached else "NOT reached"])
    about = machine(args.device)
    about["model"] = f"{m.num_layers} blocks, hidden {m.hidden_size}, {args.microbatches} x {tokens} tokens"
    print(report(f"Probe with {args.formats}", ("", "ms", "in iterations"), rows, about))
    save(args.json, about, {"seconds": seconds, "bytes_added": added, "bytes_allowed": allowed})
    with contextlib.suppress(AttributeError):
        parts.train_loader.close()
    runtime.stop()


if __name__ == "__main__":
    main()
