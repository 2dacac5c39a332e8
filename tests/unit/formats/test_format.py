"""Formats: the registry, block shapes, and what an unknown name says."""

from __future__ import annotations

import pytest

from megatron_snip.formats import Format, format_names, get_format, register
from megatron_snip.formats.element import E2M1, E4M3


def test_the_registered_formats():
    assert format_names() == ["bf16", "fp8", "fp4", "fp8_e5m2"]
    assert get_format("fp8").element is E4M3
    assert get_format("fp4").element is E2M1
    assert not get_format("bf16").quantised


def test_only_fp4_gradients_round_stochastically_by_default():
    assert get_format("fp4").stochastic_roles == {"grad_output"}
    for name in ("bf16", "fp8", "fp8_e5m2", "e2m1"):
        assert not get_format(name).stochastic_roles


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp8_e5m2", "e3m2"])
def test_tiles_follow_the_reduction_dim_and_weights_have_square_blocks(name):
    fmt = get_format(name)
    for role in ("input", "grad_output"):
        assert fmt.block_shape(role, 1) == (1, 128)
        assert fmt.block_shape(role, 0) == (128, 1)
    assert fmt.block_shape("weight", 0) == fmt.block_shape("weight", 1) == (128, 128)


def test_without_weight_blocks_weights_have_tiles():
    fmt = Format("tiles", E2M1, tile=32, weight_block=None)
    assert fmt.block_shape("weight", 1) == (1, 32) and fmt.block_shape("weight", 0) == (32, 1)


def test_stored_bits_count_the_scale():
    assert get_format("fp8").bits_per_element == 8.25
    assert get_format("fp4").bits_per_element == 4.25
    assert get_format("bf16").bits_per_element == 16
    assert [get_format(name).element_bits for name in ("bf16", "fp8", "fp4", "e3m2")] == [16, 8, 4, 6]


@pytest.mark.parametrize("name", ["fp7", "", "E4M3", "e3m2x", "mxfp5"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"bf16, fp8, fp4, fp8_e5m2.*e3m2"):
        get_format(name)


def test_bad_arguments_raise():
    fmt = get_format("fp8")
    with pytest.raises(ValueError, match="input, weight, grad_output"):
        fmt.block_shape("activation", 1)
    with pytest.raises(ValueError, match="dim=2"):
        fmt.block_shape("input", 2)
    with pytest.raises(ValueError, match="taken"):
        register(Format("fp8", E4M3))
    with pytest.raises(ValueError, match="e8m0"):
        Format("x", E2M1, scale="e8m0")
    with pytest.raises(ValueError, match="activation"):
        Format("x", E2M1, stochastic_roles=frozenset({"activation"}))
    with pytest.raises(ValueError, match="tile=0"):
        Format("x", E2M1, tile=0)
