"""Speed of the casts against a plain copy of the same tensor, and against other projects' casts.

    python benchmarks/quantise.py                          # CPU: 2 threads, bfloat16 [4096, 8192]
    python benchmarks/quantise.py --device cuda            # GPU: the same tensor, device-to-device copy
    python benchmarks/quantise.py --torchao --microxcaling DIR --compile --json quantise.json

Bandwidth counts what a cast must read and write: 2 bytes an element in, 2 out for values, 1 for codes.  On CPU our
casts and the copy (non-temporal, by the same threads) write into tensors that are there already, as allocating 64 MiB
anew costs ten times the copy; "new output" is the whole call beside torch's clone.  Peers allocate as they always do.
Cases are measured in groups, each with the copy in its turns.  Peers that are not installed are left out, and the
output says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from harness import Case, interleaved, machine, report, save
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Output, finite_amax, reference
from megatron_snip.quant.kernels import cpu
from megatron_snip.quant.kernels.dispatch import cast

KEY = RoundingKey(seed=1, iteration=2, stream=3)
#: (format, role, reduction dim) and the block it stands for
BLOCKS = {
    "fp8 1x128": ("fp8", "input", 1),
    "fp8 128x1": ("fp8", "input", 0),
    "fp4 128x128": ("fp4", "weight", 1),
    "fp8_pow2 1x128": ("fp8_pow2", "input", 1),
    "mxfp8 1x32": ("mxfp8", "input", 1),
    "mxfp8 32x1": ("mxfp8", "input", 0),
    "mxfp4 1x32": ("mxfp4", "input", 1),
    "nvfp4_plain 1x16": ("nvfp4_plain", "input", 1),
    "nvfp4_plain 16x1": ("nvfp4_plain", "input", 0),
}
NEAREST = [*BLOCKS]
STOCHASTIC = ["fp4 128x128", "fp8 1x128", "fp8 128x1", "mxfp4 1x32", "nvfp4_plain 1x16"]
CODES = ["fp8 1x128", "fp8 128x1", "mxfp8 1x32"]
BOTH = ("fp8 1x128", "fp8 128x1")

Measured = tuple[Case, float]  # and bytes an element


def ours(x: Tensor, amax: Tensor, names: tuple[str, ...], output: Output, key: RoundingKey | None) -> Measured:
    """One call that casts x into the named blocks."""
    forms = [Form(get_format(name), role, dim, key, output) for name, role, dim in (BLOCKS[name] for name in names)]
    size = 2.0 + len(forms) * (2 if output == "values" else 1)
    if not cpu.takes(x, forms):
        return (lambda: cast(x, forms, amax=amax)), size
    room = cpu.room(x, forms)
    return (lambda: cpu.fill(x, room, amax)), size


def our_groups(x: Tensor, amax: Tensor) -> dict[str, dict[str, Measured]]:
    """What is measured together, each group beside the copy: slow cases would disturb the fast ones."""
    form = Form(get_format("fp8"), "input", 1)
    both: dict[str, Measured] = {}
    for output in ("values", "codes"):
        both[f"1x128 and 128x1 at once, nearest, {output}"] = ours(x, amax, BOTH, output, None)
    both["1x128 and 128x1 at once, stochastic"] = ours(x, amax, BOTH, "values", KEY)
    return {
        "nearest": {f"{name}, nearest": ours(x, amax, (name,), "values", None) for name in NEAREST},
        "stochastic": {f"{name}, stochastic": ours(x, amax, (name,), "values", KEY) for name in STOCHASTIC},
        "codes": {f"{name}, nearest, codes": ours(x, amax, (name,), "codes", None) for name in CODES},
        "both": both,
        "allocating": {
            "fp8 1x128, nearest, new output": (lambda: cast(x, [form]), 4.0),
            "torch clone, new output": (x.clone, 4.0),
        },
    }


def compiled_cases(x: Tensor) -> dict[str, Measured]:
    """The specification by torch.compile and without it."""
    form = Form(get_format("fp8"), "input", 1)

    def plain() -> Tensor:
        return reference(x, [form])[0].data

    return {
        "our specification, eager: fp8 1x128": (plain, 4.0),
        "our specification, torch.compile: fp8 1x128": (torch.compile(plain), 4.0),
    }


def torchao_cases(x: Tensor) -> dict[str, Measured]:
    """torchao's MX cast and its blockwise FP8 cast, in torch on CPU and in Triton on GPUs, to codes."""
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    blockwise = kernels.triton_fp8_blockwise_act_quant_lhs if x.is_cuda else kernels.torch_blockwise_scale_act_quant_lhs
    return {
        "torchao to_mx: mxfp8 1x32, codes": (lambda: to_mx(x, torch.float8_e4m3fn, 32), 3.0),
        "torchao blockwise: fp8 1x128, codes": (lambda: blockwise(x), 3.0),
    }


