"""Runs linears by Transformer Engine's own Python files, over a stand-in for its compiled extension, on a CPU.

    python -m tests.unit.quant.engine_over_stand_in FOLDER CAPABILITY   with requests as JSON on standard input

FOLDER is an unpacked wheel.  It is a program of its own because it tells torch that there is a GPU.  The stand-in
quantises nothing: it keeps the tensor and who would have quantised it, and GEMMs multiply what was kept.  So modules,
recipes, roles, quantizers, their directions and the shapes of GEMMs are the package's own, and the numbers are BF16's.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SIDE = 128
_GEMMS = ("fprop", "dgrad", "wgrad")
_DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
_SHOWN = (
    "dtype", "force_pow_2_scales", "block_scaling_dim", "amax_epsilon", "with_rht", "with_post_rht_amax",
    "with_2d_quantization", "stochastic_rounding",
)  # fmt: skip


class _Anything(ModuleType):
    """A module with every name; each is a function that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **how: None


class _Names(type):
    """A class with every name, which is its own number, as members of pybind11's enums have."""

    def __getattr__(cls, name: str) -> int:
        if name == "__members__":
            return {key: value for key, value in vars(cls).items() if not key.startswith("__")}
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


class _Extension(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := _Names(name, (), {}))
        return made


def load(folder: str, capability: tuple[int, int]) -> tuple[Any, list[dict[str, Any]]]:
    """transformer_engine.pytorch of a folder, and a list that every cast and every GEMM adds to."""
    sys.path.insert(0, folder)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # or it looks for its core library
    tex = _Extension("transformer_engine_torch")
    tex.__spec__ = importlib.machinery.ModuleSpec(tex.__name__, None)
    tex.DType = enum.IntEnum("DType", _DTYPES, start=0)
    names = [f"GEMM{i}_{tensor}" for i in (1, 2, 3) for tensor in ("INPUT", "WEIGHT", "OUTPUT")]
    tex.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", names, start=0)
    names = [f"GRAD_{tensor}{i}" for i in (1, 2, 3) for tensor in ("OUTPUT", "INPUT")]
    tex.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", names, start=0)
    sys.modules[tex.__name__] = tex
    for name in ("transformer_engine.pytorch.onnx_extensions", "einops"):
        sys.modules[name] = _Anything(name)
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda framework: None
    te = importlib.import_module("transformer_engine.pytorch")
    _pretend(capability)
    return te, _stand_in(tex)


def _pretend(capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=1, name="some GPU")
    cuda: Any = torch.cuda
    cuda.is_available, cuda.current_device = lambda: True, lambda: torch.device("cpu")
    cuda.get_device_capability, cuda.get_device_properties = lambda d=None: capability, lambda d=None: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = lambda *a: SimpleNamespace(cuda_stream=0)
    cuda.device = lambda d: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *a, **how: self  # type: ignore[method-assign]
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a: None
    torch.version.cuda = "13.0"
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]
    triton_cast = importlib.import_module("megatron_snip.quant.kernels.triton_cast")
    triton_cast.on_nvidia = lambda *tensors: False  # our casts run on the CPU


def _stand_in(tex: Any) -> list[dict[str, Any]]:
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    linear = importlib.import_module("transformer_engine.pytorch.module.linear")
    seen: list[dict[str, Any]] = []
    held = _held(seen)
    if hasattr(gemm, "_NATIVE_GEMM_INPUT_STORAGES"):
        gemm._NATIVE_GEMM_INPUT_STORAGES += (held,)
    nvfp4 = importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
    on_gpu = ("get_workspace", "get_cublas_workspace", "get_rht_matrix", "get_random_sign_mask_for_rht")
    for module in (gemm, linear, nvfp4):
        for name in on_gpu:
            if hasattr(module, name):
                setattr(module, name, lambda *a, **how: torch.empty(1))

    def quantize(tensor: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
        seen.append({"quantised": [*tensor.shape]})
        if out is None:
            return held(tensor, quantizer)
        out.source = tensor.detach()
        return out

    def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **how: Any) -> tuple[Any, ...]:
        """Column-major, as cuBLAS: [rows of b, rows of a]."""
        x, y = (getattr(each, "source", each) for each in (a, b))
        operands = [described(getattr(each, "quantizer", None)) for each in (a, b)]
        layout = ("T" if transa else "N") + ("T" if transb else "N")
        seen.append({"layout": layout, "operands": operands, "shapes": [[*x.shape], [*y.shape]]})
        out, bias, grad, accumulate = (rest[place] for place in (0, 3, 7, 10))
        x, y = (x.T if transa else x).flatten(0, -2), (y.T if transb else y)
        product = y @ x if out is None else y.to(out.dtype) @ x.to(out.dtype)
        if bias is not None and bias.numel() and not grad:
            product += bias
        if out is not None:
            product = out.add_(product) if accumulate else out.copy_(product)
        return product, None, None, None

    tex.quantize, tex.generic_gemm = quantize, generic_gemm
    return seen


