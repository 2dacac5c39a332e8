"""``quantize`` and ``fake_quantize`` by the specification alone, whatever kernels there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_snip.quant.cast import Form, Quantized, cast_reference, finite_amax, resolve
from megatron_snip.quant.hadamard import hadamard
from megatron_snip.quant.scales import tensor_scale


def _resolve(x: Tensor, fmt: Any, how: dict[str, Any]) -> tuple[Form, Tensor]:
    """The form, and the largest magnitude of what it casts."""
    amax = how.pop("amax", None)
    form = resolve(x, fmt, rounding=how.pop("rounding", None), key=how.pop("key", None), **how)
    if amax is None:
        amax = finite_amax(hadamard(x) if form.transformed else x)
    return form, amax


def quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Quantized:
    form, amax = _resolve(x, fmt, how)
    if not form.fmt.quantised:
        return Quantized(x, torch.ones(1, 1), form.fmt, (x.shape[0], x.shape[1]))
    codes, scales, saturated, _ = cast_reference(x, [form], ["codes"], amax)[0]
    assert scales is not None
    whole = tensor_scale(amax, form.element) if form.fmt.needs_tensor_amax else None
    return Quantized(codes, scales, form.fmt, form.block, whole, saturated)


def fake_quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Tensor:
    form, amax = _resolve(x, fmt, how)
    if not form.fmt.quantised:
        return x
    return cast_reference(x, [form], ["values"], amax)[0].values
