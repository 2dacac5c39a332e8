"""Specifies an element's grid: rounding to it, and its codes.

Magnitudes are float32 [...], already clamped to the element's largest value; NaN stays NaN.
Sources: OCP OFP8 rev. 1.0 and MX v1.0 for the grids; docs/numerics.md for stochastic rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.formats import NAN_CODE, Element
from megatron_snip.quant.casts.rounding import RANDOM_BITS

_MANTISSA, _BIAS = 23, 127  # of float32


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent from its bit pattern: int32 [...], exponents of normal float32 numbers -> float32 [...]."""
    return ((exponent + _BIAS) << _MANTISSA).view(torch.float32)


def _binade(size: Tensor, element: Element) -> Tensor:
    """The exponent of |x| in float32, or the element's emin if that is larger: int32."""
    exponent = (size.view(torch.int32) >> _MANTISSA) - _BIAS
    return exponent.clamp(min=element.emin)


def round_nearest(size: Tensor, element: Element) -> Tensor:
    """Round |x| to the nearest grid value, ties to the even code: float32 [...] -> float32 [...].

    The last bit of c is worth one grid step, so adding c lets float32 do the rounding.
    """
    c = power_of_two(_binade(size, element) + _MANTISSA - element.mantissa_bits)
    return torch.where(size.isnan(), size, (size + c) - c)


def round_stochastic(size: Tensor, element: Element, draws: Tensor) -> Tensor:
    """Round |x| up one grid step if (draw + 1/2) * 2**-16 < its distance in steps from the value below, else down.

    size: float32 [...], draws: 16-bit integers [...] -> float32 [...].
    """
    exponent = _binade(size, element) - element.mantissa_bits
    step, steps = power_of_two(exponent), size * power_of_two(-exponent)
    lower = steps.floor()
    up = (draws.float() + 0.5) * 2.0**-RANDOM_BITS < steps - lower
    return torch.where(size.isnan(), size, (lower + up) * step)


def encode(q: Tensor, element: Element) -> Tensor:
    """Encode grid values: float32 [...] -> uint8 [...], NaN as 0xff."""
    size = q.abs()
    exponent = _binade(size, element)
    steps = torch.nan_to_num(size * power_of_two(element.mantissa_bits - exponent)).int()
    code = steps + ((exponent - element.emin) << element.mantissa_bits)
    code = torch.where(q.signbit(), code + element.sign_code, code)
    return torch.where(q.isnan(), NAN_CODE, code).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Decode codes with a table of grid values: uint8 [...] -> float32 [...]."""
    magnitudes = element.values()
    table = torch.full((256,), float("nan"))
    for sign, first in ((1.0, 0), (-1.0, element.sign_code)):
        table[first : first + len(magnitudes)] = sign * torch.tensor(magnitudes)
    return table.to(codes.device)[codes.int()]
