"""What the tensor parallel tests run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.mesh import Mesh, build_mesh
from megatron_snip.parallel.data import sum_gradients_over_tp
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
    make_parameter,
)
from megatron_snip.quant import LINEAR_IMPLS, LinearCall, LinearPrecision, RoundingKey, StepContext
from megatron_snip.quant.linears import collectives
from megatron_snip.quant.linears import group as groups
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears.linear_op import pack
from megatron_snip.quant.casts.rounding import random_bits
from tests.dist.helpers.formats import GROUPS, register_formats

B, S, K, N, V = 2, 256, 512, 256, 96  # sequences, tokens, channels in and out, vocabulary
PRECISIONS = ("bf16", "fp8", "fp4", "fp4/fp8/fp4", "fp8/fp4/bf16", "bf16/fp4/fp8", "mxfp8", "nvfp4_plain", "rotated",
              "mxfp8_dequantized", "mxfp4_tetrajet", "fp4/bf16_dequantized/bf16_dequantized", "again")
KEY = RoundingKey(seed=7, iteration=5, stream=0, row0=3 * S)
CONTEXT = StepContext(key=KEY)
KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache  # new groups have to meet, and each has threads: that takes longer than most cases
def start_mesh() -> Mesh:
    return build_mesh("cpu", pp=1, dp=1, tp=dist.get_world_size())


def part(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """This process's part of what all hold."""
    return x.chunk(mesh.tp.size, dim)[mesh.tp.rank].clone()


def part_of_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This process's part [B, S/tp, C] of the tokens of [B, S, C], one after another."""
    return part(x.flatten(0, 1), 0, mesh).unflatten(0, (len(x), -1))


class Recorder:
    """Codes, scales and random bits of every operand that a linear quantises, in the order of the casts."""

    def __init__(self) -> None:
        self.operands: list[dict[str, Any]] = []
        self.real = op.run

    def __call__(self, x: Tensor, forms: Any, *how: Any) -> list[Any]:
        once = list(dict.fromkeys(form.held("codes") for form in forms))  # one read may give codes and values of a form
        codes = self.real(x, once, *how)
        for form, made in zip(once, codes, strict=True):
            self.operands.append(
                {
                    "role": form.role,
                    "codes": made.data,
                    "scales": made.scales,
                    "bits": None if form.key is None else random_bits(form.key, *x.shape),
                }
            )
        return self.real(x, forms, *how)


def apart(layer: ColumnParallelLinear, x: Tensor, context: StepContext = CONTEXT) -> Tensor:
    """What a linear makes of the whole x [B, S, K] within the region, without collectives of its own."""
    return LINEAR_IMPLS[layer.impl](x, local(layer.weight), layer.linear_call(context))


def run_linear(kind: str, precision: str, sequence_parallel: bool) -> dict[str, Any]:
    """One linear forward and backward on this rank: y, dX, dW (all as this rank holds them) and its operands."""
    mesh = start_mesh()
    region = Region(mesh.tp, sequence_parallel)
    x, w, g = draw(B, S, K, seed=1), draw(N, K, seed=2) / 16, draw(B, S, N, seed=3)
    layer = KINDS[kind]("layers.3.mlp.up_proj", w, region, mesh.device_mesh)
    layer.precision = LinearPrecision.parse(precision)
    outside = (lambda t: part_of_tokens(t, mesh)) if sequence_parallel else (lambda t: t.clone())
    x = outside(x) if kind == "column" else part(x, 2, mesh)
    g = part(g, 2, mesh) if kind == "column" else outside(g)
    x.requires_grad_()
    recorder = Recorder()
    op.run = recorder
    try:
        y = apart(layer, region.enter(x)) if kind == "column" else layer(x, CONTEXT)
        y.backward(g)
    finally:
        op.run = recorder.real
    return {"y": y.detach(), "dx": x.grad, "dw": local(layer.weight.grad), "operands": recorder.operands}


def run_all() -> dict[tuple, dict[str, Any]]:
    """Every case in one start of the ranks."""
    register_formats()
    return {case: run_linear(*case) for case in product(KINDS, PRECISIONS, (False, True))}


#: 112 tokens a process: no block of 128 ends with them.
LENGTHS = (S, 224)