def microxcaling_cases(x: Tensor, folder: str) -> dict[str, Measured]:
    """microxcaling's emulation in plain torch, from a checkout."""
    sys.path.insert(0, folder)
    from mx.mx_ops import _quantize_mx

    def run() -> Tensor:
        return _quantize_mx(x, 8, "fp8_e4m3", axes=[-1], block_size=32, round="even", custom_cuda=False)

    return {"microxcaling: mxfp8 1x32": (run, 4.0)}


def peers(x: Tensor, args: argparse.Namespace) -> dict[str, Measured]:
    """Every peer that was asked for and runs."""
    wanted: dict[str, Callable[[], dict[str, Measured]]] = {}
    if args.compile:
        wanted["torch.compile"] = lambda: compiled_cases(x)
    if args.torchao:
        wanted["torchao"] = lambda: torchao_cases(x)
    if args.microxcaling:
        wanted["microxcaling"] = lambda: microxcaling_cases(x, args.microxcaling)
    cases: dict[str, Measured] = {}
    for name, make in wanted.items():
        try:
            made = make()
            for case, _ in made.values():
                case()
            cases |= made
        except Exception as error:  # a peer fails in its own ways; ours are measured all the same
            print(f"left out: {name} ({type(error).__name__}: {error})", file=sys.stderr)
    return cases


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile of the specification too")
    parser.add_argument("--torchao", action="store_true", help="measure torchao's casts too")
    parser.add_argument("--microxcaling", metavar="DIR", help="a checkout of microsoft/microxcaling to measure")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.device == "cpu" and cpu.library() is None:
        sys.exit("the CPU kernel is not built; run pip install -e . with a C++ compiler")
    x = torch.randn(args.rows, args.cols, device=args.device).bfloat16()
    target = torch.empty_like(x)
    copy = (lambda: cpu.copy(x, target)) if args.device == "cpu" else (lambda: target.copy_(x))
    rows, results = [], []
    for group in (*our_groups(x, finite_amax(x)).values(), peers(x, args)):
        if not group:
            continue
        cases = {"plain copy": (copy, 4.0), **group}
        seconds = interleaved({name: case for name, (case, _) in cases.items()}, args.device, args.repeats, ahead=True)
        bandwidth = {name: size * x.numel() / seconds[name] / 1e9 for name, (_, size) in cases.items()}
        for name, taken in seconds.items():
            ratio = bandwidth[name] / bandwidth["plain copy"]
            rows.append([name, f"{taken * 1e3:.2f}", f"{bandwidth[name]:.1f}", f"{ratio:.3f}"])
            results.append({"case": name, "seconds": taken, "bandwidth_gb_s": bandwidth[name], "ratio": ratio})
    about = machine(args.device)
    columns = ("cast", "ms", "GB/s read and written", "bandwidth / copy's")
    print(report(f"Casts of bfloat16 [{args.rows}, {args.cols}]", columns, rows, about))
    save(args.json, about, results)


if __name__ == "__main__":
    main()
