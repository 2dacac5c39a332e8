"""Specifies scales: how a block's scale follows from its largest magnitude.

Every rule gives ``encode``, which multiplies elements before rounding, and ``scale``, which decodes: x ~= scale * q.
All arithmetic is float32, and divisions round once.  Tensor.__rtruediv__ (``6.0 / t``) multiplies by a reciprocal,
which rounds twice, so divisions use ``torch.div`` of tensors.
Sources: docs/numerics.md; OCP MX v1.0, sec. 6.3, for "e8m0"; arXiv 2506.08027 for "e8m0_ceil"; Transformer Engine's
NVFP4 reference quantiser (custom_recipes/reference_nvfp4.py) for the order of operations of "e4m3" and "e4m3_4over6".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.formats.element import E4M3, Element
from megatron_snip.quant.casts.grid import power_of_two, round_nearest

FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny
_MANTISSA = 0x7FFFFF  # of a float32's bits
# E8M0 has exponents from -127 to 127, but encoding with scale 2**127 would take 2**-127, a subnormal float32.
_SMALLEST, _LARGEST = -127, 126


def block_scales(amax: Tensor, fmt: Format, tensor_amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``encode`` and stored ``scale`` of each block: amax float32 [...] -> two float32 [...].

    tensor_amax: float32 scalar, for formats with ``needs_tensor_amax``; a block's scale then decodes together with
    ``tensor_scale``.  Both amaxes are over finite elements, so neither is infinite or NaN.
    """
    assert fmt.element is not None
    if fmt.scale in ("e8m0", "e8m0_ceil"):
        return _e8m0(amax, fmt.element, up=fmt.scale == "e8m0_ceil")
    if fmt.scale == "e4m3":
        assert tensor_amax is not None
        return _e4m3(amax, fmt, tensor_amax)
    assert fmt.scale in ("fp32", "fp32_pow2"), f"no rule for scale {fmt.scale}"
    encode = _divide(fmt.element.max, amax)
    if fmt.scale == "fp32_pow2":
        # only E2M5 gets below the smallest normal number (3.94 / 3.4e38), which the mask would turn into 0
        encode = (encode.clamp(min=_FLOAT32_TINY).view(torch.int32) & 0x7F800000).view(torch.float32)
    return encode, torch.where(amax > 0, _divide(1.0, encode), 0.0)


def tensor_encode(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """The factor that maps an E4M3 format's largest block scale to the largest its rule uses: float32 [] -> [].

    Four over six needs room for 1.5 times a scale: 1.5 * 256 is an E4M3 number.
    """
    assert fmt.element is not None
    largest = 256.0 if fmt.scale == "e4m3_4over6" else E4M3.max
    return _divide(largest * fmt.element.max, tensor_amax)


def tensor_scale(tensor_amax: Tensor, fmt: Format) -> Tensor:
    """The tensor's scale, which multiplies the block scales of E4M3 formats: float32 [] -> []."""
    return _divide(1.0, tensor_encode(tensor_amax, fmt))


def four_over_six(blocks: Tensor, fmt: Format, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    """``block_scales`` of "e4m3_4over6": magnitudes [row blocks, rows, column blocks, columns] -> two float32 [., .].

    Each block is rounded to nearest with two scales: the one that maps its largest magnitude to the element's max, and
    1.5 times that, which maps it to 4 instead of E2M1's 6.  The smaller squared error wins, the first on a tie.
    Errors are in units of the tensor's scale.  blocks: 0 where an element is not finite or outside.
    """
    element = fmt.element
    assert element is not None
    amax, whole = blocks.amax(dim=(1, 3), keepdim=True), tensor_encode(tensor_amax, fmt)
    wanted = torch.div(amax, torch.full_like(amax, element.max)) * whole
    made = []
    for factor in (1.0, 1.5):
        scale = round_nearest((wanted * factor).clamp(max=E4M3.max), E4M3)
        encode = _divide(1.0, scale * tensor_scale(tensor_amax, fmt))
        error = round_nearest((blocks * encode).clamp(max=element.max), element) * scale - blocks * whole
        made.append((encode, scale, _sum_of_blocks(error * error)))
    (encode, scale, error), (other_encode, other_scale, other_error) = made
    return tuple(
        torch.where(other_error < error, other, one)[:, 0, :, 0]
        for one, other in ((encode, other_encode), (scale, other_scale))
    )  # type: ignore[return-value]


def _sum_of_blocks(x: Tensor) -> Tensor:
    """Sum each block of x [row blocks, rows, column blocks, columns] in Transformer Engine's order: [., 1, ., 1].

    It adds columns one after another, then the two halves of the rows, then their halves, and so on.  In blocks of one
    column, it adds rows one after another.
    """
    if x.shape[3] == 1:
        x = x.transpose(1, 3)
    total = torch.zeros_like(x[..., :1])
    for column in x.split(1, dim=3):
        total = total + column
    while (rows := total.shape[1]) > 1:
        half = 1 << (rows - 1).bit_length() - 1
        rest = F.pad(total[:, half:], (0, 0, 0, 0, 0, 2 * half - rows))
        total = total[:, :half] + rest
    return total


def _divide(numerator: float, denominator: Tensor) -> Tensor:
    """A float32 division that rounds once, clamped to the largest finite value."""
    return torch.div(torch.full_like(denominator, numerator), denominator).clamp(max=FLOAT32_MAX)


def _e8m0(amax: Tensor, element: Element, *, up: bool) -> tuple[Tensor, Tensor]:
    """2**(floor(log2 amax) - emax), or with ``up`` 2**ceil(log2(amax / max)), clamped to E8M0; 0 gives the smallest."""
    # float32's exponent field is floor(log2), except for subnormal numbers, which are below E8M0's smallest anyway
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - element.emax
    if up:  # amax / max is above 2**exponent if amax's mantissa is above max's
        largest = torch.tensor(element.max).view(torch.int32)
        exponent = exponent + ((bits & _MANTISSA) > (largest & _MANTISSA).item())
    exponent = exponent.clamp(min=_SMALLEST, max=_LARGEST)
    # 2**-127 is subnormal: half of 2**-126
    scale = torch.where(exponent > _SMALLEST, power_of_two(exponent.clamp(min=_SMALLEST + 1)), 2.0**_SMALLEST)
    return power_of_two(-exponent), scale


def _e4m3(amax: Tensor, fmt: Format, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 block scale amax / element max / tensor scale; a scale that rounds to 0 gives zeros."""
    assert fmt.element is not None
    sixth = torch.div(tensor_amax.new_ones(()), tensor_amax.new_full((), fmt.element.max))
    scale = (amax * (tensor_encode(tensor_amax, fmt) * sixth)).clamp(max=E4M3.max)
    scale = round_nearest(scale, E4M3)
    return _divide(1.0, scale * tensor_scale(tensor_amax, fmt)), scale
