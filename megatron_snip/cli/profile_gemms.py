"""Measure how long the GEMMs of a model's linears take in each format on this machine, for --gemm-times.

    megatron-snip profile --output gemm_times.json --config examples/llama_1b/llama_1b.toml
    megatron-snip profile --output gemm_times.json --formats fp8,fp4 --num-layers 16 --hidden-size 2048 ...

Besides its own options it takes the trainer's, on the command line or by --config FILE: the model's shape,
--seq-length and --micro-batch-size (tokens of a microbatch), --tensor-model-parallel-size (the shards that one
rank multiplies) and --linear-impl.

Convention: a GEMM's time includes fprop's cast of the input and the casts of grad_output.  It leaves out the
weight's casts, which are kept from one optimiser step to the next, and the input's cast for wgrad, which forward
makes from the same read.  Formats take turns, and times are medians; snip/plan/cost.py explains the file's unit.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.cli import parsers
from megatron_snip.cli.command import reported
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.model.spec import spec_of
from megatron_snip.quant import GEMMS, Casts, LinearPrecision, RoundingKey, check_linear, quantized_linear
from megatron_snip.snip.plan.cost import GemmTimes
from megatron_snip.train.validate import check_ranges

_KEY = RoundingKey(seed=1, iteration=2, stream=3)
_NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
#: (format, gemm) -> seconds.
Seconds = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Shard:
    """One rank's shard [n, k] of a linear [out_features, in_features].  count: such linears in the model."""

    out_features: int
    in_features: int
    n: int
    k: int
    count: int

    @property
    def name(self) -> str:
        """The whole linear's shape, as the table names it."""
        return f"{self.out_features}x{self.in_features}"


def shards(config: Config) -> list[Shard]:
    """The different shards of the model's linears.  Raises UserError if the model's shape is unknown."""
    for option in _NEEDED:
        value = getattr(config.model, option)
        if value < 1:
            found = value or "missing or 0"
            raise UserError(f"--{option.replace('_', '-')} is {found}; give the model's shape, or --config FILE")
    tp = config.parallel.tensor_model_parallel_size
    counts: dict[tuple[int, int, int, int], int] = {}
    spec = spec_of(config.model)
    for shape in spec.linear_shapes(config.model):
        n, k, by_row = shape.out_features, shape.in_features, spec.linear_of(shape.name).module.split_dim == 1
        if (k if by_row else n) % tp:
            raise UserError(f"--tensor-model-parallel-size {tp} does not divide {shape.name} {n}x{k}; change it")
        key = (n, k, n, k // tp) if by_row else (n, k, n // tp, k)
        counts[key] = counts.get(key, 0) + 1
    return [Shard(*key, count) for key, count in counts.items()]


def case(shard: Shard, tokens: int, fmt: str, gemm: str, impl: str, device: torch.device) -> Callable[[], object]:
    """A function that runs one GEMM of a shard in a format, on operands that are made here."""
    x, w, g = (
        torch.randn(size, device=device).bfloat16()
        for size in ((tokens, shard.k), (shard.n, shard.k), (tokens, shard.n))
    )
    precision, casts = LinearPrecision.uniform(fmt), Casts()
    impl = "emulated" if fmt == "bf16" else impl  # a plain GEMM, which not every implementation offers

    def forward() -> torch.Tensor:
        return quantized_linear(x, w, precision, key=_KEY, impl=impl, weight_casts=casts)

    if gemm == "fprop":
        return forward
    wanted = (x if gemm == "dgrad" else w).requires_grad_()
    y = forward()
    return lambda: torch.autograd.grad(y, wanted, g, retain_graph=True)


def once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call takes."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(
    shard: Shard, tokens: int, formats: Sequence[str], impl: str, device: torch.device, repeats: int, warmup: int
) -> Seconds:
    """Median seconds by format and GEMM.  Leaves out a format that fails at this shape, and says so."""
    found: Seconds = {}
    for gemm in GEMMS:
        cases: dict[str, Callable[[], object]] = {}
        for fmt in formats:
            try:
                cases[fmt] = case(shard, tokens, fmt, gemm, impl, device)
                cases[fmt]()
            except (ValueError, RuntimeError) as error:
                cases.pop(fmt, None)
                print(f"left out: {fmt} {gemm} of {shard.name}: {error}", file=sys.stderr)
        taken: dict[str, list[float]] = {fmt: [] for fmt in cases}
        for turn in range(warmup + repeats):
            for fmt, run in cases.items():
                seconds = once(run, device)
                if turn >= warmup:
                    taken[fmt].append(seconds)
        found |= {(fmt, gemm): statistics.median(values) for fmt, values in taken.items()}
    complete = {fmt for fmt in formats if all((fmt, gemm) in found for gemm in GEMMS)}
    return {key: seconds for key, seconds in found.items() if key[0] in complete}


