"""Elements of fewer bits ride the 8-bit ones of FP8 tensor cores exactly, FP4 in E4M3 above all."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.formats import Format, format_names, get_format
from megatron_snip.formats.element import E4M3, E5M2
from megatron_snip.quant import RoundingKey, quantize
from megatron_snip.quant.casts.cast import Form, Operand
from megatron_snip.quant.casts.grid import decode, encode
from megatron_snip.quant.kernels.dispatch import cast
from tests.unit.quant.elements import ELEMENTS

DTYPE = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
CARRIED = [name for name in format_names() if (element := get_format(name).element) and element.carrier]


@pytest.mark.parametrize("element", [e for e in ELEMENTS if e.carrier], ids=[e.name for e in ELEMENTS if e.carrier])
def test_every_value_is_one_of_the_carriers(element):
    values = torch.tensor(element.values())
    values = torch.cat([values, -values])
    codes = encode(values, element.carrier)
    assert torch.equal(decode(codes, element.carrier), values)
    assert torch.equal(codes.view(DTYPE[element.carrier]).float(), values)


@pytest.mark.parametrize(
    "element", [e for e in ELEMENTS if not e.carrier], ids=[e.name for e in ELEMENTS if not e.carrier]
)
def test_elements_without_a_carrier_have_a_value_that_neither_holds(element):
    values = torch.tensor(element.values())
    for dtype in DTYPE.values():
        assert not torch.equal(values.to(dtype).float(), values)


def operand(x, form) -> Operand:
    return cast(x, [form.held("operand")], count=True)[0]


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize(
    ("role", "dim"), [("input", 1), ("input", 0), ("weight", 1), ("weight", 0), ("grad_output", 0)]
)
def test_operands_are_the_codes_in_another_type(name, role, dim):
    x = torch.randn(160, 144).bfloat16()
    x[3, 5] = float("nan")
    key = RoundingKey(seed=1, iteration=2, stream=3) if role in get_format(name).stochastic_roles else None
    form = Form(get_format(name), role, dim, key)
    codes, rides = cast(x, [form.held("codes")], count=True)[0], operand(x, form)
    rows, cols = codes.scales.shape
    assert torch.equal(codes.scales, rides.scales[:rows, :cols]) and torch.equal(codes.saturated, rides.saturated)
    if form.block[0] == form.block[1]:  # along the reduction dim they go on in zeros, to a multiple of 4
        assert rides.scales.shape[dim] % 4 == 0 and rides.scales.stride(dim) == 1
        assert not rides.scales[rows:].any() and not rides.scales[:, cols:].any()
    else:
        assert rides.scales.shape == codes.scales.shape and rides.scales.stride(1 - dim) == 1
    values = decode(codes.data, form.element)
    assert torch.equal(decode(rides.data, form.element.carrier).nan_to_num(7), values.nan_to_num(7))
    on_card = rides.data.view(DTYPE[form.element.carrier]).float()
    assert torch.equal(on_card.isnan(), values.isnan()) and torch.equal(on_card.nan_to_num(7), values.nan_to_num(7))


def test_an_fp4_gemm_is_the_same_in_e4m3_to_the_bit():
    """Products within a block are multiples of 1/4 below 2**13, so float32 sums them exactly in any order: the
    blocks' sums are equal to the bit, and with them all that follows.
    """
    x, w = torch.randn(64, 384).bfloat16(), torch.randn(256, 384).bfloat16()
    sides = [(x, Form(get_format("fp4"), "input", 1)), (w, Form(get_format("fp4"), "weight", 1))]
    as_fp4 = [quantize(tensor, "fp4", role=form.role, dim=1) for tensor, form in sides]
    as_fp8 = [operand(tensor, form) for tensor, form in sides]
    for q, made in zip(as_fp4, as_fp8, strict=True):
        scales = made.scales[:, :3].repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)
        assert torch.equal(q.dequantize(), made.data.view(torch.float8_e4m3fn).float() * scales)
    y4, y8 = torch.zeros(64, 256), torch.zeros(64, 256)
    for block in range(3):
        k = slice(128 * block, 128 * block + 128)
        a4, b4 = (decode(q.codes[:, k], get_format("fp4").element).double() for q in as_fp4)
        a8, b8 = (made.data[:, k].view(torch.float8_e4m3fn).float() for made in as_fp8)
        backwards = a8.flip(1) @ b8.flip(1).T
        assert torch.equal((a4 @ b4.T).float(), a8 @ b8.T) and torch.equal(backwards, a8 @ b8.T)
        scale = as_fp8[0].scales[:, block, None] * as_fp8[1].scales[:, block].repeat_interleave(128)
        y4 += (a4 @ b4.T).float() * scale
        y8 += backwards * scale
    assert torch.equal(y4, y8)


def test_a_format_without_carrier_says_so():
    element = next(e for e in ELEMENTS if e.name == "E3M4")
    assert element.carrier is None
    with pytest.raises(AssertionError, match="E3M4 has no carrier"):
        operand(torch.randn(4, 4), Form(Format("x", element), "input", 1))
