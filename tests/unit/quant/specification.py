"""``quantize`` and ``fake_quantize`` by the specification alone, whatever kernels there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_snip.quant.casts.cast import Form, Quantized, finite_amax, reference, resolve
from megatron_snip.quant.casts.hadamard import hadamard
from megatron_snip.quant.kernels.dispatch import quantized


def _resolve(x: Tensor, fmt: Any, how: dict[str, Any]) -> tuple[Tensor, Form, Tensor]:
    """What is cast, its form and its largest magnitude."""
    amax = how.pop("amax", None)
    form = resolve(x, fmt, rounding=how.pop("rounding", None), key=how.pop("key", None), **how)
    if form.transformed:
        x = hadamard(x, form.fmt.hadamard, form.dim)
    return x, form, finite_amax(x) if amax is None else amax


def quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Quantized:
    x, form, amax = _resolve(x, fmt, how)
    if not form.fmt.quantised:
        return Quantized(x, torch.ones(1, 1), form.fmt, (x.shape[0], x.shape[1]))
    return quantized(reference(x, [form.held("codes")], amax)[0])


def fake_quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Tensor:
    x, form, amax = _resolve(x, fmt, how)
    if not form.fmt.quantised:
        return x
    return reference(x, [form], amax)[0].data
