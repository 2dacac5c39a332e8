"""Runs linears with Transformer Engine: NVIDIA's own FP8 on Hopper, and MXFP8 and NVFP4 on Blackwell.

Each linear keeps one te.Linear without a weight of its own and replaces it when its formats change, so that recipes
never share state.  Autocast is entered around that one module.  Transformer Engine quantises the weight once per
optimiser step (``is_first_microbatch``).  It has its own order of sums and its own random bits, so results are compared
with the specification by tolerance, not bit for bit.  A te.Linear runs all three GEMMs: with one recipe for one format,
and from 2.19 on with a `CustomRecipe` for a format per GEMM (te_quantizers.py).
Source: Transformer Engine 2.3 to 2.20, common/recipe and pytorch/module/linear.py.

NOT YET RUN ON A GPU: tests run Transformer Engine's Python files over a stand-in for its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_snip.formats import get_format
from megatron_snip.quant.linears.operands import Casts, LinearCall, Sizes
from megatron_snip.quant.linears.precision import LinearPrecision
from megatron_snip.quant.linears.te_quantizers import quantizer_for

_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


@dataclass(frozen=True)
class Recipe:
    """How to request one of our formats from Transformer Engine, and where it runs."""

    make: Callable[[Any], Any]  # transformer_engine.common.recipe -> recipe
    since: tuple[int, int]  # Transformer Engine's version
    capability: tuple[tuple[int, int], tuple[int, int]]  # compute capability: from, and below
    cuda: tuple[int, int]


def _float8_blocks(recipes: Any, *, pow2: bool = False, hybrid: bool = False) -> Any:
    """A recipe with 1x128 and 128x128 blocks.  hybrid: E5M2 gradients.

    It also sets the derived parameters.  The class computes them from its own default, so that an instance with
    ``use_f32_scales=True`` alone keeps power-of-two scales.
    """
    element = recipes.Format.HYBRID if hybrid else recipes.Format.E4M3
    recipe = recipes.Float8BlockScaling(use_f32_scales=not pow2, fp8_format=element)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, recipes.QParams(power_2_scale=pow2, amax_epsilon=0.0))
    return recipe


def _nvfp4(recipes: Any, *, plain: bool) -> Any:
    return recipes.NVFP4BlockScaling(disable_rht=plain, disable_2d_quantization=plain)


_HOPPER, _BLACKWELL = ((9, 0), (10, 0)), ((10, 0), (12, 0))
_RECIPES = {
    "fp8": Recipe(_float8_blocks, (2, 3), _HOPPER, (12, 9)),
    "fp8_hybrid": Recipe(partial(_float8_blocks, hybrid=True), (2, 3), _HOPPER, (12, 9)),
    "fp8_pow2": Recipe(partial(_float8_blocks, pow2=True), (2, 3), _HOPPER, (12, 9)),
    "mxfp8": Recipe(lambda r: r.MXFP8BlockScaling(), (2, 3), _BLACKWELL, (12, 8)),
    "nvfp4_plain": Recipe(lambda r: _nvfp4(r, plain=True), (2, 8), _BLACKWELL, (12, 8)),
    "nvfp4": Recipe(lambda r: _nvfp4(r, plain=False), (2, 8), _BLACKWELL, (12, 8)),
}


#: All formats, and those whose codes and scales match ours bit for bit on every layout: nothing rounds stochastically,
#: and no scale depends on the whole tensor, which tp shards.
FORMATS = tuple(_RECIPES)
EXACT = tuple(name for name in FORMATS if not get_format(name).stochastic_roles)
#: Formats per GEMM need this version, which added `HybridQuantizer`.
_BY_GEMM = (2, 19)

Formats = tuple[str, str, str]


@dataclass
class _Held:
    """What is kept for a weight: its te.Linear, and a float32 weight rounded to the compute dtype."""

    formats: Formats
    module: nn.Module
    rounded: Tensor | None = None


class _Rounded(torch.autograd.Function):
    """A weight [N,K] as its existing copy in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = w.dtype
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


