"""Elements: constants of the published types, and the code tables against ml_dtypes."""

from __future__ import annotations

import struct

import gfloat
import ml_dtypes
import numpy as np
import pytest

from megatron_snip.formats.element import E2M1, E4M3, E5M2, NAN_CODE, Element, element_named
from tests.unit.quant.elements import ELEMENTS, NAMES, gfloat_format

INDEPENDENT = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize(
    ("element", "largest", "min_normal", "min_subnormal", "bits", "emin", "emax"),
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 8, -6, 8),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 8, -14, 15),
        (E2M1, 6.0, 1.0, 0.5, 4, 0, 2),
    ],
)
def test_published_constants(element, largest, min_normal, min_subnormal, bits, emin, emax):
    assert (element.max, element.min_normal, element.min_subnormal) == (largest, min_normal, min_subnormal)
    assert (element.bits, element.emin, element.emax) == (bits, emin, emax)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_codes_and_values_are_those_of_ml_dtypes(name):
    element = element_named(int(name[1]), int(name[3]))
    codes = [sign * element.sign_code + code for sign in (0, 1) for code in range(element.max_code + 1)]
    theirs = np.array(codes, np.uint8).view(INDEPENDENT[name]).astype(np.float64)
    ours = np.array([element.value(code) for code in codes])
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))
    assert element.max == float(ml_dtypes.finfo(INDEPENDENT[name]).max)
    assert element.min_subnormal == float(ml_dtypes.finfo(INDEPENDENT[name]).smallest_subnormal)


def test_values_ascend_and_end_at_the_derived_limits():
    for exponent_bits in range(2, 7):
        for mantissa_bits in range(1, 8 - exponent_bits):
            element = element_named(exponent_bits, mantissa_bits)
            values = element.values()
            assert values == sorted(set(values))
            assert values[0] == 0.0 and values[1] == element.min_subnormal and values[-1] == element.max
            assert values[2**mantissa_bits] == element.min_normal


def test_nan_code_is_no_finite_code():
    for element in (E2M1, E4M3, E5M2, element_named(3, 3)):
        assert np.isnan(element.value(NAN_CODE))
        assert element.sign_code + element.max_code < NAN_CODE


def test_codes_without_a_finite_value_raise():
    with pytest.raises(ValueError, match="0x7f"):
        E4M3.value(0x7F)
    with pytest.raises(ValueError, match="0x10"):
        E2M1.value(0x10)


@pytest.mark.parametrize(("exponent_bits", "mantissa_bits"), [(1, 2), (7, 0), (4, 4), (8, 7), (2, 0)])
def test_impossible_layouts_raise(exponent_bits, mantissa_bits):
    with pytest.raises(ValueError, match=f"E{exponent_bits}M{mantissa_bits}"):
        element_named(exponent_bits, mantissa_bits)


def test_bad_specials_raise():
    with pytest.raises(ValueError, match="ieee, fn or finite"):
        Element(2, 1, "nan")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no code for NaN"):
        Element(4, 3, "finite")


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES)
def test_saturation_is_the_last_float32_that_an_endless_grid_rounds_to_the_largest_value(element):
    endless = gfloat_format(element, more_exponents=1)

    def stays(bits: int) -> bool:
        (size,) = struct.unpack("<f", struct.pack("<I", bits))
        return gfloat.round_float(endless, size) <= element.max

    low, high = (struct.unpack("<I", struct.pack("<f", size))[0] for size in (element.max, 2 * element.max))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if stays(middle) else (low, middle)
    assert struct.pack("<f", element.saturation) == struct.pack("<I", low)


def test_carriers():
    """Which elements an FP8 tensor core holds exactly."""
    carriers = {element.name: element.carrier and element.carrier.name for element in ELEMENTS}
    e4m3 = ["E2M1", "E2M2", "E2M3", "E3M1", "E3M2", "E3M3", "E4M1", "E4M2", "E4M3"]
    assert carriers == {name: "E4M3" if name in e4m3 else "E5M2" if name == "E5M2" else None for name in NAMES}
