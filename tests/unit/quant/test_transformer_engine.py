"""The Transformer Engine linear against a stand-in for the package, which runs on GPUs only.

The stand-in has the names, arguments and defaults of Transformer Engine 2.11 that this project uses, the trap of
Float8BlockScaling's derived parameters among them.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_snip.quant import Casts, LinearCall, LinearPrecision, RoundingKey, check_linear
from megatron_snip.quant.transformer_engine import TransformerEngine

KEY = RoundingKey(seed=1, iteration=2, stream=3)


@dataclass
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_quant_fwd_inp: QParams = field(default_factory=lambda: QParams(power_2_scale=True))
    fp8_quant_fwd_weight: QParams = field(default_factory=lambda: QParams(power_2_scale=True))
    fp8_quant_bwd_grad: QParams = field(default_factory=lambda: QParams(power_2_scale=True))


@dataclass
class MXFP8BlockScaling:
    pass


@dataclass
class NVFP4BlockScaling:
    disable_rht: bool = False
    disable_2d_quantization: bool = False


class Engine:
    """Keeps what the linear asked of the package."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.made: list[nn.Module] = []
        self.recipe: Any = None

    @contextlib.contextmanager
    def autocast(self, enabled: bool, recipe: Any):
        self.recipe = recipe if enabled else None
        yield
        self.recipe = None

    def linear(self) -> type[nn.Module]:
        engine = self

        class Linear(nn.Module):
            def __init__(self, k: int, n: int, bias: bool, params_dtype: torch.dtype, device: str) -> None:
                super().__init__()
                assert device == "meta" and not bias
                self.weight = nn.Parameter(torch.empty(n, k, dtype=params_dtype, device=device))
                engine.made.append(self)

            def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
                engine.calls.append(SimpleNamespace(module=self, first=is_first_microbatch, recipe=engine.recipe))
                assert self.weight.dtype == x.dtype
                return x @ self.weight.T

        return Linear


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    modules = {name: ModuleType(name) for name in (
        "transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe",
        "transformer_engine.pytorch",
    )}  # fmt: skip
    modules["transformer_engine"].__version__ = "2.11.0"
    modules["transformer_engine"].__spec__ = SimpleNamespace()
    recipe, pytorch = modules["transformer_engine.common.recipe"], modules["transformer_engine.pytorch"]
    for kind in (QParams, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling):
        setattr(recipe, kind.__name__, kind)
    pytorch.Linear, pytorch.autocast = engine.linear(), engine.autocast
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine


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
        ("fp8_pow2", Float8BlockScaling, {"use_f32_scales": False, "fp8_quant_fwd_weight": QParams(True, 0.0)}),
        ("mxfp8", MXFP8BlockScaling, {}),
        ("nvfp4", NVFP4BlockScaling, {"disable_rht": True, "disable_2d_quantization": True}),
        ("nvfp4_rht", NVFP4BlockScaling, {"disable_rht": False, "disable_2d_quantization": False}),
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


def test_a_pass_in_bf16_does_not_hide_that_the_weight_has_changed(engine):
    """A probe in BF16 looks at the new weight first; the module's own copy is the old one's."""
    x, w, _ = tensors()
    linear, casts = TransformerEngine(), Casts()
    linear(x, w, call("fp8", casts))
    with torch.no_grad():
        w.add_(1.0)
    casts.clear()
    linear(x, w, call("bf16", casts))
    linear(x, w, call("fp8", casts))
    assert [c.first for c in engine.calls] == [True, True]


def test_bf16_needs_no_engine():
    x, w, _ = tensors()
    assert torch.equal(TransformerEngine()(x, w, call("bf16", Casts())), x @ w.bfloat16().T)
    check_linear("transformer_engine", LinearPrecision.uniform("bf16"), torch.device("cpu"))


def test_a_probe_of_a_quantised_linear_is_refused(engine):
    x, w, _ = tensors()
    with pytest.raises(ValueError, match="a probe looks at a linear in fp8; probes run in bf16"):
        TransformerEngine()(x, w, call("fp8", observer=object()))


def test_the_names_before_2_9(engine):
    pytorch = sys.modules["transformer_engine.pytorch"]
    autocast = pytorch.autocast
    del pytorch.autocast
    pytorch.fp8_autocast = lambda enabled, fp8_recipe: autocast(enabled, fp8_recipe)
    x, w, _ = tensors()
    TransformerEngine()(x, w, call("mxfp8"))
    assert isinstance(engine.calls[0].recipe, MXFP8BlockScaling)


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        ("fp8/fp4/fp8", "runs the three GEMMs of a linear in one format"),
        ("fp4", "has no recipe for fp4, only for fp8, fp8_pow2, mxfp8, nvfp4"),
        ("mxfp4", "has no recipe for mxfp4"),
        ("fp8", "Transformer Engine is not installed"),
    ],
)
def test_what_cannot_run_is_refused_with_the_way_out(fmt, reason):
    with pytest.raises(ValueError, match=rf"transformer_engine cannot run {fmt} here: .*{reason}.*use --linear-impl"):
        check_linear("transformer_engine", LinearPrecision.parse(fmt), torch.device("cpu"))


@pytest.mark.parametrize(
    ("fmt", "version", "capability", "cuda", "reason"),
    [
        ("fp8", "2.11.0", (9, 0), "12.9", None),
        ("fp8", "2.2.0", (9, 0), "12.9", "fp8 needs Transformer Engine 2.3, 2.2 is installed"),
        ("fp8", "2.11.0", (9, 0), "12.8", "fp8 needs CUDA 12.9"),
        ("fp8", "2.11.0", (8, 9), "12.9", "fp8 needs compute capability 9.0 to below 10.0, this is 8.9"),
        ("mxfp8", "2.11.0", (9, 0), "13.0", "mxfp8 needs compute capability 10.0 to below 12.0"),
        ("mxfp8", "2.11.0", (10, 3), "13.0", None),
        ("nvfp4", "2.7.1+abc", (10, 0), "13.0", "nvfp4 needs Transformer Engine 2.8, 2.7"),
        ("nvfp4", "2.10.0", (10, 0), "13.0", None),
    ],
)
def test_gates(fmt, version, capability, cuda, reason, engine, monkeypatch):
    sys.modules["transformer_engine"].__version__ = version
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    refusal = TransformerEngine().refusal(LinearPrecision.uniform(fmt), torch.device("cuda"))
    assert refusal is None if reason is None else reason in refusal
    assert "needs an NVIDIA GPU" in TransformerEngine().refusal(LinearPrecision.uniform(fmt), torch.device("cpu"))
