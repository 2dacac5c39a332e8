"""Steps of gpu.py: whether the tensor cores multiply right, and what a linear costs beside torch's and torchao's."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu import Contact, Table, runs
from harness import Case, interleaved, live_peak
from torch import Tensor

from megatron_snip.quant import Casts, LinearPrecision, RoundingKey, quantize, quantized_linear
from megatron_snip.quant.casts.cast import Operand
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.operands import LinearCall, Operands
from megatron_snip.quant.linears.scaled_mm import Hopper

KEY = RoundingKey(seed=1, iteration=2, stream=3)
#: Tokens and shapes (input x output channels); the goals are told of the last one.
TOKENS, SHAPES = 8192, ((2048, 2048), (2048, 5632), (4096, 14336), (8192, 28672))


def products(contact: Contact) -> Table:
    """All three GEMMs against float64 products of the same codes, for short and long sums, zero and NaN blocks.

    As in training: of a float32 weight, whose casts are kept.
    """
    table = Table("GEMMs against float64", ("precision", "K / 128", "operands", "fprop", "dgrad", "wgrad"))
    impl = "emulated" if contact.rehearse else "scaled_mm"
    for name in ("fp8", "fp4", "fp8_pow2"):
        for blocks in (1, 2, 3) if contact.rehearse else (1, 2, 3, 5, 64):
            for kind in ("normal", "zero blocks", "NaN"):
                try:
                    errors = _errors(contact, impl, name, blocks * 128, kind)
                except torch.AcceleratorError:  # after which CUDA is of no use
                    raise
                except RuntimeError as error:
                    table.bad.append(f"{name}, K = {blocks} x 128, {kind}: {error}")
                    continue
                table.rows.append((name, str(blocks), kind, *(f"{error:.1e}" for error in errors)))
                # bf16 results are off by 1.1e-3 in the mean; Hopper's sums have 14 bits
                table.bad += [
                    f"{name}, K = {blocks} x 128, {kind}: {gemm} is off by {error:.1e}"
                    for gemm, error in zip(("fprop", "dgrad", "wgrad"), errors, strict=True)
                    if not error < 6e-3
                ]
        contact.keep(table)
    return table


def _errors(contact: Contact, impl: str, name: str, k: int, kind: str) -> list[float]:
    """Relative distance of each GEMM's result from the float64 one; infinite where NaN stand elsewhere."""
    generator = torch.Generator(contact.device).manual_seed(k)
    sizes = ((256, k), (384, k), (256, 384))
    x, w, g = (torch.randn(s, generator=generator, device=contact.device).bfloat16() for s in sizes)
    if kind == "zero blocks":
        x[:128, : k // 2], w[128:256], g[:, 128:256] = 0, 0, 0
    elif kind == "NaN":
        x[5, 7], w[130, 3], g[200, 300] = torch.nan, torch.nan, torch.nan
    precision = LinearPrecision.parse(name)
    master = w.float().requires_grad_()
    y = quantized_linear(x.requires_grad_(), master, precision, key=KEY, impl=impl, weight_casts=Casts())
    made = [y.detach(), *torch.autograd.grad(y, (x, master), g)]
    seen = Operands(x.detach(), w.detach(), g, LinearCall(precision, KEY))

    def exact(gemm: str, role: str) -> Tensor:
        return seen.quantized(gemm, role, name)[0].double()

    expected = [
        exact("fprop", "input") @ exact("fprop", "weight").T,
        exact("dgrad", "grad_output") @ exact("dgrad", "weight"),
        exact("wgrad", "grad_output").T @ exact("wgrad", "input"),
    ]
    found = []
    for ours, theirs in zip(made, expected, strict=True):
        alike = torch.equal(ours.isnan(), theirs.isnan())
        difference = (ours.double() - theirs).nan_to_num(0.0).norm()
        norm = theirs.nan_to_num(0.0).norm()
        found.append(float(difference / norm) if alike and norm > 0 else (0.0 if alike else float("inf")))
    return found


class Setting(NamedTuple):
    """How one of our linears is called."""

    precision: str
    impl: str
    cached: bool  # the weight's casts are there already, as in all microbatches but the first
    master: torch.dtype

    @property
    def name(self) -> str:
        """As in the table."""
        kept = ", weight cached" if self.cached else ""
        return f"{self.impl} {self.precision}, {str(self.master).removeprefix('torch.')} master{kept}"


SETTINGS = [
    *(Setting(fmt, "auto", cached, torch.float32) for fmt in ("fp8", "fp4") for cached in (False, True)),
    *(Setting(fmt, "auto", False, torch.bfloat16) for fmt in ("fp8", "fp4")),
    *(Setting(fmt, "emulated", False, torch.float32) for fmt in ("fp8", "fp4")),
]


def linears(contact: Contact) -> Table:
    """Forward and backward in eager mode and in a CUDA graph, by plain BF16's of the same run."""
    columns = ("channels", "linear", "ms, eager", "speed by BF16's", "ms, CUDA graph", "speed by BF16's", "peak MB")
    table = Table("Linears, forward and backward", columns)
    tokens, shapes = (128, ((128, 256),)) if contact.rehearse else (TOKENS, SHAPES)
    # all at once: after a capture that fails torch's generator of CUDA may refuse
    operands = [
        [torch.randn(s, device=contact.device).bfloat16() for s in ((tokens, k), (n, k), (tokens, n))]
        for k, n in shapes
    ]
    for (k, n), (x, w, g) in reversed(list(zip(shapes, operands, strict=True))):  # the goals' first
        if contact.left() < 20:
            table.bad.append(f"{k} -> {n}: left out, the time was over")
            continue
        cases = {"plain BF16": _plain(x, w, g)} | {s.name: _ours(x, w, g, s) for s in SETTINGS}
        cases |= {f"the three GEMMs alone, {fmt}": _gemms(contact, x, w, g, fmt) for fmt in ("fp8", "fp4")}
        cases = {name: case for name, case in cases.items() if runs(name, case, table.bad)}
        _measure(contact, table, f"{k} -> {n}", cases, graphs=set(cases))
        contact.keep(table)
    if not contact.rehearse and contact.left() > 40:  # compiling them takes long
        k, n = shapes[-1]
        plain = {"plain BF16": _plain(*operands[-1])}
        _measure(contact, table, f"{k} -> {n}, peers", plain | _peers(*operands[-1], table.notes), graphs=set(plain))
    table.notes.append(f"{tokens} tokens; a weight that is not cached is cast in each call, as in a first microbatch")
    return table


def _plain(x: Tensor, w: Tensor, g: Tensor) -> Case:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return lambda: torch.autograd.grad(F.linear(x, w), (x, w), g)


def _ours(x: Tensor, w: Tensor, g: Tensor, setting: Setting) -> Case:
    x, w = x.detach().requires_grad_(), w.detach().to(setting.master).requires_grad_()
    precision, casts = LinearPrecision.parse(setting.precision), Casts()

    def run() -> object:
        if not setting.cached:
            casts.clear()
        y = quantized_linear(x, w, precision, key=KEY, impl=setting.impl, weight_casts=casts)
        return torch.autograd.grad(y, (x, w), g)

    return run


def _gemms(contact: Contact, x: Tensor, w: Tensor, g: Tensor, name: str) -> Case:
    """fprop, dgrad and wgrad of operands that are cast already."""
    call, backend = LinearCall(LinearPrecision.parse(name), KEY), Emulated() if contact.rehearse else Hopper()

    def made(tensor: Tensor, gemm: str, role: str) -> Operand:
        return cast(tensor, [call.form(gemm, role, output=backend.output(role, kept=False))])[0]

    operands = {
        "fprop": (made(x, "fprop", "input"), made(w, "fprop", "weight"), torch.bfloat16),
        "dgrad": (made(g, "dgrad", "grad_output"), made(w, "dgrad", "weight"), torch.bfloat16),
        "wgrad": (made(g, "wgrad", "grad_output"), made(x, "wgrad", "input"), torch.float32),
    }
    return lambda: [backend.multiply(gemm, a, b, x.dtype, out) for gemm, (a, b, out) in operands.items()]


def _peers(x: Tensor, w: Tensor, g: Tensor, notes: list[str]) -> dict[str, Case]:
    """torchao's training linears and DeepGEMM's products, where they are installed."""
    from linear import torchao_cases

    x = x.detach().requires_grad_()
    found: dict[str, Case] = {}
    try:
        found |= torchao_cases(x, w, g)
    except Exception as error:  # a peer fails in its own ways; ours are measured all the same
        notes.append(f"torchao's float8 is left out: {type(error).__name__}: {error}")
    try:
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

        module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, device=w.device)
        blockwise = Float8BlockwiseLinear.from_float(module)
        found["torchao blockwise fp8"] = lambda: torch.autograd.grad(blockwise(x), (x, blockwise.weight), g)
    except Exception as error:
        notes.append(f"torchao's blockwise is left out: {type(error).__name__}: {error}")
    try:
        found |= _deep_gemm(x, w, g)
    except Exception as error:
        notes.append(f"DeepGEMM is left out: {type(error).__name__}: {error}")
    return {name: case for name, case in found.items() if runs(name, case, notes)}


