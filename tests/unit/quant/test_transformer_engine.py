"""Linears by Transformer Engine, against a stand-in for the package, which runs on GPUs only (fake_engine.py).

test_transformer_engine_contract.py has the package's own files.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_snip.parallel.tensor import ColumnParallelLinear, Region, linears_of_one_input
from megatron_snip.quant import (
    GEMMS,
    LINEAR_IMPLS,
    Casts,
    LinearCall,
    LinearPrecision,
    RoundingKey,
    Sizes,
    StepContext,
    check_linear,
    compiled_impl,
)
from megatron_snip.quant.linears import by_gemm, transformer_engine
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.operands import REDUCTION_DIM
from megatron_snip.quant.linears.te_quantizers import quantizer_for
from megatron_snip.quant.linears.transformer_engine import EXACT, FORMATS, TransformerEngine
from tests.unit.quant.fake_engine import (
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    engine,
)

__all__ = ["engine"]

KEY = RoundingKey(seed=1, iteration=2, stream=3)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 16, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(24, 16, generator=generator).requires_grad_()
    return x, w, torch.randn(32, 24, generator=generator).bfloat16()


def call(fmt: str, casts: Casts | None = None, **how: Any) -> LinearCall:
    return LinearCall(LinearPrecision.parse(fmt), KEY, weight_casts=casts, **how)


def test_the_master_weight_gets_its_gradient_through_a_module_without_weights(engine):
    x, w, g = tensors()
    y = TransformerEngine()(x, w, call("fp8", Casts()))
    expected = x @ w.bfloat16().T
    assert torch.equal(y, expected)
    for ours, theirs in zip(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(expected, (x, w), g), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    assert engine.made[0].weight.device.type == "meta"


@pytest.mark.parametrize(
    ("fmt", "kind", "fields"),
    [
        ("fp8", Float8BlockScaling, {"use_f32_scales": True, "fp8_quant_fwd_inp": QParams(False, 0.0),
                                     "fp8_quant_fwd_weight": QParams(False, 0.0),
                                     "fp8_quant_bwd_grad": QParams(False, 0.0)}),
        ("fp8_hybrid", Float8BlockScaling, {"use_f32_scales": True, "fp8_format": Format.HYBRID}),
        ("fp8_pow2", Float8BlockScaling, {"use_f32_scales": False, "fp8_format": Format.E4M3,
                                          "fp8_quant_fwd_weight": QParams(True, 0.0)}),
        ("mxfp8", MXFP8BlockScaling, {}),
        ("nvfp4_plain", NVFP4BlockScaling, {"disable_rht": True, "disable_2d_quantization": True}),
        ("nvfp4", NVFP4BlockScaling, {"disable_rht": False, "disable_2d_quantization": False}),
    ],
)  # fmt: skip
def test_a_format_has_its_recipe(fmt, kind, fields, engine):
    x, w, _ = tensors()
    TransformerEngine()(x, w, call(fmt))
    (seen,) = engine.calls
    assert type(seen.recipe) is kind
    for name, value in fields.items():
        assert getattr(seen.recipe, name) == value, name


def test_the_weight_is_quantised_once_a_step_and_anew_after_a_switch(engine):
    x, w, _ = tensors()
    linear, casts, other = TransformerEngine(), Casts(), Casts()
    for _ in range(2):
        linear(x, w, call("fp8", casts))
    linear(x, w, call("fp8", other))
    assert [c.first for c in engine.calls] == [True, False, True]
    assert engine.calls[0].module is engine.calls[1].module is not engine.calls[2].module
    with torch.no_grad():
        w.add_(1.0)
    linear(x, w, call("fp8", casts))
    casts.clear()
    linear(x, w, call("fp8", casts))
    assert [c.first for c in engine.calls[3:]] == [True, True] and len(engine.made) == 2
    linear(x, w, call("mxfp8", casts))
    linear(x, w, call("mxfp8", casts))
    linear(x, w, call("fp8", casts))
    assert [c.first for c in engine.calls[5:]] == [True, False, True] and len(engine.made) == 4
    linear(x, w, call("fp8"))
    assert engine.calls[-1].first is None


def test_a_float32_weight_is_rounded_once_a_step(engine):
    """Every microbatch reads one copy of it, and the weight gets the gradient of each."""
    x, w, g = tensors()
    linear, casts = TransformerEngine(), Casts()
    for _ in range(4):
        linear(x, w, call("fp8", casts)).backward(g)
    seen = [c.weight for c in engine.calls]
    assert len({weight.data_ptr() for weight in seen}) == 1 and torch.equal(seen[0], w.bfloat16())
    (expected,) = torch.autograd.grad(x @ w.bfloat16().T, w, g)
    assert torch.equal(w.grad, 4 * expected)
    with torch.no_grad():
        w.add_(1.0)
    linear(x, w, call("fp8", casts))
    assert torch.equal(engine.calls[-1].weight, w.bfloat16())


def test_a_format_has_one_recipe(engine):
    """A new object would have a module make its quantizers anew at every call."""
    x, w, _ = tensors()
    linear, casts = TransformerEngine(), [Casts(), Casts()]
    for fmt in ("fp8", "fp8/fp8/bf16", "fp8", "fp8/fp8/bf16"):
        for each in casts:
            linear(x, w, call(fmt, each))
    assert len({id(seen.recipe) for seen in engine.calls}) == 2
    assert [type(seen.recipe).__name__ for seen in engine.calls[1:3]] == ["Float8BlockScaling", "CustomRecipe"]


@pytest.fixture
def machine(engine, monkeypatch):
    """The CPU as a GPU of a compute capability with the stand-in installed."""

    def become(capability, version="2.20.2", cuda="13.0"):
        sys.modules["transformer_engine"].__version__ = version
        for module in (transformer_engine, by_gemm):
            monkeypatch.setattr(module, "missing", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return engine

    return become


def big() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 128, generator=generator).bfloat16().requires_grad_()
    return x, torch.randn(128, 128, generator=generator).requires_grad_()


def test_a_plan_of_fp8_and_fp4_runs_fp8_here_and_fp4_elsewhere(machine):
    """Elsewhere with the same bits as without Transformer Engine."""
    engine, (x, w), auto = machine((9, 0)), big(), ByGemm(Emulated(), engine=EXACT)
    for fmt in ("fp8", "fp4", "fp8/fp8/fp4", "fp8/fp8/bf16"):
        y = auto(x, w, call(fmt, Casts()))
        assert torch.equal(y, x @ w.bfloat16().T) == (fmt in ("fp8", "fp8/fp8/bf16"))
        if len(engine.calls) < 2:
            assert fmt == "fp8" or torch.equal(y, LINEAR_IMPLS["emulated"](x, w, call(fmt)))
    assert len(engine.calls) == 2
    assert auto.runs(LinearPrecision.parse("fp8"), x.device, SIZES) == {"fp8": "Transformer Engine"}
    told = auto.runs(LinearPrecision.parse("fp8/fp8/fp4"), x.device, SIZES)
    assert told == {"fp8": "emulated", "fp4": "emulated"}


SIZES = Sizes(128, 128, 128)


def test_auto_takes_what_is_exact_alone(machine):
    """NVFP4 draws its own random bits there, and takes a shard's amax for the tensor's."""
    machine((10, 0))
    for fmt, exact in (("mxfp8", True), ("nvfp4_plain", False), ("nvfp4", False), ("mxfp8/bf16/mxfp8", True)):
        precision = LinearPrecision.parse(fmt)
        for formats, takes in ((EXACT, exact), (FORMATS, True)):
            told = ByGemm(Emulated(), engine=formats).runs(precision, torch.device("cpu"), SIZES)
            assert ({*told.values()} == {"Transformer Engine"}) == takes, fmt


@pytest.mark.parametrize("between", ["bf16", "fp4"])
def test_a_pass_elsewhere_does_not_hide_that_the_weight_has_changed(between, machine):
    """A probe in BF16 looks at the new weight first; the module's own copy is the old one's."""
    engine, (x, w), linear, casts = machine((9, 0)), big(), ByGemm(Emulated(), engine=EXACT), Casts()
    linear(x, w, call("fp8", casts))
    with torch.no_grad():
        w.add_(1.0)
    casts.clear()
    linear(x, w, call(between, casts))
    linear(x, w, call("fp8", casts))
    assert [c.first for c in engine.calls] == [True, True]


def test_linears_of_one_input_run_together_unless_one_runs_here(machine, lone_mesh, monkeypatch):
    """With the outputs of each alone, and a weight that a pass together has seen is quantised anew."""
    engine = machine((9, 0))
    monkeypatch.setitem(LINEAR_IMPLS, "here", ByGemm(Emulated(), engine=EXACT))
    region, (x, w) = Region(lone_mesh.tp, sequence_parallel=False), big()
    x = x.detach().unflatten(0, (1, 128)).requires_grad_()
    layers = [ColumnParallelLinear(name, w.detach().clone(), region, lone_mesh.device_mesh) for name in ("a", "b")]
    context = StepContext(key=KEY)
    together = []
    for precisions in (("fp8", "fp4"), ("fp4", "fp4"), ("bf16", "bf16"), ("fp8", "fp8")):
        for layer, precision in zip(layers, precisions, strict=True):
            layer.impl, layer.precision = "here", LinearPrecision.uniform(precision)
        ys = linears_of_one_input(layers, x, context)
        together.append(ys[0].grad_fn is ys[1].grad_fn)
        for layer, y in zip(layers, ys, strict=True):
            if str(layer.precision) == "fp4":
                layer.impl = "emulated"
                assert torch.equal(y, linears_of_one_input([layer], x, context)[0])
    assert together == [False, True, True, False]
    assert [seen.first for seen in engine.calls] == [True, True, True]


def test_a_probe_of_a_quantised_linear_runs_elsewhere(machine):
    engine, (x, w) = machine((9, 0)), big()
    seen = []
    y = ByGemm(Emulated(), engine=EXACT)(x, w, call("fp8", observer=seen.append))
    y.backward(torch.ones_like(y))
    assert not engine.calls and len(seen) == 1


def test_bf16_needs_no_engine():
    x, w, _ = tensors()
    y = LINEAR_IMPLS["transformer_engine"](x, w, call("bf16", Casts()))
    assert torch.equal(y, x @ w.bfloat16().T)


def test_the_names_before_2_9(engine):
    pytorch = sys.modules["transformer_engine.pytorch"]
    autocast = pytorch.autocast
    del pytorch.autocast
    pytorch.fp8_autocast = lambda enabled, fp8_recipe: autocast(enabled, fp8_recipe)
    x, w, _ = tensors()
    TransformerEngine()(x, w, call("mxfp8"))
    assert isinstance(engine.calls[0].recipe, MXFP8BlockScaling)


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp8/fp4/fp8", "nvfp4_plain"])
def test_without_the_package_it_is_auto_s_and_says_why(fmt):
    precision, (x, w), cpu = LinearPrecision.parse(fmt), big(), torch.device("cpu")
    check_linear("transformer_engine", precision, cpu)
    assert torch.equal(LINEAR_IMPLS["transformer_engine"](x, w, call(fmt)), LINEAR_IMPLS["auto"](x, w, call(fmt)))
    for told in LINEAR_IMPLS["transformer_engine"].runs(precision, cpu, SIZES).values():
        assert told.startswith("emulated (tensor cores need") and "; not Transformer Engine: it " in told
    assert not any("Transformer" in told for told in LINEAR_IMPLS["auto"].runs(precision, cpu, SIZES).values())


@pytest.mark.parametrize(
    ("fmt", "version", "capability", "cuda", "reason"),
    [
        ("fp8", "2.11.0", (9, 0), "12.9", None),
        ("fp8", "2.2.0", (9, 0), "12.9", "fp8 needs version 2.3, 2.2 is installed"),
        ("fp8", "2.11.0", (9, 0), "12.8", "fp8 needs CUDA 12.9"),
        ("fp8", "2.11.0", (8, 9), "12.9", "fp8 needs compute capability 9.0 to below 10.0, this is 8.9"),
        ("mxfp8", "2.11.0", (9, 0), "13.0", "mxfp8 needs compute capability 10.0 to below 12.0"),
        ("mxfp8", "2.11.0", (10, 3), "13.0", None),
        ("nvfp4_plain", "2.7.1+abc", (10, 0), "13.0", "nvfp4_plain needs version 2.8, 2.7"),
        ("nvfp4_plain", "2.10.0", (10, 0), "13.0", None),
        (
            "mxfp8/nvfp4_plain/nvfp4_plain",
            "2.18.0",
            (10, 0),
            "13.0",
            "formats by GEMM need version 2.19, 2.18 is installed",
        ),
        ("mxfp8/nvfp4_plain/bf16", "2.19.0", (10, 0), "13.0", None),
        ("fp4", "2.20.2", (10, 0), "13.0", "it has no fp4, only fp8, fp8_hybrid, fp8_pow2, mxfp8, nvfp4_plain, nvfp4"),
    ],
)
def test_gates(fmt, version, capability, cuda, reason, machine):
    machine(capability, version, cuda)
    why = TransformerEngine().unfit(LinearPrecision.parse(fmt), torch.device("cpu"), SIZES)
    assert why is None if reason is None else reason in why


@pytest.mark.parametrize(("fmt", "side"), [("fp8", 128), ("mxfp8", 32), ("nvfp4_plain", 16)])
def test_sizes_that_do_not_fit_are_one_line(fmt, side, machine):
    machine((9, 0) if fmt == "fp8" else (10, 0))
    precision, cpu, engine = LinearPrecision.uniform(fmt), torch.device("cpu"), TransformerEngine()
    assert engine.unfit(precision, cpu, Sizes(side, side, side)) is None
    for sizes in (Sizes(side + 8, side, side), Sizes(side, side + 8, side), Sizes(side, side, side + 8)):
        said = (
            f"{fmt} needs multiples of {side}, this linear has {sizes.tokens} tokens, {sizes.inputs} to {sizes.outputs}"
        )
        assert engine.unfit(precision, cpu, sizes) == f"{said} channels"
        told = ByGemm(Emulated(), engine=FORMATS).runs(precision, cpu, sizes)
        assert told == {fmt: f"emulated; not Transformer Engine: {said} channels"}


def test_compiled_blocks_have_auto_s_linears_without_it():
    assert compiled_impl("auto") == "built_in" and compiled_impl("emulated") == "emulated"
    with pytest.raises(ValueError, match="--compile does not go with --linear-impl transformer_engine; use"):
        compiled_impl("transformer_engine")


@pytest.mark.parametrize("formats", [*itertools.product(["bf16", "fp8", "mxfp8", "nvfp4"], repeat=3)])
def test_both_operands_of_a_gemm_have_its_format(formats, monkeypatch):
    """A tensor is read rowwise by one GEMM and columnwise by another."""

    def stand_in(kind):
        return lambda **how: SimpleNamespace(kind=kind, **how)

    pytorch, constants = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.pytorch.constants")
    kinds = {"bf16": "Identity", "fp8": "Float8Block", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
    for kind in (*kinds.values(), "Hybrid"):
        setattr(pytorch, f"{kind}Quantizer", stand_in(kind))
    constants.DType = SimpleNamespace(kFloat8E4M3=1, kFloat4E2M1=2)
    for module in (ModuleType("transformer_engine"), pytorch, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    directions = {}
    for tensor in ("input", "weight", "grad_output"):
        made = quantizer_for(SimpleNamespace(tensor_type=tensor, name="", module_type="linear"), formats)
        hybrid = made.kind == "Hybrid"
        directions[tensor] = (made.rowwise_quantizer, made.columnwise_quantizer) if hybrid else (made, made)
    operands = {  # as the table in operands.py: rowwise is reduced along dim 1, columnwise along dim 0
        gemm: [directions[tensor][0 if dim == 1 else 1] for tensor, dim in dims.items()]
        for gemm, dims in REDUCTION_DIM.items()
    }
    for gemm, fmt in zip(GEMMS, formats, strict=True):
        assert [quantizer.kind for quantizer in operands[gemm]] == [kinds[fmt]] * 2
        transformed = [getattr(quantizer, "with_rht", False) for quantizer in operands[gemm]]
        if gemm == "wgrad" or "Hybrid" in {made.kind for made in operands[gemm]}:
            assert transformed == [fmt == "nvfp4"] * 2
    assert all(getattr(q, "stochastic_rounding", True) for q in directions["grad_output"])
    assert not any(getattr(q, "stochastic_rounding", False) for q in directions["input"] + directions["weight"])
    assert {getattr(q, "block_scaling_dim", 2) for q in directions["weight"]} == {2}
    for role in (None, SimpleNamespace(tensor_type="", name="", module_type="")):
        assert quantizer_for(role, formats).kind == "Identity"
