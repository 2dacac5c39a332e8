"""Formats: the registry, block shapes, and what an unknown name says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_snip.formats import ROLES, Format, Hadamard, format_names, get_format, register
from megatron_snip.formats.element import E2M1, E4M3, E5M2

#: Formats that this package ships, and their elements; a new one need not be here.
SHIPPED = {
    "bf16": None,
    "fp8": "E4M3",
    "fp4": "E2M1",
    "fp8_e5m2": "E5M2",
    "fp8_hybrid": "E4M3",
    "fp8_pow2": "E4M3",
    "fp4_pow2": "E2M1",
    "mxfp8": "E4M3",
    "mxfp8_e5m2": "E5M2",
    "mxfp8_dequantized": "E4M3",
    "mxfp8_floor": "E4M3",
    "mxfp6_e2m3": "E2M3",
    "mxfp6_e3m2": "E3M2",
    "mxfp4": "E2M1",
    "mxfp4_floor": "E2M1",
    "mxfp4_tetrajet": "E2M1",
    "bf16_dequantized": None,
    "nvfp4_plain": "E2M1",
    "nvfp4": "E2M1",
    "nvfp4_4over6": "E2M1",
}


def test_the_registered_formats():
    elements = {name: get_format(name).element and get_format(name).element.name for name in format_names()}
    assert SHIPPED.items() <= elements.items()
    assert not get_format("bf16").quantised


def test_only_fp4_gradients_round_stochastically_by_default():
    for name in [*SHIPPED, "e2m1"]:
        fmt = get_format(name)
        rounds = {(role, dim) for role, dim in itertools.product(ROLES, (0, 1)) if fmt.stochastic(role, dim)}
        gradients = {("grad_output", 0), ("grad_output", 1)} if "fp4" in name else set()
        others = {"mxfp4": {("input", 0)}, "mxfp4_tetrajet": {("input", 0), ("weight", 0)}}.get(name, set())
        assert rounds == gradients | others, "wgrad's input and dgrad's weight are along dim 0"


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp8_e5m2", "e3m2"])
def test_tiles_follow_the_reduction_dim_and_weights_have_square_blocks(name):
    fmt = get_format(name)
    for role in ("input", "grad_output"):
        assert fmt.block_shape(role, 1) == (1, 128)
        assert fmt.block_shape(role, 0) == (128, 1)
    assert fmt.block_shape("weight", 0) == fmt.block_shape("weight", 1) == (128, 128)


@pytest.mark.parametrize("name", SHIPPED)
def test_published_blocks_and_scales(name):
    """OCP MX v1.0, sec. 5: 32 elements under E8M0; NVFP4: 16 under E4M3; else 128 and 128x128 under float32."""
    fmt = get_format(name)
    if name.startswith("mx"):
        expected = (32, None, "e8m0" if name.endswith("floor") or "fp6" in name else "e8m0_ceil", None)
    elif name.startswith("nv"):
        scale = "e4m3_4over6" if name == "nvfp4_4over6" else "e4m3"
        expected = (16, None, scale, None) if name == "nvfp4_plain" else (16, 16, scale, 16)
    else:
        expected = (128, 128, "fp32_pow2" if name.endswith("pow2") else "fp32", None)
    assert (fmt.tile, fmt.weight_block, fmt.scale, fmt.hadamard and fmt.hadamard.length) == expected
    assert fmt.needs_tensor_amax == name.startswith("nv")


def test_gradients_have_their_own_element():
    """Hybrid: but for the name, inputs and weights are those of fp8, and gradients those of fp8_e5m2."""
    hybrid = get_format("fp8_hybrid")
    assert hybrid.elements == (E4M3, E5M2) and (hybrid.element_bits, hybrid.bits_per_element) == (8, 8.25)
    for role, name in (("input", "fp8"), ("weight", "fp8"), ("grad_output", "fp8_e5m2")):
        one = hybrid.of(role)
        assert replace(one, name=name) == get_format(name) and one.elements == get_format(name).elements
        assert one.of("input") is one.of("grad_output") is one
    assert get_format("fp8").of("grad_output") is get_format("fp8") and get_format("bf16").elements == ()


def test_without_weight_blocks_weights_have_tiles():
    fmt = Format("tiles", E2M1, tile=32, weight_block=None)
    assert fmt.block_shape("weight", 1) == (1, 32) and fmt.block_shape("weight", 0) == (32, 1)


def test_stored_bits_count_the_scale():
    assert get_format("fp8").bits_per_element == 8.25
    assert get_format("fp4").bits_per_element == 4.25
    assert get_format("bf16").bits_per_element == 16
    stored = {"mxfp8": 8.25, "mxfp6_e3m2": 6.25, "mxfp4": 4.25, "nvfp4_plain": 4.5, "nvfp4": 4.5, "fp8_pow2": 8.25}
    assert {name: get_format(name).bits_per_element for name in stored} == stored
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
    with pytest.raises(ValueError, match="scale='e5m3'.*e8m0"):
        Format("x", E2M1, scale="e5m3")
    with pytest.raises(ValueError, match=r"signs='\+-\+-', of length 4; give 16, 32, 128 of \+ and -"):
        Hadamard("+-+-")
    with pytest.raises(ValueError, match="signs='1111111111111111'"):
        Hadamard("1" * 16)
    for gemms, said in (({"fprop", "bprop"}, r"\['bprop', 'fprop'\]"), (set(), r"\[\]")):
        with pytest.raises(ValueError, match=f"gemms={said}; choose from fprop, dgrad, wgrad"):
            Hadamard("+" * 16, frozenset(gemms))
    for wrong in ("activation", "fprop.grad_output"):
        with pytest.raises(ValueError, match=rf"\['{wrong}'\]; known: input, .*dgrad.weight, .*wgrad.input"):
            Format("x", E2M1, stochastic_roles=frozenset({wrong}))
    with pytest.raises(ValueError, match="tile=0"):
        Format("x", E2M1, tile=0)
    for element, bits in ((E2M1, 4), (None, 0)):
        with pytest.raises(
            ValueError, match=f"x: gradient_element=E5M2 has 8 bits, element {bits}; give one of as many"
        ):
            Format("x", element, gradient_element=E5M2)
