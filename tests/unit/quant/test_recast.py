"""Formats whose operands of backward are cast from what another GEMM multiplied (``Format.recast``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_snip.formats import Format, get_format, register
from megatron_snip.formats import format as format_module
from megatron_snip.formats.element import E4M3
from megatron_snip.quant import (
    LINEAR_IMPLS,
    Casts,
    LinearCall,
    LinearPrecision,
    LinearShape,
    Operands,
    RoundingKey,
    fake_quantize,
    name_stream,
    quantized_linear,
)
from megatron_snip.quant.casts.cast import Form
from megatron_snip.quant.kernels.dispatch import cast, values
from megatron_snip.quant.linears import by_gemm
from megatron_snip.quant.linears.group import Group, run_group
from megatron_snip.snip.measure.linear_probe import LinearProbe
from tests.unit.quant.kernels.operands import bits, operands

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
T, K, N = 304, 200, 144  # 304 tokens are whole groups of the transform
PRECISIONS = (
    "mxfp8_dequantized",
    "mxfp4_tetrajet",
    "mxfp8/bf16_dequantized/bf16_dequantized",
    "fp8/mxfp8_dequantized/mxfp8_dequantized",
    "fp4/mxfp8/bf16_dequantized",
    "nvfp4_recast",
    "mxfp8/nvfp4_recast/nvfp4_recast",
    "gradients/gradients/mxfp4_gradients",
)
#: The same without another cast.
PLAIN = {
    "mxfp8_dequantized": "mxfp8", "mxfp4_tetrajet": "mxfp4", "bf16_dequantized": "bf16", "nvfp4_recast": "nvfp4",
    "gradients": "fp4", "mxfp4_gradients": "mxfp4",
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    """Formats that recast a tensor under its own amax and transformed, and gradients."""
    nvfp4 = replace(get_format("nvfp4"), name="nvfp4_recast", weight_block=None, recast=frozenset({"input", "weight"}))
    gradients = replace(get_format("fp4"), name="gradients", recast=frozenset({"grad_output"}))
    mxfp4 = replace(get_format("mxfp4"), name="mxfp4_gradients", recast=frozenset({"grad_output"}))
    made = [register(fmt).name for fmt in (nvfp4, gradients, mxfp4)]
    yield
    for name in made:
        del format_module._FORMATS[name]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x [T,K] and w [N,K], which require gradients, and a random cotangent [T,N]."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((T, K), (N, K), (T, N)))
    x, w, g = ((t * (3 * t.roll(1, 1)).exp()).to(dtype) for t in (x, w, g))  # or E4M3 would hold all of E4M3's numbers
    return [x.requires_grad_(), w.requires_grad_(), g]


def expected_gradients(precision: LinearPrecision, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """dX and dW, written out."""
    along_rows = {("weight", "dgrad"): "fprop", ("input", "wgrad"): "fprop", ("grad_output", "wgrad"): "dgrad"}

    def q(tensor: Tensor, role: str, gemm: str, dim: int) -> Tensor:
        name, first = getattr(precision, gemm), along_rows.get((role, gemm))
        if first is not None and role in get_format(name).recast:
            tensor = q(tensor, role, first, 1)
        key = KEY.for_operand(role, 0 if role == "weight" else None)
        return fake_quantize(tensor, name, role=role, dim=dim, key=key)

    dx = q(g, "grad_output", "dgrad", 1) @ q(w, "weight", "dgrad", 0)
    return dx, q(g, "grad_output", "wgrad", 0).T @ q(x, "input", "wgrad", 0)


def gradients(precision: LinearPrecision, x: Tensor, w: Tensor, g: Tensor, **how: object) -> tuple[Tensor, ...]:
    return torch.autograd.grad(quantized_linear(x, w, precision, key=KEY, **how), (x, w), g)


@DTYPES
@pytest.mark.parametrize("precision", PRECISIONS)
def test_backward_multiplies_what_is_cast_again(precision, dtype):
    x, w, g = tensors(dtype)
    precision = LinearPrecision.parse(precision)
    assert precision.sources
    expected = expected_gradients(precision, x.detach(), w.detach(), g)
    names = (precision.fprop, precision.dgrad, precision.wgrad)
    plain = gradients(LinearPrecision(*(PLAIN.get(name, name) for name in names)), x, w, g)
    for casts in (None, Casts()):
        for _ in range(2):
            ours = gradients(precision, x, w, g, weight_casts=casts)
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    for gemm, one, other in zip(("dgrad", "wgrad"), ours, plain, strict=True):
        assert torch.equal(one, other) == (gemm not in {gemm for gemm, _ in precision.sources})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_and_one_gradient_alone(precision):
    x, w, g = tensors()
    precision = LinearPrecision.parse(precision)
    both = gradients(precision, x, w, g)

    def block(x: Tensor) -> Tensor:
        return quantized_linear(x, w, precision, key=KEY)

    again = torch.autograd.grad(checkpoint(block, x, use_reentrant=False), (x, w), g)
    assert all(torch.equal(a, b) for a, b in zip(again, both, strict=True))
    for needed, expected in ((x, both[0]), (w, both[1])):
        for one in (x, w):
            one.requires_grad_(one is needed)
        assert torch.equal(torch.autograd.grad(quantized_linear(x, w, precision, key=KEY), needed, g)[0], expected)


def test_linears_of_one_input_keep_each_form_of_it_once():
    """fprop's for those that recast it; of the others, wgrad's."""
    x, w, g = tensors(torch.bfloat16)
    precisions = [
        LinearPrecision.parse(text)
        for text in ("mxfp8/mxfp8_dequantized/mxfp8_dequantized", "mxfp8/mxfp8/bf16_dequantized", "mxfp8")
    ]
    calls = [LinearCall(p, KEY) for p in precisions]
    calls = [one._replace(backends=LINEAR_IMPLS["emulated"].backends(one, x.device, T, K, N)) for one in calls]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ys = run_group([x], [w] * 3, Group(calls))
    assert len({t.data_ptr() for t in kept if t.dtype == torch.uint8}) == 2 and not any(
        t.data_ptr() == x.data_ptr() for t in kept
    )
    for y, precision in zip(ys, precisions, strict=True):
        alone = gradients(precision, x, w, g)
        ours = torch.autograd.grad(y, (x, w), g, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))


@pytest.mark.parametrize(
    ("precision", "input_bytes", "weight_bytes"),
    [
        ("mxfp8", 1, 2),
        ("mxfp8_dequantized", 1, 1),
        ("mxfp8/bf16/bf16", 2, 3),
        ("mxfp8/bf16_dequantized/bf16_dequantized", 1, 1),
    ],
)
def test_what_is_kept(precision, input_bytes, weight_bytes):
    """Bytes an element until backward, but for scales: half of the input's in BF16, and one cast of the weight."""
    x, w, g = tensors(torch.bfloat16)
    kept: list[Tensor] = []
    casts = Casts()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = quantized_linear(x, w, LinearPrecision.parse(precision), key=KEY, weight_casts=casts)
    y.backward(g)
    own = {t.data_ptr(): t.numel() * t.element_size() for t in kept if t.data_ptr() != w.data_ptr()}
    scales = sum(t.numel() * 4 for t in kept if t.dtype == torch.float32)
    assert sum(own.values()) - scales == T * K * input_bytes
    weights = {t.data_ptr(): t.numel() * t.element_size() for t in casts.tensors() if t.dtype != torch.float32}
    assert sum(weights.values()) == N * K * weight_bytes


def test_a_gathered_weight_is_freed_once_fprop_has_cast_it():
    x, w, g = tensors()
    precision, casts = LinearPrecision.uniform("mxfp8_dequantized"), Casts(frees=True)
    expected = gradients(precision, x, w, g)
    gathered = w.detach().clone()
    call = LinearCall(precision, KEY, weight_casts=casts)
    call = call._replace(backends=LINEAR_IMPLS["emulated"].backends(call, x.device, T, K, N))
    casts.operand(gathered, "fprop", call, torch.float32, training=True)
    assert not gathered.untyped_storage().size()
    made = casts.operand(gathered, "dgrad", call, torch.float32)
    q = fake_quantize(g, "mxfp8_dequantized", role="grad_output", dim=1)
    assert torch.equal(q @ made.data, expected[0])


def test_square_blocks_of_weights_are_not_cast_again():
    """What fprop multiplied is dgrad's operand, too."""
    recast = replace(get_format("fp8"), name="fp8_recast", recast=frozenset({"weight"}))
    register(recast)
    try:
        assert not LinearPrecision.uniform("fp8_recast").sources
        assert LinearPrecision.parse("fp4/fp8_recast/fp8").sources == {("dgrad", "weight"): "fprop"}
        assert not LinearPrecision.parse("bf16/fp8_recast/fp8").sources, "the tensor itself was multiplied"
    finally:
        del format_module._FORMATS["fp8_recast"]


