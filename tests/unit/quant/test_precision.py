"""LinearPrecision: option strings and validation."""

from __future__ import annotations

import pytest

from megatron_snip.quant import LinearPrecision


@pytest.mark.parametrize("text", ["bf16", "fp4", "fp8_e5m2", "e3m2", "fp4/fp4/fp8", "bf16/fp8/fp4"])
def test_option_strings_round_trip(text):
    precision = LinearPrecision.parse(text)
    assert str(precision) == text
    assert LinearPrecision.parse(str(precision)) == precision
    assert len({precision, LinearPrecision.parse(text)}) == 1


def test_order_of_the_three():
    precision = LinearPrecision.parse("fp8/fp4/bf16")
    assert (precision.fprop, precision.dgrad, precision.wgrad) == ("fp8", "fp4", "bf16")
    assert str(LinearPrecision("fp4", "fp4", "fp4")) == "fp4"
    assert LinearPrecision.uniform("fp8") == LinearPrecision("fp8", "fp8", "fp8")


@pytest.mark.parametrize("text", ["", "fp4/fp8", "fp4/fp4/fp4/fp4", "fp4/fp4/fp5", "fp4 / fp4 / fp4"])
def test_other_strings_raise(text):
    with pytest.raises(ValueError, match=r"known: bf16|write one format"):
        LinearPrecision.parse(text)


def test_the_error_names_the_gemm():
    with pytest.raises(ValueError, match="dgrad: unknown format 'fp5'"):
        LinearPrecision("fp4", "fp5", "fp4")
