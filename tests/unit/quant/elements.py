"""Every eXmY element, the numbers on which its rounding can go wrong, and gfloat's idea of it."""

from __future__ import annotations

import itertools

import gfloat
import torch
from gfloat.types import Domain
from torch import Tensor

from megatron_snip.formats.element import Element, element_named

ELEMENTS = [element_named(e, m) for e in range(2, 7) for m in range(1, 8 - e)]
NAMES = [element.name for element in ELEMENTS]


def gfloat_format(element: Element, more_exponents: int = 0) -> gfloat.FormatInfo:
    """The element in gfloat's terms, from its bit counts; or the same grid going on for more exponents."""
    specials = "ieee" if more_exponents else element.specials
    return gfloat.FormatInfo(
        name=element.name,
        k=element.bits + more_exponents,
        precision=1 + element.mantissa_bits,
        bias=2 ** (element.exponent_bits - 1) - 1,
        is_signed=True,
        domain=Domain.Extended if specials == "ieee" else Domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": 2**element.mantissa_bits - 1, "fn": 1, "finite": 0}[specials],
        has_subnormals=True,
        is_twos_complement=False,
    )


def all_bf16() -> Tensor:
    """Every finite bfloat16 number, in float32."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite()]


def ties_and_neighbours(element: Element) -> Tensor:
    """Each grid value and tie between two, that beyond the largest value too, the float32 numbers next to
    them and the smallest float32 numbers, of both signs.
    """
    values = element.values()
    beyond = values[-1] + (values[-1] - values[-2])
    grid = torch.tensor([*values, beyond], dtype=torch.float64)
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2]).float()
    down, up = (torch.nextafter(points, torch.tensor(end)) for end in (-float("inf"), float("inf")))
    tiny = torch.tensor([2.0**-149, 2.0**-127, 2.0**-126])
    near = torch.cat([points, down, up, tiny])
    return torch.cat([near, -near])


def intervals(element: Element) -> list[tuple[float, float]]:
    """Neighbouring grid values that are not negative."""
    return list(itertools.pairwise(element.values()))