@pytest.mark.parametrize(
    ("fmt", "output"),
    [("fp8", "operand"), ("fp4", "operand"), ("mxfp8", "swizzled"), ("mxfp4", "swizzled"), ("fp8_pow2", "swizzled"),
     ("nvfp4_plain", "swizzled"), ("nvfp4", "swizzled"), ("fp8_hybrid", "operand")],
)  # fmt: skip
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@DTYPES
def test_what_tensor_cores_read_is_dequantised_to_the_same_values(fmt, output, role, dtype):
    for x in operands((160, 328), dtype)[:1] + operands((96, 64), dtype)[2:]:
        form = Form(get_format(fmt), role, 1)
        (expected,) = cast(x, [form])
        (made,) = cast(x, [form.held(output)])
        assert torch.equal(bits(values(made, dtype)), bits(expected.data))


def test_backends_of_tensor_cores_keep_what_fprop_multiplied(monkeypatch):
    """One cast of the input and of the weight, and gradients as emulated; multiplied by a stand-in."""
    from megatron_snip.quant.linears.block_scaled import MX
    from megatron_snip.quant.linears.matmul import product

    def multiply(self, gemm, a, b, dtype, out):
        made = []
        for operand in (a, b):
            form, data, scales = operand.form, operand.data, operand.scales
            turned = form.dim == 0
            flat = operand._replace(form=replace(form, dim=1, role="input"), data=data.T if turned else data,
                                    scales=scales.T if turned else scales)  # fmt: skip
            value = values(flat, dtype)
            made.append(value.T if turned else value)
        return product(gemm, *made, out)

    monkeypatch.setattr(MX, "unfit_device", lambda self, device: None)
    monkeypatch.setattr(MX, "multiply", multiply)
    x, w, g = (t[: len(t) // 32 * 32, : t.shape[1] // 32 * 32].detach().clone() for t in tensors())
    x.requires_grad_()
    w.requires_grad_()
    precision = LinearPrecision.parse("mxfp8_dequantized")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = by_gemm.ByGemm(MX())(x, w, LinearCall(precision, KEY, weight_casts=Casts()))
    assert len([t for t in kept if t.shape == x.shape and t.dtype == torch.uint8]) == 1
    ours = torch.autograd.grad(y, (x, w), g)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(precision, x, w, g), strict=True))


@pytest.mark.parametrize("fmt", ["mxfp8_dequantized", "mxfp4_tetrajet", "nvfp4_recast"])
def test_a_probe_measures_the_operands_that_are_multiplied(fmt, lone_mesh):
    x, w, g = (t.detach() for t in tensors())
    probe = LinearProbe(LinearShape("up_proj", N, K, kind="up"), [fmt], lone_mesh, 0, x.device)
    reduced: list[str] = []
    reduce_amax = dict.fromkeys(("input", "weight"), lambda amax: reduced.append("") or amax)
    call = LinearCall(LinearPrecision.uniform("bf16"), KEY, reduce_amax=reduce_amax)
    seen = Operands(x, w, g, call)
    probe.measure(seen)
    precision = LinearPrecision.uniform(fmt)
    dx, dw = expected_gradients(precision, x, w, g)
    assert torch.equal(seen.quantized("wgrad", "grad_output", fmt)[0].T @ seen.quantized("wgrad", "input", fmt)[0], dw)
    q = seen.quantized("dgrad", "weight", fmt)[0]
    assert torch.equal(seen.quantized("dgrad", "grad_output", fmt)[0] @ q, dx)
    torch.testing.assert_close(probe.weight_error[fmt], dw - g.T @ x, rtol=0, atol=1e-4)
    (error,) = probe.sums.read([f"error/{fmt}/dgrad/weight"])
    assert error == pytest.approx(float((q - w).double().square().sum()), rel=1e-6)
    expected = probe.collectives(reduce_amax.keys())
    assert expected == (6 if fmt == "nvfp4_recast" else 0)
    reduced.clear()
    probe.measure(seen)
    assert len(reduced) == expected


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match=r"format x: recast=\['activation'\]; known: input, weight, grad_output"):
        Format("x", E4M3, recast=frozenset({"activation"}))
