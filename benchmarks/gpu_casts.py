"""Steps of gpu.py: what the card can do at most, whether casts give the specification's bits, and how fast they are."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu import Contact, Table, call, runs
from harness import Case, interleaved
from kernel_resources import HOPPER, Launch, devices, in_tiling, sweep
from kernel_resources import LAUNCHES as LAUNCHED
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.mesh import Axis
from megatron_snip.model import rotary
from megatron_snip.parallel import loss
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Output, finite_amax, swiglu_product
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.kernels.op import swiglu_gradients
from megatron_snip.quant.kernels.triton_launches import Tiling

KEY = RoundingKey(seed=1, iteration=2, stream=3)


def _times(contact: Contact, cases: dict[str, Case], repeats: int = 15) -> dict[str, float]:
    repeats, warmup = (1, 0) if contact.rehearse else (repeats, 3)
    return interleaved(cases, contact.device, repeats, warmup, ahead=True)


def ceilings(contact: Contact) -> Table:
    """A large copy and large GEMMs: what everything else is divided by."""
    table = Table("Ceilings", ("what", "ms", "rate"))
    side = 256 if contact.rehearse else 8192
    x = torch.randn(side * 4, side, device=contact.device).bfloat16()
    target = torch.empty_like(x)
    a, b = (torch.randn(side, side, device=contact.device).bfloat16() for _ in range(2))
    cases: dict[str, Case] = {"copy": lambda: target.copy_(x), "bf16 GEMM": lambda: a @ b.T}
    if not contact.rehearse:
        codes = [t.clamp(-4, 4).to(torch.float8_e4m3fn) for t in (a, b)]
        one = torch.ones((), device=contact.device)
        cases["fp8 GEMM, one scale a tensor, fast accumulation"] = lambda: torch._scaled_mm(
            codes[0], codes[1].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        cases["fp8 GEMM, one scale a tensor"] = lambda: torch._scaled_mm(
            codes[0], codes[1].T, one, one, out_dtype=torch.bfloat16
        )
    for name, seconds in _times(contact, cases).items():
        rate = (
            f"{4 * x.numel() / seconds / 1e9:.0f} GB/s"
            if name == "copy"
            else f"{2 * side**3 / seconds / 1e12:.0f} TFLOP/s"
        )
        table.rows.append((name, f"{seconds * 1e3:.3f}", rate))
    table.notes.append(f"copy of bfloat16 {list(x.shape)}, read and written; GEMMs of {side} x {side} x {side}")
    return table


def bits(contact: Contact) -> Table:
    """The core set of casts, in as many processes as compile in parallel."""
    command = [sys.executable, "-m", "tests.gpu.core"]
    command += ["--rehearse", "--every", "17"] if contact.rehearse else ["--workers", str(min(14, os.cpu_count() or 1))]
    seconds, log = max(30.0, contact.left()), contact.folder / "bits.txt"
    call([*command, "--seconds", str(seconds - 15.0)], log, seconds)
    lines = [line for line in log.read_text().splitlines() if line.startswith('{"cases"')]
    if not lines:
        raise RuntimeError(f"tests.gpu.core told no result: {log.read_text()[-2000:]}")
    found = json.loads(lines[-1])
    table = Table("Casts against the specification, bit for bit", ("cases", "that differ"))
    table.rows.append((str(found["cases"]), str(len(found["differences"]))))
    table.bad += found["differences"]
    return table


#: What training launches: name, (format, role, dim, stochastic) of each form, output.
LAUNCHES: dict[str, tuple[tuple[tuple[str, str, int, bool], ...], Output]] = {
    f"{fmt} {name}": (forms, output)
    for fmt, operand in (("fp8", "operand"), ("fp4", "operand"), ("mxfp8", "swizzled"), ("nvfp4_plain", "swizzled"))
    for name, forms, output in (
        ("values, nearest", ((fmt, "input", 1, False),), "values"),
        ("codes, nearest", ((fmt, "input", 1, False),), "codes"),
        ("weight, operand", ((fmt, "weight", 1, False),), operand),
        ("input, both operands", ((fmt, "input", 1, False), (fmt, "input", 0, False)), operand),
        (
            "gradient, both operands, stochastic",
            ((fmt, "grad_output", 1, True), (fmt, "grad_output", 0, True)),
            operand,
        ),
    )
}


def _written(forms: Sequence[Form]) -> float:
    """Bytes an element that a cast writes, beside scales."""
    return sum(2.0 if form.output == "values" else 0.5 if form.packed else 1.0 for form in forms)


def casts(contact: Contact) -> Table:
    """Bandwidth of the casts that training launches, by a copy's of the same run."""
    table = Table("Casts", ("cast", "ms", "GB/s read and written", "by the copy's"))
    x = torch.randn(*((256, 512) if contact.rehearse else (8192, 8192)), device=contact.device).bfloat16()
    target, amax = torch.empty_like(x), finite_amax(x)
    sizes = {"copy": 4.0}
    cases: dict[str, Case] = {"copy": lambda: target.copy_(x)}
    for name, (described, output) in LAUNCHES.items():
        forms = [
            Form(get_format(fmt), role, dim, KEY if random else None, output) for fmt, role, dim, random in described
        ]
        cases[name] = _cast_case(x, forms, amax)
        sizes[name] = 2.0 + _written(forms)
    for name, moved, case in _fused(x):
        cases[name], sizes[name] = case, moved
    seconds = _times(contact, {name: case for name, case in cases.items() if runs(name, case, table.bad)})
    rates = {name: sizes[name] * x.numel() / taken / 1e9 for name, taken in seconds.items()}
    for name, taken in seconds.items():
        table.rows.append((name, f"{taken * 1e3:.3f}", f"{rates[name]:.0f}", f"{rates[name] / rates['copy']:.2f}"))
    table.notes.append(f"bfloat16 {list(x.shape)}; outputs are allocated in each call, as in training")
    return table


