"""The random Hadamard transform: an orthogonal matrix, the same product, and smaller outliers."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.formats import Format, get_format
from megatron_snip.formats.element import E2M1
from megatron_snip.quant import RoundingKey, fake_quantize, quantize
from megatron_snip.quant.casts.cast import Form, finite_amax
from megatron_snip.quant.casts.hadamard import LENGTH, SIGNS, hadamard
from megatron_snip.quant.kernels.dispatch import cast
from tests.unit.quant.specification import fake_quantize_reference, quantize_reference

KEY = RoundingKey(seed=1, iteration=2, stream=3)


def matrix():
    """H diag(s) / 4 by Sylvester's rule, which is not how it is computed: float32 [16, 16]."""
    h = torch.ones(1, 1)
    while len(h) < LENGTH:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h * torch.tensor(SIGNS) / 4


def test_the_signs_are_transformer_engines():
    """As published: get_wgrad_sign_vector in its custom_recipes/reference_nvfp4.py."""
    assert [token for token, sign in enumerate(SIGNS) if sign == -1] == [3, 5, 6, 7, 8, 9, 10, 12, 14, 15]
    assert len(SIGNS) == LENGTH and {abs(sign) for sign in SIGNS} == {1}


def test_the_matrix_is_sylvesters_with_signs_and_orthogonal():
    assert torch.equal(hadamard(torch.eye(LENGTH)), matrix())
    assert torch.equal(matrix() @ matrix().T, torch.eye(LENGTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_16_tokens_are_transformed_each_by_itself(dtype):
    x = torch.randn(80, 24).to(dtype)
    y = hadamard(x)
    assert y.dtype == dtype and y.shape == x.shape
    for start in range(0, 80, LENGTH):
        exact = matrix().double() @ x[start : start + LENGTH].double()
        torch.testing.assert_close(y[start : start + LENGTH].double(), exact, rtol=2**-8, atol=1e-5)
        assert torch.equal(hadamard(x[start : start + LENGTH]), y[start : start + LENGTH])
    assert torch.equal(hadamard(x[:, 3:9]), y[:, 3:9])
    assert hadamard(x[:0]).shape == (0, 24)


def test_the_product_of_two_transformed_operands_is_the_same():
    x, g = torch.randn(256, 40, dtype=torch.bfloat16), torch.randn(256, 24, dtype=torch.bfloat16)
    torch.testing.assert_close(
        hadamard(g.float()).T @ hadamard(x.float()), g.float().T @ x.float(), rtol=1e-5, atol=1e-4
    )
    rounded = hadamard(g).double().T @ hadamard(x).double() - g.double().T @ x.double()
    assert rounded.norm() / (g.double().T @ x.double()).norm() < 2**-8


def test_an_outlier_is_spread_over_its_group():
    """Evenly: each of the 16 sums has a quarter of it, so the largest number is a quarter and its blocks finer."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    x[5::LENGTH] += 1000
    y = hadamard(x)
    assert y.abs().min() > 245 and y.abs().max() < 255
    plain, spread = (quantize(x, name, role="input", dim=0) for name in ("nvfp4_plain", "nvfp4"))
    ratio = (spread.scales * spread.tensor_scale) / (plain.scales * plain.tensor_scale)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.25), rtol=0.07, atol=0)


def test_only_operands_of_wgrad_are_transformed():
    fmt = get_format("nvfp4")
    forms = {
        (role, dim): Form(fmt, role, dim).transformed for role in ("input", "weight", "grad_output") for dim in (0, 1)
    }
    assert {call for call, transformed in forms.items() if transformed} == {("input", 0), ("grad_output", 0)}
    assert not Form(get_format("nvfp4_plain"), "input", 0).transformed
    x = torch.randn(64, 96).bfloat16()
    assert torch.equal(
        fake_quantize(x, "nvfp4", role="input", dim=1), fake_quantize(x, "nvfp4_plain", role="input", dim=1)
    )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_transformed_form_is_the_cast_of_the_transformed_tensor(dtype, rounding):
    x = torch.randn(64, 96).to(dtype)
    how = {"role": "grad_output", "dim": 0, "rounding": rounding, "key": KEY}
    y = fake_quantize(x, "nvfp4", **how)
    assert torch.equal(y, fake_quantize(hadamard(x), "nvfp4_plain", **how))
    assert torch.equal(y, fake_quantize_reference(x, "nvfp4", **how))
    q, specified = quantize(x, "nvfp4", **how), quantize_reference(x, "nvfp4", **how)
    assert torch.equal(q.codes, specified.codes) and torch.equal(q.scales, specified.scales)
    assert torch.equal(q.tensor_scale, specified.tensor_scale) and q.saturated == specified.saturated
    assert torch.equal(q.dequantize(dtype), y)


def test_forms_with_and_without_transform_in_one_call():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    rht, plain = get_format("nvfp4"), get_format("fp8")
    forms = [Form(rht, "input", 0), Form(rht, "input", 1, output="codes"), Form(plain, "input", 0)]
    together = cast(x, forms)
    for form, made in zip(forms, together, strict=True):
        alone = cast(x, [form])[0]
        assert made.form == form and torch.equal(alone.data, made.data)
        assert (alone.tensor_scale is None) == (made.tensor_scale is None)
        assert made.tensor_scale is None or torch.equal(alone.tensor_scale, made.tensor_scale)
    assert together[0].tensor_scale != together[1].tensor_scale


def test_a_shards_amax_is_that_of_the_transformed_tensor():
    x = torch.randn(64, 96)
    whole = fake_quantize(x, "nvfp4", role="input", dim=0)
    seen = []

    def reduce_amax(amax):
        seen.append(amax)
        return finite_amax(hadamard(x))

    form = Form(get_format("nvfp4"), "input", 0)
    part = cast(x[:, :48], [form], reduce_amax)[0].data
    assert torch.equal(part, whole[:, :48]) and seen == [finite_amax(hadamard(x[:, :48]))]


def test_tokens_that_are_no_multiple_of_16_raise():
    with pytest.raises(ValueError, match=r"\[40, 8\].*40 tokens.*multiple of 16.*without the transform"):
        fake_quantize(torch.randn(40, 8), "nvfp4", role="input", dim=0)
    fake_quantize(torch.randn(40, 8), "nvfp4", role="input", dim=1)
    with pytest.raises(ValueError, match="hadamard=32"):
        Format("x", E2M1, hadamard=32)