class TransformerEngine:
    """Runs linears; callers check ``unfit`` first."""

    def __init__(self) -> None:
        # keyed by the object that a parallel linear keeps for its weight: the module goes when the linear goes
        self._modules: WeakKeyDictionary[Casts, _Held] = WeakKeyDictionary()
        self._recipes: dict[Formats, Any] = {}

    def unfit(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> str | None:
        """Why it cannot run a linear of this precision and these sizes on a device, or None."""
        names = sorted({*_formats(precision)})
        quantised = [name for name in names if name != "bf16"]
        if not quantised:
            return "bf16 is torch's"
        if strange := [name for name in quantised if name not in _RECIPES]:
            return f"it has no {strange[0]}, only {', '.join(_RECIPES)}"
        if why := missing(device):
            return why
        if len(names) > 1 and (version := _installed()) < _BY_GEMM:
            return f"formats by GEMM need version {_dotted(_BY_GEMM)}, {_dotted(version)} is installed"
        return next((why for name in quantised if (why := _unfit(name, _RECIPES[name], device, sizes))), None)

    def forget(self, casts: Casts | None) -> None:
        """Drop the module of a weight, which may change before the module is needed again."""
        if casts is not None and self._modules:
            self._modules.pop(casts, None)

    def kept_of_weight(self, casts: Casts) -> list[Tensor]:
        """What is kept of a weight: its copy in the compute dtype, and the module's codes and scales."""
        held = self._modules.get(casts)
        if held is None:
            return []
        codes = [part for one in getattr(held.module, "_fp8_workspaces", {}).values() for part in vars(one).values()]
        return [part for part in (held.rounded, *codes) if isinstance(part, Tensor)]

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] -> y [..., N]."""
        held, first = self._module(w, x.dtype, call)
        te = importlib.import_module("transformer_engine.pytorch")
        with _autocast(te, self._recipe(_formats(call.precision))):
            y: Tensor = torch.func.functional_call(
                held.module, {"weight": _rounded(w, x.dtype, held, first)}, (x,), {"is_first_microbatch": first}
            )
        return y

    def _recipe(self, formats: Formats) -> Any:
        """One recipe for the formats of fprop, dgrad and wgrad; a new object would make modules rebuild quantizers."""
        if formats not in self._recipes:
            recipes = importlib.import_module("transformer_engine.common.recipe")
            uniform = len({*formats}) == 1
            by_gemm = partial(quantizer_for, formats=formats)
            made = _RECIPES[formats[0]].make(recipes) if uniform else recipes.CustomRecipe(qfactory=by_gemm)
            self._recipes[formats] = made
        return self._recipes[formats]

    def _module(self, w: Tensor, dtype: torch.dtype, call: LinearCall) -> tuple[_Held, bool | None]:
        """The te.Linear for a weight [N,K], and whether its copy of the weight is out of date.

        Without ``weight_casts``, nothing is kept: the module is for one call, which quantises the weight.
        """
        te = importlib.import_module("transformer_engine.pytorch")
        casts, formats = call.weight_casts, _formats(call.precision)
        held = self._modules.get(casts) if casts is not None else None
        if held is not None and held.formats == formats:
            assert casts is not None
            return held, casts.renewed(w, dtype)
        n, k = w.shape
        held = _Held(formats, te.Linear(k, n, bias=False, params_dtype=dtype, device="meta"))
        if casts is None:
            return held, None
        self._modules[casts] = held
        casts.renewed(w, dtype)
        return held, True


def _rounded(w: Tensor, dtype: torch.dtype, held: _Held, first: bool | None) -> Tensor:
    """The weight [N,K] in the compute dtype.  A float32 weight is rounded once per optimiser step."""
    if w.dtype == dtype or first is None:
        return w.to(dtype)
    if first or held.rounded is None:
        held.rounded = w.detach().to(dtype)
    rounded: Tensor = _Rounded.apply(w, held.rounded)
    return rounded


def _formats(precision: LinearPrecision) -> Formats:
    return precision.fprop, precision.dgrad, precision.wgrad


def _autocast(te: Any, recipe: Any) -> Any:
    """The context in which one module runs with a recipe; its name changed in 2.9."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def missing(device: torch.device) -> str | None:
    """Why Transformer Engine runs nothing on a device, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"it is not installed ({_INSTALL})"
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, the device is {device.type}"
    return None


def _installed() -> tuple[int, int]:
    return _numbers(importlib.import_module("transformer_engine").__version__)


def _unfit(name: str, recipe: Recipe, device: torch.device, sizes: Sizes) -> str | None:
    """Why a format cannot run here, or None.  Transformer Engine must be installed."""
    version = _installed()
    if version < recipe.since:
        return f"{name} needs version {_dotted(recipe.since)}, {_dotted(version)} is installed"
    first, below = recipe.capability
    found = torch.cuda.get_device_capability(device)
    if not first <= found < below:
        return f"{name} needs compute capability {_dotted(first)} to below {_dotted(below)}, this is {_dotted(found)}"
    cuda = _numbers(torch.version.cuda or "0.0")
    if cuda < recipe.cuda:
        return f"{name} needs CUDA {_dotted(recipe.cuda)}, PyTorch was built with {torch.version.cuda}"
    side = get_format(name).tile
    if any(size % side for size in sizes):
        shown = f"{sizes.tokens} tokens, {sizes.inputs} to {sizes.outputs} channels"
        return f"{name} needs multiples of {side}, this linear has {shown}"
    return None


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.11.0+abc"."""
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