def _fused(x: Tensor) -> Iterator[tuple[str, float, Case]]:
    """What one launch does in place of several, and those several: names, bytes an element, cases."""
    up = x.flip(0)
    forms = [Form(get_format("fp8"), "input", dim, output="operand") for dim in (1, 0)]
    yield "fp8 SwiGLU's product, one launch", 6.0, lambda: cast(x, forms, up=up)
    yield "SwiGLU's product in three launches", 14.0, lambda: cast(swiglu_product(x, up), forms)
    scaled = [Form(get_format("nvfp4_plain"), "input", dim, output="swizzled") for dim in (1, 0)]
    yield "nvfp4_plain SwiGLU's product, two launches", 9.0, lambda: cast(x, scaled, up=up)
    yield "nvfp4_plain SwiGLU's product in four launches", 15.0, lambda: cast(swiglu_product(x, up), scaled)
    yield "SwiGLU's gradients, one launch", 10.0, lambda: swiglu_gradients(up, x, up, True, True)
    yield "SwiGLU's gradients in four launches", 22.0, lambda: (
        torch.ops.aten.silu_backward(up * up, x), up * torch.nn.functional.silu(x)
    )  # fmt: skip
    logits, labels, scale = x.clone(), x[:, 0].long() % 64, x[:, 1].float()
    loss_of = partial(loss.vocab_parallel_cross_entropy, logits, labels, Axis(1, 0, None), scale)  # type: ignore[arg-type]
    yield "cross entropy with its gradient, two launches", 6.0, loss_of
    by_torch = mock.patch.object(loss, "fused", lambda logits: False)
    yield "cross entropy with its gradient by torch's operators", 42.0, by_torch(loss_of)
    heads = x.view(1, len(x), -1, 128).transpose(1, 2)
    cos, sin = x[:, :128].contiguous(), x[:, -128:].contiguous()
    for back, plain, count in ((False, rotary._rotate, "five"), (True, rotary._rotate_back, "six")):
        words = "rotary positions backward" if back else "rotary positions"
        yield f"{words}, one launch", 4.0, partial(rotary._rotated, heads, cos, sin, back=back)
        yield f"{words} in {count} launches", 20.0 + 4.0 * back, partial(plain, heads, cos, sin)