def _deep_gemm(x: Tensor, w: Tensor, g: Tensor) -> dict[str, Case]:
    """The three FP8 GEMMs of our codes by DeepGEMM, whose wgrad adds to what is there; x [T,K], w [N,K], g [T,N].

    Its left operands [M,K] and right ones [N,K] are contiguous along K.  Source: fp8_gemm_nt of its README and sources.
    """
    import deep_gemm

    def pair(tensor: Tensor, role: str, dim: int) -> tuple[Tensor, Tensor]:
        made = quantize(tensor, "fp8", role=role, dim=dim)
        codes = made.codes.view(torch.float8_e4m3fn)
        return (codes, made.scales) if dim == 1 else (codes.T.contiguous(), made.scales.T.contiguous())

    products = [
        (pair(x, "input", 1), pair(w, "weight", 1), torch.bfloat16, {}),
        (pair(g, "grad_output", 1), pair(w, "weight", 0), torch.bfloat16, {}),
        (pair(g, "grad_output", 0), pair(x, "input", 0), torch.float32, {"recipe": (1, 1, 128)}),
    ]

    def run() -> list[Tensor]:
        made = []
        for a, b, dtype, options in products:
            d = torch.zeros(len(a[0]), len(b[0]), dtype=dtype, device=x.device)
            deep_gemm.fp8_gemm_nt(a, b, d, c=d if dtype == torch.float32 else None, **options)
            made.append(d)
        return made

    return {"DeepGEMM, the three GEMMs alone, fp8": run}


