"""``quantize`` and ``fake_quantize`` by the specification alone, whatever kernels there are."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from megatron_snip.quant import dispatch
from megatron_snip.quant.cast import Quantized, cast_reference


def quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Quantized:
    with mock.patch.object(dispatch, "cast", cast_reference):
        return dispatch.quantize(x, fmt, amax=how.pop("amax", None), **how)


def fake_quantize_reference(x: Tensor, fmt: Any, **how: Any) -> Tensor:
    form = dispatch.resolve(x, fmt, rounding=how.pop("rounding", None), key=how.pop("key", None), **how)
    if not form.fmt.quantised:
        return x
    return cast_reference(x, [form], ["values"], dispatch.finite_amax(x))[0].values
