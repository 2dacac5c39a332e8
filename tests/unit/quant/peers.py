"""Loads the quantisers of other projects that the casts are compared with, and makes the data for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def bf16_tensors(rows: int = 128, cols: int = 256, seeds: int = 2) -> dict[str, Tensor]:
    """Finite bfloat16 [rows, cols]: blocks of like and of unlike sizes, ties, zeros, tiny and huge numbers."""
    tensors = {}
    for seed in range(seeds):
        random = torch.Generator().manual_seed(seed)
        normal, other = (torch.randn(rows, cols, generator=random) for _ in range(2))
        few = torch.randint(-24, 25, (rows, cols), generator=random) / 4  # multiples of E2M1's ties and values
        tensors |= {
            f"normal-{seed}": normal,
            f"wide-{seed}": normal * (3 * other).exp() * torch.logspace(-6, 3, cols),
            f"ties-{seed}": few * 2.0 ** torch.randint(-3, 4, (rows, 1), generator=random),
            f"small-{seed}": normal * 1e-9,
            f"large-{seed}": normal * 1e9,
        }
        tensors[f"zeros-{seed}"] = normal.clone()
        tensors[f"zeros-{seed}"][:, : cols // 2] = 0
        tensors[f"zeros-{seed}"][:, -3:] = -0.0
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def load_microxcaling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """microxcaling's mx.mx_ops from a checkout."""
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("mx.mx_ops")


def load_transformer_engine_blockwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine's blockwise FP8 reference quantiser from a checkout: an object."""
    monkeypatch.syspath_prepend(str(folder / "tests" / "pytorch"))
    return importlib.import_module("references.blockwise_quantizer_reference").BlockwiseQuantizerReference()


def load_transformer_engine_nvfp4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Transformer Engine's NVFP4 reference from a checkout, with stubs for the parts that need a GPU build."""
    package = "transformer_engine.pytorch"
    stubs = {name: ModuleType(name) for name in ("transformer_engine", package, f"{package}.custom_recipes")}
    stubs |= {f"{package}.{name}": ModuleType(name) for name in ("quantized_tensor", "custom_recipes.gemm")}
    gemm, tensors = stubs[f"{package}.custom_recipes.gemm"], stubs[f"{package}.quantized_tensor"]
    gemm.__dict__.update(MMParams=object, GEMMType=type("GEMMType", (), {"FPROP": "fprop", "WGRAD": "wgrad"}))
    quantizer = type("Quantizer", (), {"__init__": lambda self, rowwise, columnwise: None})
    tensors.__dict__.update(QuantizedTensorStorage=object, Quantizer=quantizer)
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    recipes = stubs[f"{package}.custom_recipes"]
    recipes.__dict__["gemm"] = gemm
    for name in ("reference_utils", "reference_nvfp4"):
        path = folder / "transformer_engine" / "pytorch" / "custom_recipes" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{recipes.__name__}.{name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        recipes.__dict__[name] = module
    return module


def load_fouroversix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """fouroversix's PyTorch reference from a checkout, without what its packages import for GPUs."""
    for name in ("fouroversix", "fouroversix.kernels", "fouroversix.quantize", "fouroversix.quantize.pytorch"):
        stub = ModuleType(name)
        stub.__path__ = [str(folder.joinpath("src", *name.split(".")))]
        monkeypatch.setitem(sys.modules, name, stub)
    return importlib.import_module("fouroversix.quantize.pytorch.reference")
