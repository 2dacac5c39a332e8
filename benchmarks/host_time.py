"""Host time of a linear, forward and backward: what Python and the dispatcher take, beside torch's own BF16 linear.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --before ../another-checkout --turns 9   # both in turns, in processes of their own

Sixteen linears of 16 x 16 in a row, one backward for all, thread time by their number: arithmetic is next to nothing,
and the engine's start is shared as in a model.  Weights' casts are kept.  Calls are Python's, by cProfile.

Also a block of a small model, per microbatch, under tensor and sequence parallelism and under FSDP, each of two
processes of which only one is there: collectives are called and do nothing.

With Triton, also casts of a gradient into tensor cores' two operands, and linears of 128 x 128 on Hopper's and
Blackwell's, up to their launches, in whose place nothing is done.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_snip import quant, runtime
from megatron_snip.config import Config
from megatron_snip.formats import get_format
from megatron_snip.parallel.tensor import ColumnParallelLinear, Region
from megatron_snip.quant import LinearPrecision, RoundingKey
from megatron_snip.quant.casts.cast import Form, Output
from megatron_snip.quant.kernels import op, triton_cast, triton_launches
from megatron_snip.quant.linears.block_scaled import MX, NVFP4
from megatron_snip.quant.linears.scaled_mm import Hopper
from megatron_snip.train.setup import build, check

LINEARS, SIDE, GPU_SIDE, PRECISIONS = 16, 16, 128, ("bf16", "fp8", "fp4", "mxfp8", "nvfp4_plain")
BLOCKS, MICROBATCHES = 4, 4
MODEL: dict[str, Any] = {
    "num_layers": BLOCKS, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "seq_length": 128,
    "vocab_size": 128, "micro_batch_size": 1, "mock_data": True, "train_iters": 9, "bf16": True,
}  # fmt: skip
PARALLEL: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": MICROBATCHES},
    "fsdp 2": {"data_parallel_sharding_strategy": "optim_grads_params", "global_batch_size": 2 * MICROBATCHES},
}


def passes() -> dict[str, Callable[[], object]]:
    """Forward and backward of all linears in a row, by the name of what they are."""
    torch.manual_seed(1)
    x, g = torch.randn(1, SIDE, SIDE).bfloat16(), torch.randn(1, SIDE, SIDE).bfloat16()
    x.requires_grad_()
    weights = [torch.randn(SIDE, SIDE) for _ in range(LINEARS)]
    plain = [w.bfloat16().requires_grad_() for w in weights]

    def torchs() -> object:
        y = x
        for w in plain:
            y = F.linear(y, w)
        return torch.autograd.grad(y, (x, *plain), g)

    made = {"torch's own": torchs} | {name: _ours(name, x, g, weights) for name in PRECISIONS}
    if triton_cast.installed():
        made |= {f"a cast to launch, {name}": _launched(name) for name in PRECISIONS if name != "bf16"}
        made |= {f"on a GPU to its launches, {name}": _on_a_gpu(name) for name in PRECISIONS if name != "bf16"}
    return made | {f"a block, {name}, {of}": _blocks(of, PARALLEL[name]) for of in ("bf16", "fp8") for name in PARALLEL}


def _on_a_gpu(name: str) -> Callable[[], object]:
    x, g = (torch.randn(1, GPU_SIDE, GPU_SIDE).bfloat16() for _ in range(2))
    run = _ours(name, x.requires_grad_(), g, [torch.randn(GPU_SIDE, GPU_SIDE) for _ in range(LINEARS)], "scaled_mm")

    def product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        return a.new_empty((GPU_SIDE, GPU_SIDE), dtype=rest[7])

    def as_there() -> object:
        with (
            mock.patch.object(triton_cast, "on_nvidia", lambda x: True),
            mock.patch.dict(op.KERNELS, cpu=op.KERNELS["cuda"]),
            mock.patch.object(torch, "_scaled_mm_v2", product),
            mock.patch.object(Hopper, "unfit_device", lambda self, device: None),
            mock.patch.object(MX, "unfit_device", lambda self, device: None),
            mock.patch.object(NVFP4, "unfit_device", lambda self, device: None),
        ):
            return run()

    return as_there


def _ours(
    name: str, x: torch.Tensor, g: torch.Tensor, weights: list[torch.Tensor], impl: str = "emulated"
) -> Callable[[], object]:
    axis: Any = SimpleNamespace(size=1, rank=0, group=None)
    mesh: Any = SimpleNamespace(device_type="cpu")
    linears = [ColumnParallelLinear(f"{i}", w, Region(axis, False), mesh) for i, w in enumerate(weights)]
    for linear in linears:
        linear.precision, linear.impl = LinearPrecision.uniform(name), impl
    context, leaves = RoundingKey(seed=1, iteration=2, stream=0), [x, *(linear.weight for linear in linears)]
    if hasattr(quant, "StepContext"):  # another checkout's linears may be given the key itself
        context = quant.StepContext(key=context)

    def run() -> object:
        y = x
        for linear in linears:
            y = linear(y, context)
        return torch.autograd.grad(y, leaves, g)

    return run


def _blocks(precision: str, parallel: dict[str, Any]) -> Callable[[], object]:
    """An iteration's forward and backward on one of two processes."""
    words = {**MODEL, **parallel, "precision": precision}
    config, plan = check(Config().replace(**words), 2)
    parts = build(config, runtime.Runtime(0, 2, 0, torch.device("cpu")), plan)
    batch = parts.train_loader.batch(0)
    parts.train_loader.close()

    def run() -> object:
        return parts.stepper.gradients(batch, 1), parts.optimizer.zero_grad()

    return run


