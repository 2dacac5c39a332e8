"""Each scale rule against the formula of docs/numerics.md in numpy, over all sizes that bfloat16 has."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_snip.formats import SCALES, Format, get_format
from megatron_snip.formats import format as format_module
from megatron_snip.formats.element import E2M1, element_named
from megatron_snip.quant.casts.scales import block_scales, four_over_six, tensor_scale
from tests.unit.quant.elements import ELEMENTS, NAMES, all_bf16
from tests.unit.quant.specification import fake_quantize_reference, quantize_reference

LARGEST = np.finfo(np.float32).max
AMAX = torch.cat([all_bf16().abs().unique(), torch.tensor([2.0**-149, float(LARGEST)])])


def format_of(element, scale):
    return Format(name=f"{element.name}-{scale}", element=element, tile=16, weight_block=None, scale=scale)


def divide(numerator, denominator):
    """A float32 division that ends at the largest number."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(np.float32(numerator) / np.asarray(denominator, np.float32), LARGEST)


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_fp32_scales_are_two_true_divisions(element):
    encode, scale = block_scales(AMAX, format_of(element, "fp32"), None)
    expected = divide(element.max, AMAX.numpy())
    np.testing.assert_array_equal(encode.numpy(), expected)
    np.testing.assert_array_equal(scale.numpy(), np.where(AMAX.numpy() > 0, divide(1, expected), np.float32(0)))


