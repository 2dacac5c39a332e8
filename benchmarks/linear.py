"""Time of a linear's forward and backward in each format and implementation, against plain BF16 in the same run.

    python benchmarks/linear.py                            # CPU: 2048 tokens, 2048 -> 2048 and 2048 -> 5632
    python benchmarks/linear.py --device cuda              # GPU: 8192 tokens, up to 8192 -> 28672
    python benchmarks/linear.py --torchao --microxcaling DIR --json linear.json

The weight's casts are kept, as they are from one optimiser step to the next: `--microbatches` calls share one
cast, 1 casts at every call.  Peers that are not installed are left out, and the output says so.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from harness import Case, interleaved, machine, report, save
from torch import Tensor

from megatron_snip.quant import (
    LINEAR_IMPLS,
    Casts,
    LinearPrecision,
    RoundingKey,
    Sizes,
    check_linear,
    quantized_linear,
)
from megatron_snip.runtime import keep_freed_memory

KEY = RoundingKey(seed=1, iteration=2, stream=3)
SHAPES = {"cpu": (2048, ["2048x2048", "2048x5632"]), "cuda": (8192, ["4096x4096", "4096x14336", "8192x28672"])}


def ours(x: Tensor, w: Tensor, g: Tensor, fmt: str, impl: str, microbatches: int) -> Case:
    """Forward and backward by one of our implementations."""
    precision, casts = LinearPrecision.parse(fmt), Casts()
    calls = 0

    def run() -> None:
        nonlocal calls
        if calls % microbatches == 0:  # an optimiser step: the weight is another one
            casts.clear()
        calls += 1
        y = quantized_linear(x, w, precision, key=KEY, impl=impl, weight_casts=casts)
        torch.autograd.grad(y, (x, w), g)

    return run


def plain(x: Tensor, w: Tensor, g: Tensor) -> Case:
    """Forward and backward of torch's own linear in BF16."""
    return lambda: torch.autograd.grad(F.linear(x, w), (x, w), g)


def torchao_cases(x: Tensor, w: Tensor, g: Tensor) -> dict[str, Case]:
    """torchao's training linears that run on this device: Float8Linear on GPUs, emulated MXFP8 on CPUs."""
    n, k = w.shape
    if not x.is_cuda:
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        how = (KernelPreference.EMULATED, ScaleCalculationMode.FLOOR)
        return {"torchao mxfp8, emulated": lambda: torch.autograd.grad(_to_mxfp8_then_scaled_mm(x, w, *how), (x, w), g)}
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    cases: dict[str, Case] = {}
    for recipe in ("tensorwise", "rowwise"):
        module = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, dtype=x.dtype, device=x.device))
        module = convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
        compiled = torch.compile(module)
        cases[f"torchao float8 {recipe}, compiled"] = lambda compiled=compiled, weight=module[0].weight: (
            torch.autograd.grad(compiled(x), (x, weight), g)
        )
    return cases


def microxcaling_cases(x: Tensor, w: Tensor, g: Tensor, folder: str) -> dict[str, Case]:
    """Microsoft's emulation, from a checkout; on CUDA it needs its extension built, so only its Python runs."""
    sys.path.insert(0, folder)
    from mx import linear

    specs = {"w_elem_format": "fp8_e4m3", "a_elem_format": "fp8_e4m3", "scale_bits": 8, "block_size": 32,
             "bfloat": 16, "round": "even", "custom_cuda": False}  # fmt: skip
    return {"microxcaling mxfp8": lambda: torch.autograd.grad(linear(x, w, mx_specs=specs), (x, w), g)}


def cases_of(x: Tensor, w: Tensor, g: Tensor, args: argparse.Namespace) -> dict[str, Case]:
    """Every case that runs on this device, plain BF16 first."""
    cases = {"plain BF16": plain(x, w, g)}
    for impl in args.impls.split(","):
        for fmt in args.formats.split(","):
            if fmt == "bf16" and impl != "emulated":
                continue
            try:
                check_linear(impl, LinearPrecision.parse(fmt), x.device)
            except ValueError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            sizes = Sizes(len(x), w.shape[1], w.shape[0])
            runs = LINEAR_IMPLS[impl].runs(LinearPrecision.parse(fmt), x.device, sizes)[fmt]
            if impl == "transformer_engine" and runs != "Transformer Engine":
                print(f"left out: {impl} {fmt}: {runs}", file=sys.stderr)
                continue
            cases[f"{impl} {fmt}"] = ours(x, w, g, fmt, impl, args.microbatches)
    peers = {"torchao": lambda: torchao_cases(x, w, g)} if args.torchao else {}
    if args.microxcaling:
        peers["microxcaling"] = lambda: microxcaling_cases(x, w, g, args.microxcaling)
    for name, make in peers.items():
        try:
            peer = make()
            for case in peer.values():
                case()
            cases |= peer
        except Exception as error:  # a peer fails in its own ways; ours are measured all the same
            print(f"left out: {name} ({type(error).__name__}: {error})", file=sys.stderr)
    return cases


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--shapes", help="input x output channels, such as 2048x5632,4096x4096")
    parser.add_argument("--formats", default="bf16,fp8,fp4")
    parser.add_argument("--impls", default="emulated,scaled_mm,transformer_engine")
    parser.add_argument("--torchao", action="store_true", help="measure torchao's linears too")
    parser.add_argument("--microxcaling", metavar="DIR", help="a checkout of microsoft/microxcaling to measure")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json")
    args = parser.parse_args()
    known = list(LINEAR_IMPLS)
    if unknown := [impl for impl in args.impls.split(",") if impl not in known]:
        parser.error(f"--impls {','.join(unknown)} unknown; known: {', '.join(known)}")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as training does
    tokens, shapes = SHAPES[args.device]
    tokens = args.tokens or tokens
    rows, results = [], []
    for shape in args.shapes.split(",") if args.shapes else shapes:
        k, n = (int(size) for size in shape.split("x"))
        x, w, g = (torch.randn(size, device=args.device).bfloat16() for size in ((tokens, k), (n, k), (tokens, n)))
        seconds = interleaved(cases_of(x.requires_grad_(), w.requires_grad_(), g, args), args.device, args.repeats)
        base = seconds["plain BF16"]
        for name, taken in seconds.items():
            rows.append([f"{k} -> {n}", name, f"{taken * 1e3:.2f}", f"{taken / base:.3f}", f"{base / taken:.2f}"])
            results.append({"tokens": tokens, "k": k, "n": n, "case": name, "seconds": taken, "ratio": taken / base})
        print(f"{shape} done", file=sys.stderr)
    about = machine(args.device)
    columns = ("channels", "linear", "ms, forward and backward", "time / BF16's", "speed / BF16's")
    print(report(f"Linear, {tokens} tokens", columns, rows, about))
    save(args.json, about, results)


if __name__ == "__main__":
    main()