def _launched(name: str) -> Callable[[], object]:
    g, amax = torch.randn(SIDE, SIDE).bfloat16(), torch.ones(())
    fmt, key = get_format(name), RoundingKey(1, 2, 3)
    output: Output = "operand" if fmt.scale == "fp32" else "swizzled"
    drawn = key if "grad_output" in fmt.stochastic_roles else None
    forms = [Form(fmt, "grad_output", dim, drawn, output) for dim in (1, 0)]

    def run() -> object:
        return [triton_cast.run(g, forms, amax, count=False) for _ in range(LINEARS)]

    return run


@contextmanager
def _no_launches() -> Iterator[None]:
    if not triton_cast.installed():
        yield
        return
    from megatron_snip.quant.kernels import triton_kernels

    nothing = type("Nothing", (), {"__getitem__": lambda self, grid: lambda *args, **options: None})()
    with (
        mock.patch.object(triton_kernels, "cast_kernel", nothing),
        mock.patch.object(triton_kernels, "amax_kernel", nothing),
        mock.patch.object(triton_cast, "_converts", lambda device: triton_launches.FP8),
    ):
        yield


@_no_launches()
def measure(repeats: int = 25) -> dict[str, tuple[float, float]]:
    """Microseconds and Python calls of one linear, cast or block; the passes take turns."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    runs = passes()
    number = {name: BLOCKS * MICROBATCHES if name.startswith("a block") else LINEARS for name in runs}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(5 + repeats):
        for name, run in runs.items():
            begin = time.thread_time()  # backward too, which on a CPU runs in this thread
            run()
            if turn >= 5:
                taken[name].append((time.thread_time() - begin) / number[name] * 1e6)
    calls = {}
    for name, run in runs.items():
        profile = cProfile.Profile()
        profile.runcall(run)
        calls[name] = sum(entry.callcount for entry in profile.getstats()) / number[name]  # type: ignore[attr-defined]
    return {name: (statistics.median(taken[name]), calls[name]) for name in runs}


def _elsewhere(root: Path) -> dict[str, tuple[float, float]]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, host_time; "
    code += "print(json.dumps(host_time.measure()))"
    env = {**os.environ, "PYTHONPATH": str(root.resolve())}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    from harness import machine, report, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the root of another checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    roots = {"now": Path(__file__).resolve().parents[1]}
    if args.before is not None:
        roots = {"before": args.before, **roots}
    found: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in roots}
    for _ in range(args.turns):
        for name, root in roots.items():
            found[name].append(_elsewhere(root))
    rows, results = [], []
    for which, turns in found.items():
        for name in turns[0]:
            taken = statistics.median(turn[name][0] for turn in turns)
            ratio = statistics.median(turn[name][0] / turn["torch's own"][0] for turn in turns)
            calls = turns[0][name][1]
            rows.append([which, name, f"{taken:.0f}", f"{ratio:.2f}", f"{calls:.0f}"])
            results.append({"which": which, "linear": name, "us": taken, "by torch's own": ratio, "calls": calls})
    about = machine("cpu")
    print(report("Host time of a linear", ("", "linear", "us", "by torch's own", "Python calls"), rows, about))
    save(args.json, about, results)


if __name__ == "__main__":
    main()
