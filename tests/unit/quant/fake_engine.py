"""A stand-in for Transformer Engine, which keeps what linears asked of it.

It has the names, arguments and defaults of Transformer Engine 2.20 that this project uses, the trap of
Float8BlockScaling's derived parameters among them.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Format(enum.Enum):
    E4M3 = 1
    HYBRID = 3


@dataclass
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
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


@dataclass
class CustomRecipe:
    qfactory: Any


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
                engine.calls.append(SimpleNamespace(
                    module=self, first=is_first_microbatch, recipe=engine.recipe, weight=self.weight
                ))  # fmt: skip
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
    modules["transformer_engine"].__version__ = "2.20.2"
    modules["transformer_engine"].__spec__ = SimpleNamespace()
    recipe, pytorch = modules["transformer_engine.common.recipe"], modules["transformer_engine.pytorch"]
    for kind in (Format, QParams, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe):
        setattr(recipe, kind.__name__, kind)
    pytorch.Linear, pytorch.autocast = engine.linear(), engine.autocast
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine
