"""The random Hadamard transform: an orthogonal matrix, the same product, and smaller outliers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_snip.formats import Hadamard, format_names, get_format, register
from megatron_snip.formats import format as format_module
from megatron_snip.quant import GEMMS, LinearPrecision, RoundingKey, fake_quantize, quantize, quantized_linear
from megatron_snip.quant.casts import hadamard as module
from megatron_snip.quant.casts.cast import Form, finite_amax
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears.operands import REDUCTION_DIM
from tests.unit.quant.specification import fake_quantize_reference, quantize_reference

KEY = RoundingKey(seed=1, iteration=2, stream=3)
OURS = get_format("nvfp4").hadamard
LENGTH = OURS.length
LENGTHS = [Hadamard(OURS.signs * times) for times in (1, 2, 8)]
hadamard = partial(module.hadamard, transform=OURS)


def matrix(transform=OURS):
    """H diag(s) / sqrt(L) by Sylvester's rule, which is not how it is computed: float64 [L, L]."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < transform.length:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h * torch.tensor([1 if sign == "+" else -1 for sign in transform.signs]) / transform.length**0.5


@pytest.fixture
def registered():
    """A function that registers formats for a test, with the name of each."""
    names = []

    def add(fmt):
        names.append(register(fmt).name)
        return fmt.name

    yield add
    for name in names:
        del format_module._FORMATS[name]


def test_the_signs_are_transformer_engines():
    """As published: get_wgrad_sign_vector in its custom_recipes/reference_nvfp4.py."""
    assert [token for token, sign in enumerate(OURS.signs) if sign == "-"] == [3, 5, 6, 7, 8, 9, 10, 12, 14, 15]
    assert len(OURS.signs) == 16 and OURS.gemms == {"wgrad"}


@pytest.mark.parametrize("transform", LENGTHS, ids=lambda transform: str(transform.length))
def test_the_matrix_is_sylvesters_with_signs_and_orthogonal(transform):
    eye = torch.eye(transform.length)
    assert torch.equal(module.hadamard(eye, transform), matrix(transform).float())
    assert torch.equal(module.hadamard(eye, transform, 1), matrix(transform).float().T)
    torch.testing.assert_close(matrix(transform) @ matrix(transform).T, eye.double(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("transform", LENGTHS, ids=lambda transform: str(transform.length))
def test_rows_are_transformed_as_columns(transform):
    x = torch.randn(256, 128).bfloat16()
    y = module.hadamard(x, transform, 1)
    assert y.is_contiguous() and torch.equal(y, module.hadamard(x.T, transform).T)
    exact = (x.double().view(256, -1, transform.length) @ matrix(transform).T).view(256, 128)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_16_tokens_are_transformed_each_by_itself(dtype):
    x = torch.randn(80, 24).to(dtype)
    y = hadamard(x)
    assert y.dtype == dtype and y.shape == x.shape
    for start in range(0, 80, LENGTH):
        exact = matrix() @ x[start : start + LENGTH].double()
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


@pytest.mark.parametrize(
    ("role", "dim", "said"),
    [
        (
            "input",
            0,
            r"input has shape \[40, 72\] and its 40 tokens .*multiple of 32; change the sequence length or the",
        ),
        ("weight", 0, r"weight has shape \[40, 72\] and its 40 channels .*; change the layer's size or the tensor"),
        ("grad_output", 1, r"grad_output .* its 72 channels are no multiple of 32; .* choose a format without the"),
    ],
)
def test_sizes_that_are_no_multiple_of_a_group_raise(role, dim, said):
    everywhere = replace(get_format("nvfp4"), name="x", hadamard=Hadamard("+" * 32, frozenset(GEMMS)))
    with pytest.raises(ValueError, match=said):
        fake_quantize(torch.randn(40, 72), everywhere, role=role, dim=dim, key=KEY)
    fake_quantize(torch.randn(40, 72), "nvfp4", role=role, dim=1, key=KEY)


def test_the_gemms_of_a_transform_are_those_whose_operands_are_transformed():
    for chosen in GEMMS:
        fmt = replace(get_format("nvfp4"), name="x", hadamard=Hadamard("+" * 16, frozenset({chosen})))
        for gemm, dims in REDUCTION_DIM.items():
            assert {Form(fmt, role, dim).transformed for role, dim in dims.items()} == {gemm == chosen}
        assert fmt.shares_weight == (chosen == "wgrad")


@pytest.mark.parametrize("base", [name for name in format_names() if get_format(name).quantised])
def test_casts_with_a_transform_of_every_gemm_are_those_of_the_transformed_tensor(base):
    """Of both dims from one call, whatever the format has else."""
    transform = Hadamard(OURS.signs * 2, frozenset(GEMMS))
    fmt, plain = (replace(get_format(base), name="x", hadamard=one) for one in (transform, None))
    x = torch.randn(64, 96).bfloat16()
    for role in ("input", "weight", "grad_output"):
        forms = [Form(fmt, role, dim, KEY if fmt.stochastic(role, dim) else None, "codes") for dim in (0, 1)]
        for form, made in zip(forms, cast(x, forms), strict=True):
            y = module.hadamard(x, transform, form.dim)
            expected = cast(y, [Form(plain, role, form.dim, form.key, "codes")])[0]
            assert torch.equal(made.data, expected.data) and torch.equal(made.scales, expected.scales)


@pytest.mark.parametrize("transform", LENGTHS, ids=lambda transform: str(transform.length))
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_gemm_of_transformed_operands_is_the_gemm(gemm, transform, registered):
    """In a fine format the products agree; operands are transformed in that GEMM alone, and weights cast twice."""
    fine = replace(
        get_format("fp8"), name=f"fine {gemm} {transform.length}", hadamard=replace(transform, gemms=frozenset({gemm}))
    )
    precision = LinearPrecision.uniform(registered(fine))
    x, w = torch.randn(128, 256, requires_grad=True), torch.randn(384, 256, requires_grad=True)
    g = torch.randn(128, 384)

    def run(precision):
        x.grad = w.grad = None
        y = quantized_linear(x, w, precision, key=KEY)
        y.backward(g)
        return dict(zip(GEMMS, (y, x.grad, w.grad), strict=True))

    exact, plain, made = (
        run(one) for one in (LinearPrecision.uniform("bf16"), LinearPrecision.uniform("fp8"), precision)
    )
    for one in GEMMS:
        assert torch.equal(made[one], plain[one]) == (one != gemm)
    assert (made[gemm] - exact[gemm]).norm() / exact[gemm].norm() < 0.04