def as_a_gpu_rounds(contact: Contact) -> AbstractContextManager[None]:
    """Inside, a rehearsal's interpreter rounds as a GPU's instructions do."""
    if not contact.rehearse:
        return nullcontext()
    from tests.unit.quant.kernels.instructions import as_instructions_round

    return as_instructions_round()


def tilings(contact: Contact) -> Table:
    """Every number of rows and warps a program, for the launches of kernel_resources.py: what TILINGS should say."""
    with as_a_gpu_rounds(contact):
        return _tilings(contact)


def _tilings(contact: Contact) -> Table:
    table = Table("Rows and warps of a cast", ("launch", "rows x warps", "registers", "spilled", "ms", "by the copy's"))
    shape = (128, 128) if contact.rehearse else (8192, 8192)
    launches = list(LAUNCHED.items())[::6]
    if not contact.rehearse:
        hopper = torch.cuda.get_device_capability() < (10, 0)
        launches = [(name, launch) for name, launch in LAUNCHED.items() if not hopper or HOPPER in devices(launch)]
        _compile_side_by_side([name for name, _ in launches])
    x = torch.randn(*shape, device=contact.device).bfloat16()
    target, amax, master, up = torch.empty_like(x), finite_amax(x), x.float(), x.flip(0)
    for name, launch in launches:
        if contact.left() < 15:
            table.bad.append(f"{name}: left out, the time was over")
            continue
        source = x if launch.dtype is None else master
        cases: dict[str, Case] = {"copy": lambda: target.copy_(x)}
        kernels = {}
        for tiling in sweep(launch)[: 2 if contact.rehearse else None]:
            case = partial(_tiled, source, up, launch, amax, tiling)
            kernels[str(tiling)] = _compiled(case)
            cases[str(tiling)] = case
        seconds = _times(contact, cases)
        moved = source.element_size() * (1 + launch.product) + _written(launch.forms)
        best = min(kernels, key=lambda words: seconds[words])
        for words, kernel in kernels.items():
            share = moved / 4 * seconds["copy"] / seconds[words]
            marks = f"{' *' if words == str(launch.tiling) else ''}{' best' if words == best else ''}"
            used = [str(getattr(kernel, field, "-")) for field in ("n_regs", "n_spills")]
            table.rows.append((name, words + marks, *used, f"{seconds[words] * 1e3:.3f}", f"{share:.2f}"))
        contact.keep(table)
    table.notes.append(f"[{shape[0]}, {shape[1]}]; * is what TILINGS in triton_launches.py says")
    return table


def _compile_side_by_side(names: Sequence[str]) -> None:
    """Compile all tilings of these launches, in as many processes as there are CPUs: Triton keeps them in its cache."""
    jobs = [(name, tiling) for name in names for tiling in sweep(LAUNCHED[name])]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(_launched_once, jobs))


def _launched_once(job: tuple[str, Tiling]) -> None:
    name, tiling = job
    launch = LAUNCHED[name]
    x = torch.randn(256, 512, device="cuda").to(torch.float32 if launch.dtype is not None else torch.bfloat16)
    _tiled(x, x.flip(0), launch, finite_amax(x), tiling)


def _tiled(x: Tensor, up: Tensor, launch: Launch, amax: Tensor, tiling: Tiling) -> object:
    with in_tiling(tiling):
        return launch.of(x, up, amax)


def _compiled(case: Case) -> object:
    """The kernel that a case launches last; None in a rehearsal."""
    from megatron_snip.quant.kernels import triton_kernels

    kernel, seen = triton_kernels.cast_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: seen.append(kernel[grid](*args, **kwargs))

    with mock.patch.object(triton_kernels, "cast_kernel", Watched()):
        case()
    return seen[-1]


def _cast_case(x: Tensor, forms: list[Form], amax: Tensor) -> Case:
    return lambda: cast(x, forms, amax=amax)