def table(measured: Mapping[Shard, Seconds], tokens: int) -> tuple[dict[str, dict[str, float]], dict[str, dict]]:
    """(times, shapes) of GemmTimes: seconds per FLOP in units of BF16's mean, weighted by the number of linears."""

    def per_flop(chosen: Sequence[Shard], fmt: str, gemms: Sequence[str]) -> float:
        seconds = sum(measured[shard][fmt, gemm] * shard.count for shard in chosen for gemm in gemms)
        return seconds / sum(2 * tokens * shard.n * shard.k * shard.count * len(gemms) for shard in chosen)

    def entries(chosen: Sequence[Shard]) -> dict[str, dict[str, float]]:
        formats = [fmt for fmt, gemm in measured[chosen[0]] if gemm == GEMMS[0]]
        complete = [fmt for fmt in formats if all((fmt, GEMMS[0]) in measured[shard] for shard in chosen)]
        return {fmt: {gemm: per_flop(chosen, fmt, [gemm]) / unit for gemm in GEMMS} for fmt in complete}

    unit = per_flop(list(measured), "bf16", GEMMS)
    names = dict.fromkeys(shard.name for shard in measured)
    times = entries(list(measured))
    shapes = {name: entries([shard for shard in measured if shard.name == name]) for name in names}
    # a format that ran only at some shapes has no mean over all, so these leave it out, too
    return times, {name: {fmt: e for fmt, e in rows.items() if fmt in times} for name, rows in shapes.items()}


def supported(formats: Sequence[str], impl: str, device: torch.device) -> list[str]:
    """bf16, and the formats that the implementation runs here.  Names the others on stderr."""
    able = ["bf16"]
    for fmt in dict.fromkeys(formats):
        if fmt == "bf16":
            continue
        try:
            check_linear(impl, LinearPrecision.uniform(fmt), device)
            able.append(fmt)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    return able


def hardware(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def profile(config: Config, formats: Sequence[str], repeats: int, warmup: int) -> GemmTimes:
    """Measure this machine's table.  Raises UserError if nothing but bf16 runs here."""
    device = torch.device(runtime.resolve_backend(config.parallel.distributed_backend, config.parallel.device)[1])
    impl, tokens = config.precision.linear_impl, config.training.micro_batch_size * config.model.seq_length
    tokens //= config.parallel.context_parallel_size
    able = supported(formats, impl, device)
    if able == ["bf16"]:
        raise UserError(f"none of --formats {','.join(formats)} runs here by --linear-impl {impl}")
    measured = {shard: measure(shard, tokens, able, impl, device, repeats, warmup) for shard in shards(config)}
    if any(("bf16", GEMMS[0]) not in found for found in measured.values()):
        raise UserError("bf16, the unit of times, did not run at every shape of the model; see above")
    times, shapes = table(measured, tokens)
    if len(times) < 2:
        raise UserError(f"none of --formats {','.join(formats)} ran at every shape of the model; see above")
    about = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "linear_impl": impl,
        "tokens": tokens,
        "tensor_model_parallel_size": config.parallel.tensor_model_parallel_size,
    }
    return GemmTimes(hardware(device), times, shapes, about)


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    own, rest = parsers.profile().parse_known_args(arguments)
    if own.repeats < 1 or own.warmup < 0:
        raise UserError(f"--repeats is {own.repeats}, --warmup {own.warmup}; give 1 or more, and 0 or more")
    config, output = parse(rest), Path(own.output)
    check_ranges(config, "parallel")
    if config.training.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size is {config.training.micro_batch_size}; give 1 or more")
    check_output("--output", output)
    times = profile(config, [name.strip() for name in own.formats.split(",")], own.repeats, own.warmup)
    times.save(output)
    assert times.times is not None
    print(f"{own.output}: GEMM times of {times.hardware}, BF16 = 1 on average")
    for fmt, row in times.times.items():
        print(f"  {fmt:10}" + "".join(f"  {gemm} {row[gemm]:.3f}" for gemm in GEMMS))
    return 0
