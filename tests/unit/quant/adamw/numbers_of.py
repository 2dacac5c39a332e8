"""BF16 numbers that break inexact sums, and parameters made of them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from megatron_snip.quant import RoundingKey
from megatron_snip.quant.adamw.expansion import split
from megatron_snip.quant.adamw.step import Stored

#: What --optimizer-precision stores: (low part of the weight, of v, stochastic).
STORED = {
    "collage-light": (True, False, False),
    "collage-plus": (True, True, False),
    "bf16-stochastic": (False, False, True),
    "bf16": (False, False, False),
}
KEY = RoundingKey(seed=5, iteration=9, stream=77, row0=2**33 + 5, col0=3)


def wild(generator: torch.Generator, *shape: int, least: int = -40, most: int = 10) -> Tensor:
    """BF16 numbers of both signs and many exponents, some of them 0."""
    exponents = torch.randint(least, most, shape, generator=generator).float()
    drawn = torch.randn(shape, generator=generator) * torch.exp2(exponents)
    return torch.where(torch.rand(shape, generator=generator) < 0.02, 0.0, drawn).bfloat16()


def expansion(generator: torch.Generator, *shape: int, **exponents: int) -> tuple[Tensor, Tensor]:
    """The two parts of some numbers with more bits than BF16 has."""
    high = wild(generator, *shape, **exponents).double()
    return split(high * (1 + torch.rand(shape, generator=generator).double() * 2.0**-8))


def parameter(precision: str, seed: int, *shape: int) -> tuple[Stored, Tensor]:
    """A parameter as some steps have left it, and a gradient."""
    weight_low, v_low, is_stochastic = STORED[precision]
    draw = torch.Generator().manual_seed(seed)
    w, v = expansion(draw, *shape), expansion(draw, *shape, least=-60, most=-2)
    stored = Stored(
        w[0], wild(draw, *shape), v[0].abs(), w[1] if weight_low else None,
        torch.where(v[0] < 0, -v[1], v[1]) if v_low else None, KEY if is_stochastic else None,
    )  # fmt: skip
    return stored, wild(draw, *shape)


def copy_of(stored: Stored) -> Stored:
    """The same in memory of its own."""
    return replace(stored, **{name: tensor.clone() for name, tensor in tensors_of(stored).items()})


def tensors_of(stored: Stored) -> dict[str, Tensor]:
    """The tensors that are there, by name."""
    named = {field.name: getattr(stored, field.name) for field in fields(stored)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def differences(one: Stored, other: Stored) -> list[str]:
    """Names of the tensors whose bits differ."""
    theirs = tensors_of(other)
    return [
        name
        for name, tensor in tensors_of(one).items()
        if not torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16))
    ]
