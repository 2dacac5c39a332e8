"""The specification of AdamW on BF16 weights, in plain torch: float32 operations, rounded to BF16 where stated.

    g   = grad * clip
    m   = bf16(b1 m + (1 - b1) g)
    v   = bf16(b2 v + (1 - b2) g^2)                      without a low part
    v   = v b2 + bf16((1 - b2) g^2)                      with one, as expansions (`decay`)
    u   = bf16(-lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps) - lr decay w)
    w   = bf16(w + u), bf16(w + u) rounded stochastically, or w + u as expansions (`grow`)

Decay is part of the update u, since alone it would be below half an ulp of w and lost.  u reads the high parts of w
and v.  `Scalars` holds the float32 numbers made from lr, b1, b2 and so on.  Kernels give the same bits.
Source: AdamW, arXiv 1711.05101; Collage, arXiv 2405.03637, whose "plus" has both low parts and "light" only that of w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_snip.quant.adamw.expansion import constant, decay, grow, rounded
from megatron_snip.quant.casts.rounding import RoundingKey, random_bits


class Scalars(NamedTuple):
    """The numbers of one step, all float32: `of` makes them."""

    clip: float
    beta1: float
    rest1: float  # 1 - b1
    beta2: float
    rest2: float  # 1 - b2
    beta2_high: float  # b2 as an expansion
    beta2_low: float
    rate: float  # -lr / (1 - b1^t)
    correction: float  # 1 / sqrt(1 - b2^t)
    eps: float
    decay: float  # lr times weight decay

    @classmethod
    def of(
        cls, step: int, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, clip: float = 1.0
    ) -> Scalars:
        """The numbers for update ``step``, counted from 1, computed in double precision.

        clip: what gradients are multiplied by first.
        """
        (beta1, beta2), high_and_low = betas, constant(betas[1])
        rate, correction = -lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)
        exact = (clip, beta1, 1.0 - beta1, beta2, 1.0 - beta2, *high_and_low, rate, correction, eps, lr * weight_decay)
        return cls(*[float(np.float32(value)) for value in exact])


@dataclass(frozen=True)
class Stored:
    """The BF16 tensors [...] of one parameter that a step reads and updates, all contiguous and of one shape.

    weight_low, v_low: the low parts of weight and v, or None if these are plain BF16 numbers.
    key: the random bits that round the weight, a matrix [R, C]; None rounds to nearest.
    """

    weight: Tensor
    m: Tensor
    v: Tensor
    weight_low: Tensor | None = None
    v_low: Tensor | None = None
    key: RoundingKey | None = None


def reference(stored: Stored, grad: Tensor, s: Scalars) -> None:
    """Update `stored` in place with the BF16 gradient [...]."""
    w, g = stored.weight.float(), grad.float() * s.clip
    m = rounded(stored.m.float() * s.beta1 + g * s.rest1)
    square = (g * g) * s.rest2
    if stored.v_low is None:
        v = rounded(stored.v.float() * s.beta2 + square)
    else:
        v, low = decay(stored.v.float(), stored.v_low.float(), (s.beta2_high, s.beta2_low), rounded(square))
        stored.v_low.copy_(low)
    stored.m.copy_(m)
    stored.v.copy_(v)
    u = update(w, m, v, s)
    if stored.weight_low is not None:
        w, low = grow(w, stored.weight_low.float(), u)
        stored.weight_low.copy_(low)
    elif stored.key is not None:
        w = stochastic(w + u, stored.key)
    else:
        w = w + u
    stored.weight.copy_(w)


def update(w: Tensor, m: Tensor, v: Tensor, s: Scalars, *, rounds: bool = True) -> Tensor:
    """The float32 update u [...] that a step adds to the weight w, from the new m and v.

    rounds: to BF16, as all steps on BF16 weights do.
    """
    root = v.double().sqrt().float()  # correctly rounded: torch's own on CPUs may be off by an ulp
    u = (m / (root * s.correction + s.eps)) * s.rate - w * s.decay
    return rounded(u) if rounds else u


def stochastic(x: Tensor, key: RoundingKey) -> Tensor:
    """Round float32 x [R, C] to BF16 up or down at random, so that the mean is x; BF16 numbers never move.

    A 16-bit draw is added below the last bit that BF16 keeps, and carries into it or does not.
    """
    draws = random_bits(key, x.shape[0], x.shape[1], x.device).to(torch.int32)
    up_or_down = ((x.view(torch.int32) + draws) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), up_or_down, x)
