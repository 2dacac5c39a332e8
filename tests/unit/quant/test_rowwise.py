"""Scales of whole rows: torchao's recipe "rowwise", torch's RowWise GEMM, and what such scales cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import ROW, Format, get_format
from megatron_snip.formats.element import E4M3, E5M2
from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, name_stream, quantize, quantized_linear
from megatron_snip.quant.casts.cast import Form, reference
from megatron_snip.quant.kernels import cpu
from megatron_snip.quant.linears.block_scaled import MX
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.scaled_mm import Hopper, RowWise
from tests.unit.quant.elements import all_bf16
from tests.unit.quant.kernels.operands import bits, operands
from tests.unit.quant.peers import bf16_tensors
from tests.unit.quant.specification import quantize_reference

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
CASTS = [pytest.param(quantize, id="dispatched"), pytest.param(quantize_reference, id="specification")]
PLAIN = Format("rows_fp32", E4M3, tile=ROW, weight_block=None)
EPSILON = 1e-12  # torchao's least amax
T, K, N = 304, 208, 144


def inputs() -> dict[str, Tensor]:
    """Whole bfloat16 tensors; every finite number, by size and in random order; a million."""
    every = torch.cat([all_bf16(), torch.zeros(256)])
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(1))
    million = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    million[::7] *= torch.logspace(-6, 6, 1024)
    return bf16_tensors() | {
        "every": every.sort().values.view(256, 256).bfloat16(),
        "shuffled": every[order].view(256, 256).bfloat16(),
        "million": million,
    }


INPUTS = inputs()


def torchao(x: Tensor, dim: int, *, pow2: bool) -> tuple[Tensor, Tensor]:
    """Codes and what encodes, as its Float8Linear makes them."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    made = hp_tensor_to_float8_dynamic(
        x, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=0 if dim == 0 else -1, round_scales_to_power_of_2=pow2,
    )  # fmt: skip
    return made._data.view(torch.uint8), made._scale


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fmt", ["fp8_rowwise", PLAIN], ids=["pow2", "fp32"])
@pytest.mark.parametrize("name", INPUTS)
def test_codes_and_scales_are_those_of_torchao(name, fmt, cast):
    """torchao takes amax to be 1e-12 at least."""
    x = INPUTS[name]
    for dim in (0, 1):
        codes, encode = torchao(x, dim, pow2=fmt == "fp8_rowwise")
        ours = cast(x, fmt, role="weight", dim=dim)
        large = x.abs().amax(dim, keepdim=True).float() >= EPSILON
        assert ours.scales.shape == encode.shape and large.any()
        same = (ours.codes == codes) | ~large
        assert same.all()
        assert torch.equal(ours.scales[large], torch.div(torch.ones(()), encode)[large])


def test_a_linear_is_that_of_torchao():
    """Its Float8Linear with the recipe, which multiplies dequantised operands where there is no GPU."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    x, w, g = tensors(torch.float32)
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data.copy_(w)
    theirs = Float8Linear.from_float(linear, config)
    y = theirs(x)
    expected = [y, *torch.autograd.grad(y, (x, theirs.weight), g)]
    for one, other in zip(ours(x, w, g, "emulated"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator).to(dtype) for shape in ((T, K), (N, K), (T, N)))
    return x.requires_grad_(), w.requires_grad_(), g


def ours(x: Tensor, w: Tensor, g: Tensor, impl: str, fmt: str = "fp8_rowwise") -> list[Tensor]:
    y = quantized_linear(x, w, LinearPrecision.parse(fmt), key=KEY, impl=impl)
    return [y, *torch.autograd.grad(y, (x, w), g)]


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this PyTorch multiplies scaled codes on GPUs only, as 2.11 does",
)
@pytest.mark.parametrize("fmt", ["fp8_rowwise", "fp8_rowwise/bf16/fp8_rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_multiplies_the_same_codes_and_scales(dtype, fmt, monkeypatch):
    """By torch's own RowWise GEMM, which it has for CPUs too; results are bfloat16."""
    real, calls = F.scaled_mm, []

    def multiply(a, b, scale_a, recipe_a, scale_b, recipe_b, **how):
        assert recipe_a == recipe_b == F.ScalingType.RowWise and how["output_dtype"] == torch.bfloat16
        shape = real(*(t.to("meta") for t in (a, b)), scale_a.to("meta"), recipe_a, scale_b.to("meta"), recipe_b, **how)
        assert a.stride()[1] == 1 and b.stride()[0] == 1, "row-major and column-major"
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        calls.append(shape)
        return real(a, b, scale_a, recipe_a, scale_b, recipe_b, **how)

    x, w, g = tensors(dtype)
    expected = ours(x, w, g, "emulated", fmt)
    monkeypatch.setattr(RowWise, "unfit_device", lambda self, device: None)
    monkeypatch.setattr(F, "scaled_mm", multiply)
    for one, other in zip(ours(x, w, g, "built_in", fmt), expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).detach().float().norm() / other.detach().float().norm()) < 4e-3
    assert len(calls) == (2 if "/" in fmt else 3)


def test_what_cannot_run_says_why(monkeypatch):
    fmt = get_format("fp8_rowwise")
    assert "fp8_rowwise has other scales than" in str(Hopper().unfit_format(fmt))
    assert "fp8_rowwise has other scales than" in str(MX().unfit_format(fmt))
    assert RowWise().unfit_format(get_format("fp8")) == "fp8 has no scales of whole rows"
    assert "E5M2 gradients" in str(RowWise().unfit_format(replace(fmt, name="mixed", gradient_element=E5M2)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, fits in (((8, 9), True), ((9, 0), True), ((12, 0), True), ((8, 6), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (RowWise().unfit_device(torch.device("cuda")) is None) == fits
    monkeypatch.setattr(RowWise, "unfit_device", lambda self, device: None)
    x, w, _ = (t[:, :200].detach() for t in tensors(torch.float32))
    call = LinearCall(LinearPrecision.uniform("fp8_rowwise"), KEY)
    with pytest.raises(ValueError, match="200 input channels are no multiple of 16"):
        ByGemm(RowWise())(x, w, call)
    assert torch.equal(ByGemm(RowWise(), Emulated())(x, w, call), quantized_linear(x, w, call.precision, key=KEY))


def test_block_scales_need_blocks():
    with pytest.raises(ValueError, match="format x: scale='e4m3' is of blocks, tile=ROW has none; choose fp32"):
        Format("x", get_format("fp4").element, tile=ROW, scale="e4m3")


@pytest.mark.skipif(cpu.library() is None, reason="the CPU kernel is not built; pip install -e .")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cpu_kernel_on_a_million_numbers(dtype):
    """Every bfloat16 pattern sixteen times, NaN and infinities too; both dims from one call, in every output."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).repeat(16)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(3))
    rows = [every.view(1024, 1024), every[order].view(1024, 1024), *operands((330, 270), dtype)]
    for x in rows:
        for outputs in (("values", "codes"), ("operand", "values"), ("codes", "operand")):
            for key in (None, KEY):
                forms = [
                    Form(get_format("fp8_rowwise"), "input", dim, key, output)
                    for dim, output in zip((1, 0), outputs, strict=True)
                ]
                x = x.to(dtype)
                assert cpu.takes(x, forms)
                for made, wanted in zip(cpu.run(x, forms), reference(x, forms), strict=True):
                    for one, other in zip(made[1:], wanted[1:], strict=True):
                        assert (one is None) == (other is None)
                        assert one is None or torch.equal(bits(one), bits(other))
