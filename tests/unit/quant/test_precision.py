"""LinearPrecision: option strings and validation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision, RoundingKey, quantize
from megatron_snip.quant.linears.operands import REDUCTION_DIM


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


def test_nvfp4_with_tiles_for_weights_too_is_a_precision_and_needs_no_format_of_its_own():
    """NVIDIA's recipe with disable_2d_quantization: the transform is wgrad's, and wgrad reads no weight."""
    precision = LinearPrecision.parse("nvfp4_plain/nvfp4_plain/nvfp4")
    recipe = replace(get_format("nvfp4"), name="nvfp4 in tiles", weight_block=None)
    x, key = torch.randn(64, 128), RoundingKey(seed=1, iteration=2, stream=3)
    for gemm, roles in REDUCTION_DIM.items():
        for role, dim in roles.items():
            fmts = (getattr(precision, gemm), recipe)
            ours, theirs = (quantize(x, fmt, role=role, dim=dim, key=key.for_operand(role)) for fmt in fmts)
            assert ours.codes.equal(theirs.codes) and ours.scales.equal(theirs.scales)
    square = quantize(x, "nvfp4", role="weight", dim=1)
    assert not square.codes.equal(quantize(x, recipe, role="weight", dim=1).codes)
