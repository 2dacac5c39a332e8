"""Whole tensors, codes and scales, against other projects' quantisers, on bfloat16 data; differences by cause.

torchao is installed with the tests.  The others are compared where a checkout is given:
``pytest tests/unit/quant/test_peers.py --microxcaling DIR --transformer-engine DIR --neighbours DIR``.
docs/numerics.md has the table of what is the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_snip.formats import get_format
from megatron_snip.formats.element import E2M1, E4M3, E5M2
from megatron_snip.quant import quantize
from megatron_snip.quant.casts.cast import Form
from megatron_snip.quant.casts.grid import encode, round_nearest
from megatron_snip.quant.kernels.dispatch import transformed
from tests.unit.quant.elements import all_bf16
from tests.unit.quant.peers import (
    bf16_tensors,
    load_fouroversix,
    load_microxcaling,
    load_transformer_engine_blockwise,
    load_transformer_engine_nvfp4,
)
from tests.unit.quant.specification import quantize_reference

DATA = bf16_tensors()
CASTS = [pytest.param(quantize, id="dispatched"), pytest.param(quantize_reference, id="specification")]
MX = {  # format: microxcaling's and torchao's name of the element
    "mxfp8_floor": ("fp8_e4m3", torch.float8_e4m3fn),
    "mxfp6_e2m3": ("fp6_e2m3", "fp6_e2m3"),
    "mxfp6_e3m2": ("fp6_e3m2", "fp6_e3m2"),
    "mxfp4_floor": ("fp4_e2m1", torch.float4_e2m1fn_x2),
}
#: Every finite number, sorted, so that a block has like sizes; and in random order those that are alike in size.
EVERY = torch.cat([all_bf16(), torch.zeros(256)]).sort().values
MIDDLE = EVERY[(EVERY.abs() >= 2.0**-24) & (EVERY.abs() < 256)]
MIDDLE = MIDDLE[torch.randperm(len(MIDDLE), generator=torch.Generator().manual_seed(1))]
TILES_4OVER6 = replace(get_format("nvfp4_plain"), name="tiles", scale="e4m3_4over6")
pytestmark = pytest.mark.parametrize("name", DATA)


@pytest.fixture
def checkout(request):
    """Call it with an option of this project's tests to get the folder given, or skip."""

    def folder(option: str) -> Path:
        if not (given := request.config.getoption(option)):
            pytest.skip(f"needs {option} DIR")
        return Path(given)

    return folder


def nibbles(packed):
    """Two E2M1 codes a byte, the first in the lower half: uint8 [R, C / 2] -> [R, C]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(start_dim=1)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fmt", MX)
def test_mx_is_that_of_torchao(fmt, name, cast):
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(DATA[name], MX[fmt][1], 32)
    ours = cast(DATA[name], fmt, role="input", dim=1)
    assert torch.equal(ours.scales, scales.float())
    assert torch.equal(ours.codes, nibbles(codes) if fmt == "mxfp4_floor" else codes.view(torch.uint8))


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    ("fmt", "element"),
    [("mxfp8", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2), ("mxfp4", torch.float4_e2m1fn_x2)],
)
def test_mx_is_that_of_torchao_with_scales_rounded_up(fmt, element, name, cast):
    """RCEIL, as torchao and torchtitan train with; its scale of a block of zeros is 2^-127, too."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(DATA[name], element, 32, ScaleCalculationMode.RCEIL)
    ours = cast(DATA[name], fmt, role="input", dim=1)
    assert torch.equal(ours.scales, scales.float())
    assert torch.equal(ours.codes, nibbles(codes) if fmt == "mxfp4" else codes.view(torch.uint8))


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fmt", MX)
def test_mx_is_that_of_microxcaling(fmt, name, cast, checkout, monkeypatch):
    peer = load_microxcaling(checkout("--microxcaling"), monkeypatch)
    for dim in (0, 1):
        ours = cast(DATA[name], fmt, role="input", dim=dim).dequantize()
        theirs = peer._quantize_mx(DATA[name].float(), 8, MX[fmt][0], axes=[dim], block_size=32, round="even")
        assert torch.equal(ours, theirs)


