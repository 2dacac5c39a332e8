"""The custom operators: what compilers and fake tensors see of the casts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_snip.formats import Format, Hadamard, format_names, get_format
from megatron_snip.quant import RoundingKey, dequantize, fake_quantize, quantize
from megatron_snip.quant.casts.cast import Form, Operand, Output, finite_amax, reference
from megatron_snip.quant.casts.hadamard import hadamard
from megatron_snip.quant.casts.rounding import Rows
from megatron_snip.quant.kernels import op
from tests.unit.quant.kernels.operands import held

KEY = RoundingKey(seed=2**64 + 5, iteration=3, stream=2**64 - 1, row0=2**33, col0=7, rows=Rows(2, 9, 1, 5))
OUTPUTS: tuple[Output, ...] = ("values", "codes", "operand")
FORMATS = [get_format(name) for name in (*format_names(), "e3m2") if get_format(name).quantised]
CUSTOM = Format(name="custom", element=get_format("e3m2").element, tile=24, weight_block=40, scale="fp32_pow2")


def all_forms() -> list[Form]:
    """Every format by tiles of both dims and as a weight, nearest and stochastic."""
    return [
        Form(fmt, role, dim, key)
        for fmt in (*FORMATS, CUSTOM)
        if not fmt.hadamard
        for role, dim in (("input", 1), ("input", 0), ("weight", 0))
        for key in (None, KEY)
    ]


def traced(x: torch.Tensor, forms: list[Form]) -> list[Operand]:
    """The casts of x through the operator."""
    compiled = torch.compile(op.run, fullgraph=True, backend="eager")
    return compiled(x, forms, finite_amax(x), count=True)


@pytest.mark.parametrize("form", all_forms(), ids=lambda f: f"{f.fmt.name}-{f.role}{f.dim}-{f.key is not None}")
def test_a_forms_text_and_its_keys_integers_name_the_same_form(form):
    forms = held([form, CUSTOM_FORM], ["codes", "operand"])
    keys = [*op._numbers(form.key), *op._numbers(None)]
    back, other = op.forms_of(";".join(form.text for form in forms), keys)
    assert len(keys) == 2 * op._KEY and [back.output, other.output] == ["codes", "operand"]
    assert (back.element, back.block, back.fmt.scale, back.dim) == (
        form.element,
        form.block,
        form.fmt.scale,
        form.dim,
    )
    assert (other.element, other.block, other.key) == (CUSTOM.element, CUSTOM_FORM.block, None)
    if form.key is None:
        assert back.key is None
    else:
        assert back.key is not None
        assert back.key.words == form.key.words
        assert (back.key.iteration, back.key.row0, back.key.col0, back.key.rows) == (3, 2**33, 7, KEY.rows)


CUSTOM_FORM = Form(CUSTOM, "input", 0)


def test_the_operator_gives_the_specifications_casts():
    torch._dynamo.reset()
    x = torch.randn(50, 150).bfloat16()
    forms = [Form(get_format("fp8"), "input", 1), Form(get_format("nvfp4_plain"), "input", 0, KEY), CUSTOM_FORM]
    for outputs in ([*OUTPUTS], ["operand", "swizzled", "values"]):
        wanted = held(forms, outputs)
        for got, want in zip(traced(x, wanted), reference(x, wanted, finite_amax(x)), strict=True):
            assert got.form == want.form
            for one, other in zip(got[1:], want[1:], strict=True):
                assert (one is None) == (other is None)
                assert one is None or (torch.equal(one, other) and one.stride() == other.stride())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fake", [False, True])
def test_the_transform_and_its_largest_magnitude(fake, dim):
    torch._dynamo.reset()
    transform = Hadamard("+-" * 8)
    x = torch.randn(32, 48).bfloat16()
    compiled = torch.compile(op.hadamard, fullgraph=True, backend="eager")
    want = hadamard(x, transform, dim), finite_amax(hadamard(x, transform, dim))
    with FakeTensorMode() if fake else nullcontext():
        empty = torch.empty(32, 48, dtype=torch.bfloat16)
        got = op.hadamard(empty, transform, dim) if fake else compiled(x, transform, dim)
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert fake or torch.equal(one, other)


@pytest.mark.parametrize("output", [*OUTPUTS, "swizzled"])
@pytest.mark.parametrize("dim", [0, 1])
def test_fake_tensors_have_the_casts_shapes_and_strides(output, dim):
    form = Form(get_format("mxfp4"), "input", dim, output=output)
    want = reference(torch.randn(70, 150), [form])[0]
    with FakeTensorMode():
        got = op.run(torch.empty(70, 150), [form])[0]
        narrow = op.run(torch.empty(70, 150), [form], dtype=torch.bfloat16, count=False)[0]
    assert narrow.saturated is None
    assert narrow.data.dtype == (torch.bfloat16 if output == "values" else torch.uint8)
    for fake, real in zip(got[1:], want[1:], strict=True):
        assert (fake is None) == (real is None)
        assert fake is None or (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_fake_tensors_go_through_the_public_functions():
    with FakeTensorMode():
        x = torch.empty(256, 256, dtype=torch.bfloat16)
        assert fake_quantize(x, "nvfp4_plain", role="input", dim=1).shape == (256, 256)
        codes = quantize(x, "mxfp8", role="input", dim=1)
        assert codes.scales.shape == (256, 8)
        assert dequantize(codes, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break_in_the_graph(backend):
    def both_ways(x: torch.Tensor, key: RoundingKey) -> torch.Tensor:
        y = fake_quantize(x, "fp8", role="input", dim=1) + fake_quantize(x, "fp4", role="grad_output", dim=0, key=key)
        y = y + fake_quantize(x, "nvfp4_plain", role="weight", dim=1)
        return y + dequantize(quantize(x, "mxfp8", role="input", dim=0), torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(both_ways, fullgraph=True, backend=backend)
    x = torch.randn(48, 130).bfloat16()
    for iteration in range(3):
        key = RoundingKey(2**64 + 5, iteration, 2**64 - 1 - iteration, row0=7 * iteration, col0=iteration)
        assert torch.equal(compiled(x, key), both_ways(x, key))
    weight = x.clone().requires_grad_()
    assert not compiled(weight, KEY).requires_grad


def test_dequantize_gives_the_specifications_values():
    x = torch.randn(33, 77)
    for name in ("fp4", "nvfp4_plain", "bf16"):
        codes = quantize(x.bfloat16(), name, role="input", dim=0)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            assert torch.equal(dequantize(codes, dtype), codes.dequantize(dtype))
