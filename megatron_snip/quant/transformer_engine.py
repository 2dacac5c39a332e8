"""The ``transformer_engine`` linear: NVIDIA's own FP8 of Hopper and MXFP8 and NVFP4 of Blackwell.

Each linear keeps one te.Linear without a weight of its own, made anew when its format changes, so that no
state of one recipe meets another.  Autocast is entered around that one module.  The weight is quantised by
Transformer Engine once an optimiser step (``is_first_microbatch``).  Its scales and random bits are its own:
results are compared with the specification by tolerance, not by the bit.  A te.Linear runs all three GEMMs by
one recipe, so plans that mix formats within a linear need another implementation.
Source: Transformer Engine 2.3 to 2.20, common/recipe and pytorch/module/linear.py.

NOT YET RUN ON A GPU: tests use a stand-in for the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_snip.errors import UserError
from megatron_snip.quant.by_gemm import ByGemm
from megatron_snip.quant.operands import Casts, LinearCall
from megatron_snip.quant.precision import LinearPrecision

_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


@dataclass(frozen=True)
class Recipe:
    """How one of our formats is asked of Transformer Engine, and where it runs."""

    make: Callable[[Any], Any]  # transformer_engine.common.recipe -> recipe
    since: tuple[int, int]  # Transformer Engine's version
    capability: tuple[tuple[int, int], tuple[int, int]]  # compute capability: from, and below
    cuda: tuple[int, int]


def _float8_blocks(recipes: Any, *, pow2: bool) -> Any:
    """1x128 and 128x128 blocks.  The derived parameters are set too: the class computes them from its own
    default, so that an instance with ``use_f32_scales=True`` alone keeps power-of-two scales.
    """
    recipe = recipes.Float8BlockScaling(use_f32_scales=not pow2)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, recipes.QParams(power_2_scale=pow2, amax_epsilon=0.0))
    return recipe


def _nvfp4(recipes: Any, *, plain: bool) -> Any:
    return recipes.NVFP4BlockScaling(disable_rht=plain, disable_2d_quantization=plain)


_HOPPER, _BLACKWELL = ((9, 0), (10, 0)), ((10, 0), (12, 0))
_RECIPES = {
    "fp8": Recipe(lambda r: _float8_blocks(r, pow2=False), (2, 3), _HOPPER, (12, 9)),
    "fp8_pow2": Recipe(lambda r: _float8_blocks(r, pow2=True), (2, 3), _HOPPER, (12, 9)),
    "mxfp8": Recipe(lambda r: r.MXFP8BlockScaling(), (2, 3), _BLACKWELL, (12, 8)),
    "nvfp4": Recipe(lambda r: _nvfp4(r, plain=True), (2, 8), _BLACKWELL, (12, 8)),
    "nvfp4_rht": Recipe(lambda r: _nvfp4(r, plain=False), (2, 8), _BLACKWELL, (12, 8)),
}


class TransformerEngine:
    """Implementation of that name."""

    def __init__(self) -> None:
        # by the object that a parallel linear keeps for its weight: the module goes when the linear goes
        self._modules: WeakKeyDictionary[Casts, tuple[str, nn.Module]] = WeakKeyDictionary()
        self._plain = ByGemm()  # for bf16

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why this precision cannot run on a device, or None."""
        formats = {precision.fprop, precision.dgrad, precision.wgrad}
        if formats == {"bf16"}:
            return None
        if len(formats) > 1:
            return "Transformer Engine runs the three GEMMs of a linear in one format"
        (name,) = formats
        if name not in _RECIPES:
            return f"Transformer Engine has no recipe for {name}, only for {', '.join(_RECIPES)}"
        return _unfit(name, _RECIPES[name], device)

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [T,K], w [N,K] -> y [T,N].  Raises UserError where an observer looks at a quantised linear."""
        if call.precision.fprop == "bf16":
            if call.weight_casts is not None:  # or the module would not notice that the weight changes meanwhile
                self._modules.pop(call.weight_casts, None)
            return self._plain(x, w, call)
        if call.observer is not None:
            raise UserError(
                f"--linear-impl transformer_engine: a probe looks at a linear in {call.precision}; "
                "probes run in bf16, or use --linear-impl emulated"
            )
        module, first = self._module(w, x.dtype, call)
        recipes = importlib.import_module("transformer_engine.common.recipe")
        te = importlib.import_module("transformer_engine.pytorch")
        with _autocast(te, _RECIPES[call.precision.fprop].make(recipes)):
            y: Tensor = torch.func.functional_call(
                module, {"weight": w.to(x.dtype)}, (x,), {"is_first_microbatch": first}
            )
        return y

    def _module(self, w: Tensor, dtype: torch.dtype, call: LinearCall) -> tuple[nn.Module, bool | None]:
        """The te.Linear for a weight [N,K], and whether its copy of the weight is out of date.

        Without ``weight_casts`` there is nothing to keep: a module for one call, which quantises the weight.
        """
        te = importlib.import_module("transformer_engine.pytorch")
        casts, fmt = call.weight_casts, call.precision.fprop
        held = self._modules.get(casts) if casts is not None else None
        if held is not None and held[0] == fmt:
            assert casts is not None
            return held[1], casts.renewed(w, dtype)
        n, k = w.shape
        module: nn.Module = te.Linear(k, n, bias=False, params_dtype=dtype, device="meta")
        if casts is None:
            return module, None
        self._modules[casts] = (fmt, module)
        casts.renewed(w, dtype)
        return module, True


def _autocast(te: Any, recipe: Any) -> Any:
    """The context in which one module runs by a recipe; its name changed in 2.9."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def _unfit(name: str, recipe: Recipe, device: torch.device) -> str | None:
    """Why a recipe cannot run here, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed ({_INSTALL})"
    if device.type != "cuda":
        return f"Transformer Engine needs an NVIDIA GPU, the device is {device.type}"
    version = _numbers(importlib.import_module("transformer_engine").__version__)
    if version < recipe.since:
        return f"{name} needs Transformer Engine {_dotted(recipe.since)}, {_dotted(version)} is installed"
    first, below = recipe.capability
    found = torch.cuda.get_device_capability(device)
    if not first <= found < below:
        return f"{name} needs compute capability {_dotted(first)} to below {_dotted(below)}, this is {_dotted(found)}"
    cuda = _numbers(torch.version.cuda or "0.0")
    if cuda < recipe.cuda:
        return f"{name} needs CUDA {_dotted(recipe.cuda)}, PyTorch was built with {torch.version.cuda}"
    return None


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.11.0+abc"."""
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