def same_but_for_zero_blocks(ours, codes, scales):
    """Codes are equal, and scales where a block has anything but zeros: there ours is 0, so it decodes to them too."""
    assert torch.equal(ours.codes, codes.view(torch.uint8))
    zeros = ours.scales == 0
    assert torch.equal(ours.scales[~zeros], scales[~zeros])
    assert (scales[zeros] != 0).all()


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("role", "dim"), [("input", 1), ("input", 0), ("weight", 1)])
def test_blockwise_fp8_is_that_of_torchao(role, dim, name, cast):
    """torchao takes amax to be 1e-12 at least, so it has a scale for blocks of zeros."""
    from torchao.prototype.blockwise_fp8_training import kernels

    peers = {
        ("input", 1): kernels.torch_blockwise_scale_act_quant_lhs,
        ("input", 0): kernels.torch_blockwise_scale_act_quant_rhs,
        ("weight", 1): kernels.torch_blockwise_scale_weight_quant,
    }
    codes, scales = peers[role, dim](DATA[name])
    ours = cast(DATA[name], "fp8", role=role, dim=dim)
    same_but_for_zero_blocks(ours, codes, scales)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("fmt", ["fp8", "fp8_pow2", "fp8_e5m2", "fp8_hybrid"])
def test_blockwise_fp8_is_that_of_transformer_engine(fmt, role, name, cast, checkout, monkeypatch):
    """It gives blocks of zeros a scale of 1, we 0."""
    peer = load_transformer_engine_blockwise(checkout("--transformer-engine"), monkeypatch)
    theirs = peer.quantize(
        DATA[name],
        torch.float8_e5m2 if get_format(fmt).of(role).element == E5M2 else torch.float8_e4m3fn,
        return_transpose=True,
        pow_2_scales=fmt == "fp8_pow2",
        quant_tile_shape=(128, 128) if role == "weight" else (1, 128),
        munge_scale_shapes=False,
    )
    same_but_for_zero_blocks(cast(DATA[name], fmt, role=role, dim=1), theirs.data, theirs.scale)
    same_but_for_zero_blocks(cast(DATA[name], fmt, role=role, dim=0), theirs.data_t.T, theirs.scale_t.T)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fmt", ["nvfp4_plain", "nvfp4"])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_nvfp4_is_that_of_transformer_engine(role, fmt, name, cast, checkout, monkeypatch):
    """1x16, 16x16 and transformed forms.  It stores -0 as +0, we keep the sign."""
    peer = load_transformer_engine_nvfp4(checkout("--transformer-engine"), monkeypatch)
    square = fmt == "nvfp4" and role == "weight"
    quantiser = peer.NVFP4QuantizerRef(
        dtype=None, quant_tile_shape=(16, 16) if square else (1, 16), with_rht=fmt == "nvfp4" and role == "input"
    )
    quantiser.rowwise_usage = quantiser.columnwise_usage = True
    x = DATA[name]
    theirs = quantiser.quantize(x)
    for dim, packed, scales in ((1, theirs.data, theirs.scale), (0, theirs.data_t, theirs.scale_t)):
        ours = cast(x, fmt, role=role, dim=dim, rounding="nearest")
        codes, own_scales = (ours.codes, ours.scales) if dim == 1 else (ours.codes.T, ours.scales.T)
        assert torch.equal(own_scales, scales.float()[:: 16 if square else 1])
        source = transformed(x, Form(get_format(fmt), role, dim))
        negative_zero = (source if dim == 1 else source.T).eq(0) & (codes == 8)
        assert torch.equal(codes.masked_fill(negative_zero, 0), nibbles(packed))
        assert negative_zero.any() == name.startswith("zeros")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("role", ["input", "weight"])
