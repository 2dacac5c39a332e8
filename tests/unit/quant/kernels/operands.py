"""Operands that are hard on casts, and the comparison of bit patterns, for the tests of all kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_snip.formats.element import E2M1, E4M3
from megatron_snip.quant.casts.cast import Form, Output
from megatron_snip.quant.casts.rounding import RoundingKey, random_bits

SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40, 3.3e38, -3e38, 1e-37]


def held(forms: Sequence[Form], outputs: Sequence[Output]) -> list[Form]:
    """The forms, each held as its output."""
    return [form.held(output) for form, output in zip(forms, outputs, strict=True)]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns; every NaN counts as one pattern."""
    if not x.is_floating_point():
        return x
    patterns = x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
    return torch.where(x.isnan(), -1, patterns)


def operands(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Normal numbers, with special ones, tiny ones, subnormal ones, and a wide range with a zero half."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    normal = torch.randn(shape, generator=generator, device=device)
    special = normal.clone()
    where = torch.rand(shape, generator=generator, device=device) < 0.05
    picks = torch.randint(len(SPECIAL), shape, generator=generator, device=device)
    special[where] = torch.tensor(SPECIAL, device=device)[picks][where]
    wide = (normal * 20).exp() * normal
    wide[: shape[0] // 2] = 0.0
    return [x.to(dtype) for x in (normal, special, normal * 1e-37, normal * 1e-40, wide)]


def scale_ties(unit: float) -> torch.Tensor:
    """An nvfp4_plain operand [32, 64] whose blocks of 16 columns have their ideal scales on ties between E4M3 numbers.

    The rounding errors of the scale's formula then decide its code, so that another order of operations shows.
    ``unit``: at most 18 bits long, so that the blocks' largest magnitudes are float32 numbers.
    """
    grid = torch.tensor(E4M3.values())[-56:]
    ties = (grid[1:] + grid[:-1]) / 2
    largest = ties.repeat(3)[: 32 * 4] * unit
    largest[0] = E4M3.max * unit
    return torch.linspace(-0.9, 1, 16).expand(32, 4, 16).mul(largest.view(32, 4, 1)).reshape(32, 64)


def draw_ties(key: RoundingKey, *, above: bool = False) -> torch.Tensor:
    """An fp4 operand [8, 128] of which each element's distance to its lower neighbour equals its random draw.

    above: it is the next float32 number above the draw.
    """
    x = (random_bits(key, 8, 128) + 0.5) * 2.0**-16 * E2M1.min_subnormal
    if above:
        x = x.nextafter(torch.tensor(torch.inf))
    x[:, 0] = E2M1.max
    return x