def test_a_kind_without_a_rule_is_not_taken_for_another(monkeypatch):
    """As one that is new in format.py, which refuses unknown ones."""
    monkeypatch.setitem(format_module._SCALES, "odd", format_module._SCALES["e8m0"])
    with pytest.raises(AssertionError, match="no rule for scale odd"):
        block_scales(AMAX, format_of(E2M1, "odd"), None)


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_power_of_two_scales_are_the_fp32_ones_rounded_down(element):
    encode, scale = block_scales(AMAX, format_of(element, "fp32_pow2"), None)
    _, exponent = np.frexp(np.maximum(divide(element.max, AMAX.numpy()), np.float32(2.0**-126)).astype(np.float64))
    np.testing.assert_array_equal(encode.double().numpy(), 2.0 ** (exponent - 1))
    np.testing.assert_array_equal(scale.double().numpy(), np.where(AMAX.numpy() > 0, 2.0 ** (1 - exponent), 0))


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_e8m0_scales_are_those_of_ocp_mx(element):
    encode, scale = block_scales(AMAX, format_of(element, "e8m0"), None)
    amax = np.maximum(AMAX.double().numpy(), 2.0**-149)
    exponent = np.clip(np.frexp(amax)[1] - 1 - (np.frexp(element.max)[1] - 1), -127, 127)
    np.testing.assert_array_equal(scale.double().numpy(), 2.0**exponent)
    np.testing.assert_array_equal(encode.double().numpy(), 2.0**-exponent)
    stored = scale.numpy().astype(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(stored.astype(np.float32), scale.numpy())


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_e8m0_scales_that_are_rounded_up_are_the_least_under_which_nothing_saturates(element):
    encode, scale = block_scales(AMAX, format_of(element, "e8m0_ceil"), None)
    amax = AMAX.double().numpy()
    np.testing.assert_array_equal(np.frexp(scale.double().numpy())[0], 0.5)
    np.testing.assert_array_equal(encode.double().numpy(), 1 / scale.double().numpy())
    largest = element.max * scale.double().numpy()
    free = scale.numpy() < 2.0**126  # beyond it only E2M5 could have use of more
    assert (amax[free] <= largest[free]).all() and (amax[~free] > largest[~free] / 2).all()
    lower = scale.numpy() > 2.0**-127
    assert (amax[lower] > largest[lower] / 2).all()


@pytest.mark.parametrize("whole", [0.0, 2.0**-149, 1e-36, 3e-9, 1.0, 2.71875, 448.0, 1e30, float(LARGEST)])
@pytest.mark.parametrize("element", [E2M1, element_named(3, 2), element_named(4, 3)], ids=["E2M1", "E3M2", "E4M3"])
def test_e4m3_scales_are_rounded_by_ml_dtypes_under_the_tensors(element, whole):
    amax, whole = AMAX[whole >= AMAX], torch.tensor(whole)
    encode, scale = block_scales(amax, format_of(element, "e4m3"), whole)
    tensor_encode = divide(448 * element.max, whole.numpy())
    tensor_decode = divide(1, tensor_encode)
    assert tensor_scale(whole, format_of(element, "e4m3")).numpy() == tensor_decode
    factor = tensor_encode * (np.float32(1) / np.float32(element.max))
    stored = np.minimum(amax.numpy() * factor, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(scale.numpy(), stored)
    np.testing.assert_array_equal(encode.numpy(), divide(1, stored * tensor_decode))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_saturates_says_whether_finite_values_can_be_beyond_the_largest(element, scale):
    """Blocks of one value each, of every size."""
    fmt, whole = format_of(element, scale), AMAX.max()
    if scale == "e4m3_4over6":
        encode, _ = (made[0] for made in four_over_six(AMAX[None, None, :, None], fmt, whole))
    else:
        encode, _ = block_scales(AMAX, fmt, whole)
    assert bool((AMAX * encode > element.saturation).any()) == fmt.saturates


def test_dividing_a_number_by_a_tensor_is_no_true_division():
    """Why scales.py divides tensors: ``6.0 / t`` multiplies by a reciprocal and is off for many amaxes."""
    amax = torch.arange(0x3F80, 0x4000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    wrong = 6.0 / amax
    right, _ = block_scales(amax, get_format("fp4"), None)
    assert torch.equal(wrong, amax.reciprocal() * 6.0), "torch has changed: docs/numerics.md says otherwise"
    assert (wrong != right).float().mean().item() == 34 / 128


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_infinities_nan_and_zeros_in_blocks_of_any_size(element, scale):
    """Up to half of float32's range an infinity takes the block's largest value and nothing else changes."""
    fmt = format_of(element, scale)
    inf, nan = float("inf"), float("nan")
    for amax in [0.0, 2.0**-133, 1e-38, 3e-12, 1.0, 1e30, 1e38]:
        clean = torch.tensor([[amax, -amax, 0.0, -0.0, amax / 3, amax / 5]], dtype=torch.bfloat16)
        dirty = torch.cat([clean, torch.tensor([[inf, -inf, nan]], dtype=torch.bfloat16)], dim=1)
        expected, q = (quantize_reference(x, fmt, role="input", dim=1) for x in (clean, dirty))
        assert torch.equal(q.codes[:, :6], expected.codes) and torch.equal(q.scales, expected.scales)
        top = element.max_code
        assert q.codes[0, 6:].tolist() == [top, element.sign_code + top, 0xFF]
        assert int(q.saturated) == int(expected.saturated) + 2
        y = fake_quantize_reference(dirty, fmt, role="input", dim=1)[0]
        assert y[:8].isfinite().all() and y[8].isnan() and y[3].signbit() and not y[2].signbit()
        assert y[6] == -y[7] and float(y[6]) >= float(y[0])
        if amax == 0:
            assert not y[:6].any() and float(y[6]) == (element.max * 2.0**-127 if scale.startswith("e8m0") else 0)


def test_a_scale_that_rounds_to_zero_makes_zeros():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:18] = 1.0, torch.tensor([1e-6, -1e-6])
    q = quantize_reference(x, "nvfp4_plain", role="input", dim=1)
    assert q.scales.tolist() == [[448.0, 0.0]]
    assert q.codes[0, 16:18].tolist() == [7, 15] and q.dequantize()[0, 16:].count_nonzero() == 0
    assert q.dequantize()[0, 17].signbit()