def _held(seen: list[dict[str, Any]]) -> Any:
    try:
        base = importlib.import_module("transformer_engine.pytorch.quantized_tensor").QuantizedTensorStorage
    except ImportError:
        base = importlib.import_module("transformer_engine.pytorch.tensor.quantized_tensor").QuantizedTensorBase

    class Held(base):  # type: ignore[misc,valid-type]
        """A tensor that was to be quantised."""

        requires_grad = False

        def __init__(self, tensor: Tensor, quantizer: Any) -> None:
            self.source, self.quantizer = tensor.detach(), quantizer

        shape = property(lambda self: self.source.shape)
        device = property(lambda self: self.source.device)
        dtype = property(lambda self: self.source.dtype)

        def size(self, *dim: int) -> Any:
            return self.source.size(*dim)

        def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
            pass

        def get_usages(self) -> dict[str, bool]:
            return {"rowwise": self.quantizer.rowwise_usage, "columnwise": self.quantizer.columnwise_usage}

        def prepare_for_saving(self) -> tuple[list[Tensor], Any]:
            return [self.source], self

        def restore_from_saved(self, tensors: list[Tensor]) -> list[Tensor]:
            self.source = tensors[0]
            return tensors[1:]

        def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
            seen.append({"dequantised": [*self.source.shape]})
            return self.source if dtype is None else self.source.to(dtype)

        def get_data_tensors(self) -> tuple[Tensor, ...]:
            return (self.source,)

        @classmethod
        def make_like(cls, other: Any) -> Any:
            return cls(other.source, other.quantizer)

        def clear(self) -> None:
            pass

    return Held


def described(quantizer: Any) -> dict[str, Any]:
    """A quantizer's class and what it was asked for; {} for none."""
    if quantizer is None:
        return {}
    return {"kind": type(quantizer).__name__} | {
        name: int(value) for name in _SHOWN if (value := getattr(quantizer, name, None)) is not None
    }


