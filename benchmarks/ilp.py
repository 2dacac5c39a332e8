"""CPU seconds of the planner on models of 7B to 70B size, by kind of costs, options, stages and stage constraint.

    python benchmarks/ilp.py                        # the whole table
    python benchmarks/ilp.py --repeats 3 --json ilp.json

A case is the median over targets and seeds; "worst" is the slowest of them.  Costs: "plain" uniform, "flops"
proportional to a GEMM's FLOPs times a lognormal factor, "heavy" lognormal with outliers of 1e3.  Savings are
FP4 shares of the FLOPs; times are the nominal ones, or for "makespan, measured" differ by shape and GEMM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from itertools import product

import numpy as np
from harness import machine, report, save

from megatron_snip.snip.plan.ilp import Solution
from megatron_snip.snip.plan.solver import SolveRequest

#: Out and in features of a block's linears: Llama-2 7B and 70B.
BLOCKS = {
    "7B": (32, [(4096, 4096)] * 4 + [(11008, 4096), (11008, 4096), (4096, 11008)]),
    "70B": (80, [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]),
}
FAMILIES = ("plain", "flops", "heavy")
KINDS = ("none", "each", "makespan", "makespan, measured")
#: Formats by how long a GEMM in them takes, nominal; 2 options are linears as a whole, 8 and 27 are per GEMM.
FORMATS = {2: (0.5, 0.25), 8: (0.5, 0.25), 27: (1.0, 0.5, 0.25)}
TARGETS = (0.25, 0.5, 0.75, 0.9)


def instance(model: str, options: int, family: str, measured: bool, seed: int) -> dict[str, np.ndarray]:
    """quality_loss, efficiency and time [L, O] of a made-up model."""
    rng = np.random.default_rng(seed)
    layers, block = BLOCKS[model]
    flops = np.tile([float(n * k) for n, k in block], layers)
    speeds = FORMATS[options]
    triples = list(product(range(len(speeds)), repeat=3)) if options > 2 else [(0, 0, 0), (1, 1, 1)]
    shape = (len(flops), 3, len(speeds))
    base = {
        "plain": lambda: rng.random(shape),
        "flops": lambda: rng.lognormal(0, 1, shape) * flops[:, None, None],
        "heavy": lambda: rng.lognormal(0, 2.5, shape) * np.where(rng.random(shape) < 0.02, 1e3, 1),
    }[family]()
    # What each step down costs, most of it in fprop; the widest format costs nothing.
    steps = base * np.array([1, 0.02, 0.05])[:, None] * (np.arange(len(speeds)) > 0) * 10.0 ** np.arange(len(speeds))
    per_gemm = np.cumsum(steps, axis=2) * 1e-6
    taken = np.broadcast_to(np.array(speeds), shape) * flops[:, None, None] / flops.sum() / 3
    if measured:
        taken = taken * np.tile(rng.uniform(0.9, 1.5, (len(block), 3, len(speeds))), (layers, 1, 1))
    fp4 = np.array([sum(part == len(speeds) - 1 for part in triple) / 3 for triple in triples])

    def total(values: np.ndarray) -> np.ndarray:
        return np.stack([sum(values[:, gemm, part] for gemm, part in enumerate(t)) for t in triples], axis=1)

    share = flops[:, None] / flops.sum() * fp4[None]
    return {"quality_loss": total(per_gemm), "efficiency": share, "time": total(taken)}


def run(model: str, options: int, family: str, kind: str, stages: int, repeats: int) -> tuple[list[float], Solution]:
    """CPU seconds of every target and seed, and the solution with the widest gap."""
    seconds, widest = [], None
    for seed, target in product(range(repeats), TARGETS):
        matrices = instance(model, options, family, kind.endswith("measured"), seed)
        rows = len(matrices["quality_loss"])
        times = matrices.pop("time")
        constraints = {} if kind == "none" else {"stage": np.arange(rows) * stages // rows}
        if kind.startswith("makespan"):
            constraints["time"] = times
        begin = time.process_time()
        found = SolveRequest(**matrices, target=target, **constraints).solve()
        seconds.append(time.process_time() - begin)
        if widest is None or found.gap > widest.gap:
            widest = found
    assert widest is not None
    return seconds, widest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7B,70B")
    parser.add_argument("--options", default="2,8,27", help="options a linear")
    parser.add_argument("--kinds", default=";".join(KINDS), help="stage constraints, by semicolon")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each case")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows, results = [], []
    for model, options, kind in product(args.models.split(","), args.options.split(","), args.kinds.split(";")):
        for family in FAMILIES:
            seconds, widest = run(model, int(options), family, kind, args.stages, args.repeats)
            median, worst = statistics.median(seconds), max(seconds)
            row = {"model": model, "options": int(options), "constraint": kind, "costs": family, "cpu_seconds": median,
                   "worst_seconds": worst, "gap": widest.gap, "status": widest.status, "all": seconds}  # fmt: skip
            results.append(row)
            rows.append([model, options, kind, family, f"{median:.3f}", f"{worst:.3f}", f"{widest.gap:.1e}"])
            print(*rows[-1], file=sys.stderr)
    columns = ["model", "options", "stage constraint", "costs", "CPU seconds, median", "worst", "widest gap"]
    about = {**machine("cpu"), "highspy": importlib.metadata.version("highspy")}
    print(report(f"Planner, {args.stages} stages", columns, rows, about))
    save(args.json, about, results)


if __name__ == "__main__":
    main()