class _Observer:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, operands: Any) -> None:
        """Keep everything that it is shown."""
        self.seen += [operands.x, operands.w, operands.grad_output, operands.grad_input]
        self.seen += [] if operands.grad_weight is None else [operands.grad_weight()]


def run_group(
    names: tuple[str, ...], length: int, samples: int, sequence_parallel: bool, beside: bool, observed: bool = False,
    frozen: bool = False,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Three column-parallel linears of one input: ys, dX and dWs (frozen: none); one after another or as a group."""
    mesh = start_mesh()
    region = Region(mesh.tp, sequence_parallel)
    x = draw(samples, length, K, seed=1).bfloat16()
    x = (part_of_tokens(x, mesh) if sequence_parallel else x.clone()).requires_grad_()
    layers, observer = [], _Observer()
    for i, name in enumerate(names):
        layer = ColumnParallelLinear(f"layers.3.{i}", draw(N, K, seed=2 + i) / 16, region, mesh.device_mesh)
        layer.precision = LinearPrecision.parse(name)
        layers.append(layer.requires_grad_(not frozen))
    context = StepContext(key=KEY, observers={layer.name: observer for layer in layers} if observed else {})
    if beside:
        ys = linears_of_one_input(layers, x, context)
    else:
        whole = region.enter(x)
        ys = [apart(layer, whole, context) for layer in layers]
    gs = [part(draw(samples, length, N, seed=7 + i), 2, mesh).bfloat16() for i in range(len(names))]
    torch.autograd.backward(ys, gs)
    weights = [local(layer.weight.grad) for layer in layers if not frozen]
    return {"y": [y.detach() for y in ys], "dx": [x.grad], "dw": weights, "seen": observer.seen}


def run_groups() -> list[tuple[Any, bool]]:
    """Every case, and whether the two ways give the same bits.  Only sequence parallelism cuts tokens."""
    register_formats()
    cases = [(g, *shape) for g in GROUPS for shape in [(S, 2, False), *product(LENGTHS, (1, 2), (True,))]]
    return [(case, _same(run_group(*case, False), run_group(*case, True))) for case in cases]


def _same(first: dict[str, list[Tensor]], second: dict[str, list[Tensor]]) -> bool:
    return all(
        len(first[what]) == len(second[what]) and all(map(torch.equal, first[what], second[what])) for what in first
    )


def run_observed() -> list[bool]:
    """Whether an observer sees the same, of three linears of one input and of one alone."""
    cases = product((("bf16", "bf16", "bf16"), ("bf16", "fp8", "bf16"), ("bf16",)), (False, True), (False, True))
    both = [
        (4 * len(names), [run_group(names, S, 2, sp, beside, True, frozen) for beside in (False, True)])
        for names, sp, frozen in cases
    ]
    return [len(first["seen"]) >= least and _same(first, second) for least, (first, second) in both]


class _Log(TorchDispatchMode):
    """Products, and when collectives begin and are waited for."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.events: list[str] = []
        for name in ("all_gather", "reduce_scatter"):
            monkeypatch.setattr(collectives, name, partial(self._start, name, getattr(collectives, name)))
        monkeypatch.setattr(dist, "all_reduce", partial(self._start, "all_reduce", dist.all_reduce))

    def _start(self, name: str, collective: Any, *args: Any, **options: Any) -> Any:
        work = collective(*args, **options)
        self.events.append(f"{name} begins")
        return SimpleNamespace(wait=lambda: (self.events.append(f"{name} is waited for"), work.wait()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def run_order(sequence_parallel: bool) -> tuple[list[str], list[str]]:
    """What two linears of one input do in forward and in backward, one after another."""
    mesh = start_mesh()
    region = Region(mesh.tp, sequence_parallel)
    layers = [ColumnParallelLinear(f"{i}", draw(N, K, seed=i), region, mesh.device_mesh) for i in range(2)]
    x = draw(1, S // (2 if sequence_parallel else 1), K, seed=1).requires_grad_()
    with pytest.MonkeyPatch.context() as monkeypatch, _Log(monkeypatch) as log:
        ys = linears_of_one_input(layers, x, CONTEXT)
        forward, log.events = log.events, []
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return forward, log.events


def run_largest_magnitudes() -> list[dict[str, list[int]]]:
    """By precision of three linears of one input, the all-reduces of a step's forward and backward, eager and compiled.

    Of the second step: weights are cast already.
    """
    mesh, found = start_mesh(), []
    region = Region(mesh.tp, True)
    for compiled in (False, True):
        found.append({})
        for precision in ("fp8", "fp8/nvfp4_plain/fp8", "nvfp4_plain", "nvfp4"):
            layers = [ColumnParallelLinear(f"{i}", draw(N, K, seed=i), region, mesh.device_mesh) for i in range(3)]
            for layer in layers:
                layer.precision = LinearPrecision.parse(precision)
            x = part_of_tokens(draw(B, S, K, seed=1), mesh).requires_grad_()
            with pytest.MonkeyPatch.context() as monkeypatch:
                sums = CallLog(dist.all_reduce)
                monkeypatch.setattr(dist, "all_reduce", sums)
                for _ in range(2):
                    start = sums.calls
                    ys = linears_of_one_input(layers, x, pack(CONTEXT) if compiled else CONTEXT)
                    middle = sums.calls
                    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
            found[-1][precision] = [middle - start, sums.calls - middle]
    return found


def run_copies() -> tuple[list[str], list[str]]:
    """What two sequences' way into the region and out of it, and back, runs; and what these collectives alone do."""
    mesh = start_mesh()
    region = Region(mesh.tp, True)
    x, g = (part_of_tokens(draw(B, S, K, seed=i), mesh) for i in (1, 2))
    x.requires_grad_()
    part_of_rows = draw(B * S, K, seed=3)
    with LaunchLog() as log:
        region.leave(region.enter(x)).backward(g)
        collectives.start_gather(part_of_rows, mesh.tp)()
        collectives.start_sum(part_of_rows, mesh.tp, scatter=True)()
    whole, own = torch.empty(2 * B * S, K), torch.empty(B * S // 2, K)
    with LaunchLog() as alone:
        for _ in range(3):
            collectives.all_gather(whole, part_of_rows, group=mesh.tp.group)
            collectives.reduce_scatter(own, part_of_rows, group=mesh.tp.group)
    return sorted(log.names), sorted(alone.names)


class CallLog:
    """Counts a function's calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


class LaunchLog(TorchDispatchMode):
    """Names of the operators that run, but for views and those that make room."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in func.name()):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def run_all_sent(cases: tuple[str, ...], compiled: bool) -> list[dict[bool, tuple[dict[str, int], int]]]:
    """`run_sent` of each case, with and without sequence parallelism."""
    return [{sp: run_sent(case, sp, compiled) for sp in (True, False)} for case in cases]


def run_sent(precision: str, sequence_parallel: bool, compiled: bool) -> tuple[dict[str, int], int]:
    """Bytes that three linears of one input hand to collectives, and those kept for backward beside weights."""
    mesh, sent = start_mesh(), Counter[str]()
    region = Region(mesh.tp, sequence_parallel)
    weights = [(draw(N, K, seed=i) / 16).bfloat16() for i in range(3)]
    layers = [ColumnParallelLinear(f"{i}", w, region, mesh.device_mesh) for i, w in enumerate(weights)]
    for layer, one in zip(layers, precision.split(",") * (3 if "," not in precision else 1), strict=True):
        layer.precision = LinearPrecision.parse(one)
    x, saved = draw(B, S, K, seed=1).bfloat16(), {}
    x = (part_of_tokens(x, mesh) if sequence_parallel else x).requires_grad_()
    own = {local(layer.weight).untyped_storage().data_ptr() for layer in layers}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dtype != torch.int64:  # a compiled block's context
            saved[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    def counted(name: str, place: int, collective: Any) -> Any:
        def call(*tensors: Tensor, **options: Any) -> Any:
            sent[name] += tensors[place].numel() * tensors[place].element_size()
            return collective(*tensors, **options)

        return call

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for module, name, place in ((collectives, "all_gather", 1), (collectives, "reduce_scatter", 1), (dist, "all_reduce", 0)):
            patch.setattr(module, name, counted(name, place, getattr(module, name)))
        ys = linears_of_one_input(layers, x, pack(CONTEXT) if compiled else CONTEXT)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return dict(sent), sum(saved.values())


def run_gathered_operands() -> list[tuple[Any, bool]]:
    """Operands for tensor cores, cast in parts and gathered, by how: whether they are the whole's, strides too."""
    mesh, found = start_mesh(), []
    for precision in ("fp8", "fp4", "mxfp8", "mxfp4_floor", "nvfp4_plain"):
        outputs = ["codes", "operand"] * (precision != "nvfp4_plain") + ["swizzled"] * (precision not in ("fp8", "fp4"))
        call = LinearCall(LinearPrecision.uniform(precision), KEY)
        group = groups.Group([call], mesh.tp, True)
        for gemm, output in product(("fprop", "wgrad"), outputs):
            x, form = draw(B * S, K, seed=1).bfloat16(), call.form(gemm, "input", output=output)
            largest = x.abs().amax().float()  # of the whole, for nvfp4_plain
            (whole,) = cast(x, [form])
            (mine,) = cast(part(x, 0, mesh), [form], lambda _, whole=largest: whole)
            (gathered,) = groups._gather([mine], group)()
            pairs = [(gathered.data, whole.data), (gathered.scales, whole.scales)]
            same = all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)
            found.append(((precision, gemm, output), same))
        if "swizzled" in outputs:  # 160 rows are whole blocks, but no whole tile of scales
            wanted = [call.form("fprop", "input", output="swizzled")]
            found.append(((precision, "tiles"), [group.cast_as(wanted, n) for n in (160, 256)] == [[None], wanted]))
    return found


def run_local_parts() -> list[tuple[Any, Any]]:
    """What `local` gives of a parameter and what its gradient comes to, beside `DTensor.to_local`'s."""

    def of(dim: int | None, local_part: Callable[[Tensor], Tensor], *, transposed: bool) -> list[Any]:
        parameter = make_parameter(draw(4, 6, seed=1), dim, mesh.tp, mesh.device_mesh)
        plain = local_part(parameter)
        for seed in (2, 3):  # the second is added to the first
            g = draw(*(plain.shape[::-1] if transposed else plain.shape), seed=seed)
            local_part(parameter).backward(g.T if transposed else g)
        grad = parameter.grad
        own = grad._local_tensor
        assert plain.data_ptr() == parameter._local_tensor.data_ptr()
        return [plain.tolist(), own.tolist(), own.stride(), grad.placements, grad.shape, grad.stride(), grad.dtype]

    mesh = start_mesh()
    cases = product((0, 1, None), (False, True))
    return [
        (of(dim, local, transposed=turned), of(dim, lambda parameter: parameter.to_local(), transposed=turned))
        for dim, turned in cases
    ]


def run_vocabulary(sequence_parallel: bool) -> dict[str, Tensor]:
    """Embedding and cross entropy on this rank, with the gradients of table and logits."""
    mesh = start_mesh()
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(4))
    table = VocabParallelEmbedding(
        draw(V, K, seed=5), Region(mesh.tp, sequence_parallel), mesh.device_mesh, torch.float32
    )
    x = table(tokens)
    g = draw(B, S, K, seed=6)
    x.backward(part_of_tokens(g, mesh) if sequence_parallel else g)
    logits = part(4 * draw(B * S, V, seed=8), 1, mesh).clone()
    losses = vocab_parallel_cross_entropy(logits, tokens.flatten(), mesh.tp, draw(B * S, seed=9))
    return {"x": x.detach(), "table": local(table.weight.grad), "loss": losses, "logits": logits}


def run_partial_gradients(sequence_parallel: bool) -> dict[str, Tensor]:
    """Gradients of two norms, one over heads and one over tokens, and of a linear, drawn by rank, then summed."""
    mesh = start_mesh()
    module = torch.nn.Module()
    tags = {"q_norm": Tags("norm", None, "always"), "norm": Tags("norm", None, "sequence_parallel"),
            "up_proj": Tags("linear", 0), "none": Tags("norm")}  # fmt: skip
    for seed, (child, tag) in enumerate(tags.items()):
        module.add_module(child, torch.nn.Module())
        full = torch.ones(6) if tag.replicated else torch.ones(4, 2)
        weight = make_parameter(full, tag.split_dim, mesh.tp, mesh.device_mesh)
        add_parameter(module.get_submodule(child), "weight", weight, tag)
        gradient = draw(*local(weight).shape, seed=10 * seed + mesh.tp.rank)
        weight.grad = weight.detach().clone()
        local(weight.grad).copy_(gradient)
    sum_gradients_over_tp([module], mesh, sequence_parallel=sequence_parallel)
    return {name: local(p.grad).clone() for name, p in module.named_parameters()}