def run(precision: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Casts and GEMMs of two microbatches of a linear, its recipe, and whether the gradients are those of a product."""
    from megatron_snip.quant import Casts, LinearCall, LinearPrecision
    from megatron_snip.quant.linears.transformer_engine import TransformerEngine

    random = torch.Generator().manual_seed(0)
    x = torch.randn(SIDE, SIDE, generator=random).bfloat16().requires_grad_()
    w = torch.randn(2 * SIDE, SIDE, generator=random).requires_grad_()
    g = torch.randn(SIDE, 2 * SIDE, generator=random).bfloat16()
    parsed, engine = LinearPrecision.parse(precision), TransformerEngine()
    call, passes = LinearCall(parsed, None, weight_casts=Casts()), []
    product = x @ w.bfloat16().T
    expected = [product, *torch.autograd.grad(product, (x, w), g)]
    equal = True
    for _ in range(2):
        seen.clear()
        y = engine(x, w, call)
        got = [y, *torch.autograd.grad(y, (x, w), g)]
        equal &= all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        passes.append([*seen])
    (recipe,) = engine._recipes.values()
    return {"recipe": type(recipe).__name__, "passes": passes, "equal": equal}


def _recipe(parsed: Any) -> Any:
    from functools import partial

    from megatron_snip.quant.linears.te_quantizers import quantizer_for

    recipes = importlib.import_module("transformer_engine.common.recipe")
    return recipes.CustomRecipe(qfactory=partial(quantizer_for, formats=(parsed.fprop, parsed.dgrad, parsed.wgrad)))


def _key(name: str, drawn: int, rank: int = 0) -> Any:
    """The key of a linear's random bits; from here on our quantizers draw this number."""
    from megatron_snip.quant import RoundingKey, name_stream
    from megatron_snip.quant.linears import te_own_quantizer

    torch.manual_seed(0)
    te_own_quantizer.draw = lambda: drawn
    return RoundingKey(torch.initial_seed(), drawn, name_stream(name), rank << 32)


def _ours(precision: str) -> Any:
    """A precision as the stand-in runs it: the formats of Transformer Engine are not quantised."""
    from megatron_snip.quant import LinearPrecision
    from megatron_snip.quant.linears.te_quantizers import _is_theirs

    parsed = LinearPrecision.parse(precision)
    names = (parsed.fprop, parsed.dgrad, parsed.wgrad)
    return LinearPrecision(*("bf16" if _is_theirs(name) else name for name in names))


def own(precision: str, te: Any, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Three microbatches of a te.Linear, two of which share a weight's casts: whether they have our linear's bits.

    kinds: GEMM -> the quantizers of its operands; none for an operand that was dequantised.
    """
    from megatron_snip.quant import LinearPrecision, quantized_linear

    parsed, name = LinearPrecision.parse(precision), "model.layers.3.mlp.up_proj"
    recipe = _recipe(parsed)
    linear = te.Linear(SIDE, 2 * SIDE, bias=True, params_dtype=torch.bfloat16, device="cpu", name=name)
    random = torch.Generator().manual_seed(0)
    w, bias, equal = linear.weight, linear.bias, {}
    with torch.no_grad():
        w.copy_(torch.randn(2 * SIDE, SIDE, generator=random))
        bias.copy_(torch.randn(2 * SIDE, generator=random))
    for first, drawn in ((True, 7), (False, 8), (None, 2**32 - 1)):
        x = torch.randn(4, SIDE // 2, SIDE, generator=random).bfloat16().requires_grad_()
        g = torch.randn(4, SIDE // 2, 2 * SIDE, generator=random).bfloat16()
        key = _key(name, drawn)
        seen.clear()
        with te.autocast(recipe=recipe):
            y = linear(x, is_first_microbatch=first)
        got = [y, *torch.autograd.grad(y, (x, w, bias), g)]
        y = quantized_linear(x.flatten(0, 1), w, _ours(precision), key=key).unflatten(0, (4, -1)) + bias
        expected = [y, *torch.autograd.grad(y, (x, w), g), g.flatten(0, 1).sum(0)]
        for gemm, ours, theirs in zip((*_GEMMS, "bias"), expected, got, strict=True):
            equal[gemm] = equal.get(gemm, True) and torch.equal(ours, theirs)
    gemms = [step for step in seen if "layout" in step]
    return {"equal": equal, "kinds": [[each.get("kind") for each in step["operands"]] for step in gemms]}


def accumulated(te: Any) -> float:
    """The largest relative error of a main gradient to which two microbatches were added."""
    from megatron_snip.quant import LinearPrecision, quantized_linear

    parsed, total = LinearPrecision.uniform("fp4"), torch.zeros(SIDE, SIDE)
    linear = te.Linear(
        SIDE, SIDE, bias=False, params_dtype=torch.bfloat16, device="cpu", fuse_wgrad_accumulation=True, name="fused"
    )
    linear.weight.main_grad = torch.zeros(SIDE, SIDE)
    key = _key("fused", 7)
    random = torch.Generator().manual_seed(0)
    for first in (True, False):
        x = torch.randn(SIDE, SIDE, generator=random).bfloat16().requires_grad_()
        with te.autocast(recipe=_recipe(parsed)):
            y = linear(x, is_first_microbatch=first)
        y.backward(g := torch.randn(SIDE, SIDE, generator=random).bfloat16())
        y = quantized_linear(x, linear.weight, parsed, key=key)
        total += torch.autograd.grad(y, linear.weight, g)[0].float()
    return float((linear.weight.main_grad - total).norm() / total.norm())


def tensor_parallel(te: Any, rank: int, store: str, precision: str) -> dict[str, bool]:
    """Whether parallel te.Linears on two ranks, with and without sequence parallelism, have our bits."""
    import torch.distributed as dist

    from megatron_snip.quant import LinearPrecision

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    recipe, ours, equal = _recipe(LinearPrecision.parse(precision)), _ours(precision), {}
    random = torch.Generator().manual_seed(0)
    for mode in ("column", "row"):
        for sequence in (False, True):
            x = torch.randn(2 * SIDE, 2 * SIDE, generator=random).bfloat16()
            w = torch.randn(2 * SIDE, 2 * SIDE, generator=random).bfloat16()
            g = torch.randn(2 * SIDE, 2 * SIDE, generator=random).bfloat16()
            each = [_one_rank(ours, mode, x, w, g, other) for other in (0, 1)]
            linear = te.Linear(
                2 * SIDE, 2 * SIDE, bias=False, params_dtype=torch.bfloat16, device="cpu", name=mode,
                tp_group=dist.group.WORLD, tp_size=2, parallel_mode=mode, sequence_parallel=sequence,
            )  # fmt: skip
            with torch.no_grad():
                linear.weight.copy_(w.chunk(2, 0 if mode == "column" else 1)[rank])
            tokens = (lambda t: t.chunk(2)[rank]) if sequence else (lambda t: t)
            mine = tokens(x) if mode == "column" else x.chunk(2, 1)[rank]
            mine = mine.contiguous().requires_grad_()
            with te.autocast(recipe=recipe):
                y = linear(mine)
            grad = g.chunk(2, 1)[rank] if mode == "column" else tokens(g)
            got = [y, *torch.autograd.grad(y, (mine, linear.weight), grad.contiguous())]
            expected, partial = [*each[rank]], 1 if mode == "column" else 0  # of dgrad, of fprop
            expected[partial] = tokens(each[0][partial] + each[1][partial])
            for gemm, a, b in zip(_GEMMS, expected, got, strict=True):
                equal[f"{mode} {sequence} {gemm}"] = torch.equal(a, b)
    dist.barrier()
    dist.destroy_process_group()
    return equal


def _one_rank(ours: Any, mode: str, x: Tensor, w: Tensor, g: Tensor, rank: int) -> list[Tensor]:
    """What a rank computes before the collectives: its y, dx and dw."""
    from megatron_snip.quant import quantized_linear

    if mode == "column":
        w, g = w.chunk(2)[rank], g.chunk(2, 1)[rank]
    else:
        x, w = x.chunk(2, 1)[rank], w.chunk(2, 1)[rank]
    x, w = x.contiguous().requires_grad_(), w.contiguous().requires_grad_()
    y = quantized_linear(x, w, ours, key=_key(mode, 7, rank))
    return [y.detach(), *torch.autograd.grad(y, (x, w), g.contiguous())]


def supported(name: str, te: Any) -> bool:
    """Whether the package itself lets a recipe of ours run here."""
    from megatron_snip.quant.linears.transformer_engine import _RECIPES, _autocast

    recipes = importlib.import_module("transformer_engine.common.recipe")
    try:
        with _autocast(te, _RECIPES[name].make(recipes)):
            return True
    except (AssertionError, RuntimeError, ValueError):
        return False


def whole_model(path: str, names: list[str], te: Any, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Module -> casts and GEMMs of a te.Linear of that name under the recipe of a written file."""
    spec: Any = importlib.util.spec_from_file_location("te_recipes", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found = {}
    for name in names:
        linear = te.Linear(SIDE, SIDE, bias=False, params_dtype=torch.bfloat16, device="cpu", name=name)
        seen.clear()
        with te.autocast(recipe=module.RECIPE):
            y = linear(torch.ones(SIDE, SIDE, dtype=torch.bfloat16, requires_grad=True))
        y.backward(torch.ones_like(y))
        found[name] = [*seen]
    return found


def main() -> None:
    """Answer the requests."""
    folder, (major, minor) = sys.argv[1], map(int, sys.argv[2].split("."))
    requests, out, sys.stdout = json.load(sys.stdin), sys.stdout, sys.stderr
    te, seen = load(folder, (major, minor))
    answers: dict[str, Any] = {"version": importlib.import_module("transformer_engine").__version__}
    answers["linears"] = {precision: run(precision, seen) for precision in requests.get("linears", ())}
    answers["supported"] = {name: supported(name, te) for name in requests.get("formats", ())}
    answers["own"] = {precision: own(precision, te, seen) for precision in requests.get("own", ())}
    answers["accumulated"] = accumulated(te) if requests.get("accumulated") else None
    parallel = requests.get("tensor_parallel")
    answers["tensor_parallel"] = tensor_parallel(te, **parallel) if parallel else {}
    if "module" in requests:
        answers["module"] = whole_model(requests["module"], requests["names"], te, seen)
    json.dump(answers, out)


if __name__ == "__main__":
    main()
