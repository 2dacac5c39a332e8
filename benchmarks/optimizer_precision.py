"""--optimizer-precision: the time of an update, and what short runs of the quickstart's model end at.

    python benchmarks/optimizer_precision.py steps [--threads 2] [--device cuda]
    python benchmarks/optimizer_precision.py runs --data data/quickstart --json FILE

`steps` times one update of 16 million parameters, against torch's fused AdamW on as many float32 parameters in turn.
`runs` trains the quickstart's model in one process, a run for each precision, beta2, learning rate and seed, and adds
each to FILE, which it continues.  All runs of a seed see the same batches from the same initial weights.  A row has the
validation loss at the end, the mean training loss of the last 50 iterations, and the mean EDQ/|u| and lost share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from harness import interleaved, machine, report, save
from torch import nn

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.config import TrainingConfig
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.quant import PLAIN
from megatron_snip.train.bf16_adamw import LOW_PARTS
from megatron_snip.train.optim import Optimizer
from megatron_snip.train.setup import build, check

PRECISIONS = ("fp32", *LOW_PARTS)
SHAPE = (2048, 2048)
#: Batches of the validation loss, 16 thousand tokens.
VALIDATIONS = 32


def optimizer_of(precision: str, tensors: int, device: str) -> Optimizer:
    """An optimiser of some matrices that have gradients."""
    draw, model = torch.Generator().manual_seed(0), nn.Module()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for i in range(tensors):
        part = nn.Module()
        weight, grad = (torch.randn(SHAPE, generator=draw).mul(size).to(device, dtype) for size in (0.02, 1e-3))
        add_parameter(part, "weight", nn.Parameter(weight), Tags("linear"))
        part.weight.grad = grad
        model.add_module(str(i), part)
    return Optimizer([model], TrainingConfig(optimizer_precision=precision, adam_beta2=0.95, weight_decay=0.1))


def steps(args: argparse.Namespace) -> None:
    """Time of an update."""
    torch.set_num_threads(args.threads)
    optimizers = {name: optimizer_of(name, args.tensors, args.device) for name in PRECISIONS}
    cases = {name: lambda one=one: one.step(1e-4, 1.0) for name, one in optimizers.items()}
    seconds = interleaved(cases, args.device, repeats=args.repeats, ahead=True)
    elements = args.tensors * SHAPE[0] * SHAPE[1]
    rows = [
        [name, f"{taken / elements * 1e9:.3f}", f"{taken / seconds['fp32']:.2f}"] for name, taken in seconds.items()
    ]
    about = machine(args.device)
    print(report("An update", ["precision", "ns/parameter", "against torch's fused AdamW"], rows, about))
    save(args.json, about, seconds)


def options_of(args: argparse.Namespace, precision: str, beta2: float, lr: float, seed: int) -> Any:
    """The quickstart's options, on one process, at a constant learning rate."""
    data = args.data
    words = [
        "--config", "examples/quickstart.toml", "--tensor-model-parallel-size", "1",
        "--pipeline-model-parallel-size", "1", "--distributed-backend", "gloo", "--precision", "bf16",
        "--train-data-path", f"{data}/tokens/train_text_document",
        "--valid-data-path", f"{data}/tokens/valid_text_document",
        "--tokenizer-model", f"{data}/tokenizer/tokenizer.model", "--optimizer-precision", precision,
        "--adam-beta2", str(beta2), "--lr", str(lr), "--min-lr", "0", "--lr-decay-style", "constant",
        "--seed", str(seed),
        "--seq-length", "128", "--global-batch-size", "4", "--micro-batch-size", "4",
        "--train-iters", str(args.iterations), "--eval-iters", str(VALIDATIONS), "--log-edq-interval", "20",
    ]  # fmt: skip
    return parse(words)


def run(args: argparse.Namespace, precision: str, beta2: float, lr: float, seed: int) -> dict[str, Any]:
    """One run."""
    config, plan = check(options_of(args, precision, beta2, lr, seed).replace(sequence_parallel=False), 1)
    parts = build(config, runtime.start("gloo", 10.0), plan)
    size, losses, rows = config.training.global_batch_size, [], []
    for i in range(1, args.iterations + 1):
        runtime.seed_iteration(seed, i)
        result = parts.stepper.step(parts.train_loader.batch((i - 1) * size), i)
        losses.append(result.loss)
        rows += [result.lost] if result.lost else []
    assert parts.valid_loader is not None
    valid = [parts.stepper.evaluate(parts.valid_loader.batch(i * size), 0, PLAIN) for i in range(VALIDATIONS)]
    parts.train_loader.close()
    half = rows[len(rows) // 2 :]
    return {
        "precision": precision, "beta2": beta2, "lr": lr, "seed": seed, "iterations": args.iterations,
        "valid": statistics.mean(valid), "train": statistics.mean(losses[-50:]),
        "edq": statistics.mean(row["optim/edq"] for row in half),
        "lost": statistics.mean(row["optim/lost"] for row in half),
        "last": rows[-1],
    }  # fmt: skip


def runs(args: argparse.Namespace) -> None:
    """All runs that the file lacks."""
    torch.set_num_threads(1)
    path = Path(args.json)
    done = json.loads(path.read_text())["results"] if path.is_file() else []
    names = ("precision", "beta2", "lr", "seed", "iterations")
    there = {tuple(row[name] for name in names) for row in done}
    for seed, lr, beta2, precision in itertools.product(args.seeds, args.lr, args.beta2, args.precisions):
        if (precision, beta2, lr, seed, args.iterations) not in there:
            done.append(run(args, precision, beta2, lr, seed))
            save(args.json, machine("cpu"), done)
            print({key: value for key, value in done[-1].items() if key != "last"}, flush=True)
    print(table(done))


def table(done: list[dict[str, Any]]) -> str:
    """Differences of the final validation loss from float32's, by seed: mean and standard error."""
    settings = sorted({(row["lr"], row["beta2"]) for row in done})
    lines = []
    for lr, beta2 in settings:
        here = [row for row in done if (row["lr"], row["beta2"]) == (lr, beta2)]
        base = {row["seed"]: row["valid"] for row in here if row["precision"] == "fp32"}
        for precision in PRECISIONS:
            mine = [row for row in here if row["precision"] == precision and row["seed"] in base]
            if not mine:
                continue
            off = [row["valid"] - base[row["seed"]] for row in mine]
            error = statistics.stdev(off) / len(off) ** 0.5 if len(off) > 1 else 0.0
            lines.append([
                f"{lr:g}", f"{beta2:g}", precision, str(len(mine)),
                f"{statistics.mean(row['valid'] for row in mine):.4f}",
                f"{statistics.mean(off):+.4f} +- {error:.4f}", f"{statistics.mean(row['edq'] for row in mine):.3f}",
                f"{statistics.mean(row['lost'] for row in mine):.1%}",
            ])  # fmt: skip
    heads = ["lr", "beta2", "precision", "seeds", "validation loss", "minus fp32's", "EDQ/|u|", "lost"]
    return report("Runs", heads, lines, {})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("steps")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--threads", type=int, default=1, help="CPU threads")
    one.add_argument("--tensors", type=int, default=4)
    one.add_argument("--repeats", type=int, default=15)
    one.add_argument("--json")
    one.set_defaults(call=steps)
    two = commands.add_parser("runs")
    two.add_argument("--data", default="data/quickstart")
    two.add_argument("--json", required=True)
    two.add_argument("--iterations", type=int, default=600)
    two.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    two.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    two.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    two.add_argument("--lr", type=float, nargs="+", default=[1e-4])
    two.set_defaults(call=runs)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