def test_four_over_six_is_that_of_transformer_engine(role, name, cast, checkout, monkeypatch):
    """Squared errors in units of the tensor's scale ("fast math" there), a bound of 256; 1x16, 16x1 and 16x16."""
    peer = load_transformer_engine_nvfp4(checkout("--transformer-engine"), monkeypatch)
    side = 16 if role == "weight" else 1
    quantiser = peer.NVFP4QuantizerRef(
        dtype=None, quant_tile_shape=(side, 16), nvfp4_use_4over6=True, nvfp4_e4m3_max=256,
        nvfp4_4over6_err_mode="MSE", nvfp4_4over6_err_use_fast_math=True,
    )  # fmt: skip
    quantiser.rowwise_usage = quantiser.columnwise_usage = True
    every, middle = EVERY.view(256, 256).bfloat16(), MIDDLE.view(-1, 256).bfloat16()
    million = [torch.randn(1024, 1024).bfloat16()] if name == "normal-0" else []
    for x in (DATA[name], every, middle, *million):
        theirs = quantiser.quantize(x)
        ours = cast(x, "nvfp4_4over6", role=role, dim=1, rounding="nearest")
        assert torch.equal(ours.scales, theirs.scale.float()[::side])
        codes = ours.codes.masked_fill(x.eq(0) & (ours.codes == 8), 0)  # -0 is +0 there
        assert torch.equal(codes, nibbles(theirs.data))
        if role == "input":
            columns = cast(x, TILES_4OVER6, role=role, dim=0, rounding="nearest")
            codes = columns.codes.masked_fill(x.eq(0) & (columns.codes == 8), 0)
            assert torch.equal(columns.scales.T, theirs.scale_t.float()) and torch.equal(
                codes.T, nibbles(theirs.data_t)
            )


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("role", ["input", "weight"])
def test_four_over_six_is_that_of_its_authors(role, name, cast, checkout, monkeypatch):
    """fouroversix at dadfad6 (tests/neighbours.sh): MSE, a bound of 256; 1x16 and 16x16.

    It adds errors in x's units, so choices differ where they nearly agree, and where float32 has no room for their
    squares.  It does not clamp: what a scale leaves at 7 or more becomes 8, of which E2M1 has no code.  -0 is +0 there.
    """
    folder = checkout("--neighbours") / "fouroversix"
    if not folder.exists():
        pytest.skip("needs --neighbours DIR with fouroversix (tests/neighbours.sh)")
    peer = load_fouroversix(folder, monkeypatch)
    rows = 16 if role == "weight" else 1
    every, middle = EVERY.view(256, 256).bfloat16(), MIDDLE.view(-1, 256).bfloat16()
    million = [torch.randn(1024, 1024).bfloat16()] if name == "normal-0" else []
    for x in (DATA[name], every, middle, *million):
        packed, scales, amax = peer.quantize(x, block_scale_2d=rows == 16, use_blackwell_scale_layout=False)
        ours = cast(x, "nvfp4_4over6", role=role, dim=1, rounding="nearest")
        codes, scales = nibbles(packed), scales.float().view(len(x), -1)[::rows]
        theirs = ours._replace(codes=codes, scales=scales, tensor_scale=amax / (6 * 256))

        def of_blocks(elements, rows=rows):
            return elements.view(len(elements) // rows, rows, -1, 16).transpose(1, 2).flatten(start_dim=2)

        differ, exact = scales != ours.scales, of_blocks(x.double())
        beyond = exact.abs() >= 6.99 * (scales.minimum(ours.scales) * ours.tensor_scale).double()[..., None]
        negative_zero = of_blocks(x.eq(0) & (ours.codes == 8))
        same = (of_blocks(codes) == of_blocks(ours.codes)) | negative_zero | beyond
        assert (same.all(dim=2) | differ).all()
        made = (of_blocks(one.dequantize().double()) for one in (theirs, ours))
        error, other = (((one - exact) ** 2).sum(dim=2) for one in made)
        alike = ((error - other).abs() <= 1e-5 * error) | (error < 2.0**-120) | (error > 2.0**120)
        assert (alike | beyond.any(dim=2))[differ].all()
        assert differ.float().mean() < 0.04


def test_nvfp4_of_torchao_divides_in_another_order_and_has_a_least_scale(name):
    """With its own formulas in place of ours the rest is the same: that is all the difference."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = DATA[name]
    whole = per_tensor_amax_to_scale(x.abs().amax())
    theirs, packed = nvfp4_quantize(x, 16, whole)
    blocks = x.float().view(128, 16, 16)
    scales = torch.div(torch.div(blocks.abs().amax(dim=2), torch.tensor(6.0)), whole)
    scales = round_nearest(scales.clamp(2.0**-6, 448), E4M3)
    assert torch.equal(scales, theirs.float())
    y = blocks * torch.div(torch.div(torch.tensor(1.0), whole), scales)[..., None]
    q = torch.copysign(round_nearest(y.abs().clamp(max=6), E2M1), y)
    assert torch.equal(encode(q, E2M1).view(x.shape), nibbles(packed))
    ours = quantize_reference(x, "nvfp4_plain", role="input", dim=1)
    assert (ours.scales != scales).float().mean() < 0.05 or name.startswith(("wide", "zeros"))