def _measure(contact: Contact, table: Table, shape: str, cases: dict[str, Case], graphs: set[str]) -> None:
    repeats, warmup = (1, 0) if contact.rehearse else (9, 3)
    eager = interleaved(cases, contact.device, repeats, warmup)
    replays: dict[str, Case] = {}
    for name in graphs:
        try:
            replays[name] = graphed(contact, cases[name])
        except Exception as error:
            table.bad.append(f"{shape} {name}: no CUDA graph, {type(error).__name__}: {str(error)[:200]}")
    replayed = interleaved(replays, contact.device, repeats, warmup, ahead=True)
    base = {"eager": eager["plain BF16"], "graph": replayed.get("plain BF16")}
    for name, case in cases.items():
        again = replayed.get(name)
        graph = (f"{again * 1e3:.3f}", f"{base['graph'] / again:.2f}") if again and base["graph"] else ("-", "-")
        peak = live_peak(case, contact.device) / 1e6
        table.rows.append(
            (shape, name, f"{eager[name] * 1e3:.3f}", f"{base['eager'] / eager[name]:.2f}", *graph, f"{peak:.0f}")
        )


def graphed(contact: Contact, case: Case) -> Case:
    """Replays of a case from a CUDA graph, without the host's time; a rehearsal calls the case itself."""
    if contact.rehearse:
        return case
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case()
    return graph.replay
