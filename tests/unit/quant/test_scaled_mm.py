"""The Hopper linear without a Hopper: its layouts against PyTorch's own rules, its values against the emulation.

`multiply` below stands in for the tensor cores.  It first shows the operands' shapes, strides and dtypes to
torch.nn.functional.scaled_mm on the meta device, which refuses what the hardware would refuse, then multiplies
what the codes and scales say.  tests/gpu/test_linear.py runs the real ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.formats import Format
from megatron_snip.formats.element import E4M3, E5M2
from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, check_linear, name_stream, quantized_linear
from megatron_snip.quant.linears.block_scaled import MX
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.matmul import product
from megatron_snip.quant.linears.scaled_mm import Hopper

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
REAL, BEFORE = F.scaled_mm, torch._scaled_mm
SIZES = (384, 640, 256)  # tokens, input channels, output channels: 5 blocks make cuBLAS's padding show


def meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def multiply(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype, use_fast_accum):
    assert not use_fast_accum and recipe_a == F.ScalingType.BlockWise1x128
    shape = REAL(meta(a), meta(b), meta(scale_a), recipe_a, meta(scale_b), recipe_b, output_dtype=output_dtype)
    a = a.float() * scale_a.repeat_interleave(128, dim=1)
    if recipe_b == F.ScalingType.BlockWise1x128:
        b = b.float() * scale_b.T.repeat_interleave(128, dim=0)
    else:
        blocks = scale_b[: b.shape[0] // 128]
        b = b.float() * blocks.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    assert shape.shape == (a.shape[0], b.shape[1])
    return (a @ b).to(output_dtype)


def multiply_mixed(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum=False):
    """E5M2 by E4M3.  Square blocks' scales are [K, N] blocks, contiguous along K and not padded."""
    assert (a.dtype, b.dtype) == (torch.float8_e5m2, torch.float8_e4m3fn) and not use_fast_accum
    shape = BEFORE(meta(a), meta(b), meta(scale_a), meta(scale_b), out_dtype=out_dtype)
    a = a.float() * scale_a.repeat_interleave(128, dim=1)
    if scale_b.shape[1] == b.shape[1]:
        assert scale_b.is_contiguous(), "outer-dim-major"
    else:
        assert scale_b.stride() == (1, b.shape[0] // 128)
        scale_b = scale_b.repeat_interleave(128, dim=1)
    assert scale_a.stride()[0] == 1 and shape.shape == (a.shape[0], b.shape[1])
    return (a @ (b.float() * scale_b.repeat_interleave(128, dim=0))).to(out_dtype)


@pytest.fixture
def scaled_mm(monkeypatch):
    calls = []
    monkeypatch.setattr(Hopper, "unfit_device", lambda self, device: None)
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **how: calls.append(args) or multiply(*args, **how))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **how: calls.append(args) or multiply_mixed(*args, **how))
    return calls


def tensors(dtype: torch.dtype, sizes: tuple[int, int, int] = SIZES) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    t, k, n = sizes
    x, w, g = (torch.randn(shape, generator=generator).to(dtype) for shape in ((t, k), (n, k), (t, n)))
    return x.requires_grad_(), w.requires_grad_(), g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp8", "fp4", "fp8_pow2", "fp4_pow2", "e3m2", "fp4/fp8/bf16",
                                       "bf16/fp4/fp8", "fp8_hybrid", "fp8/fp8/fp8_hybrid"])  # fmt: skip
def test_the_same_codes_and_scales_as_the_emulation(precision, dtype, scaled_mm):
    x, w, g = tensors(dtype, (384, 640, 512) if "hybrid" in precision else SIZES)
    precision = LinearPrecision.parse(precision)
    emulated = quantized_linear(x, w, precision, key=KEY)
    y = ByGemm(Hopper())(x, w, LinearCall(precision, KEY))
    expected = [emulated, *torch.autograd.grad(emulated, (x, w), g)]
    ours = [y, *torch.autograd.grad(y, (x, w), g)]
    # float32: only the order of sums differs; bfloat16 operands of the emulation are rounded once more
    worst = 2e-6 if dtype == torch.float32 else 8e-3
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).detach().float().norm() / b.detach().float().norm()) < worst
    quantised = [gemm for gemm in (precision.fprop, precision.dgrad, precision.wgrad) if gemm != "bf16"]
    assert len(scaled_mm) == len(quantised)


def test_backward_keeps_a_byte_an_element(scaled_mm):
    x, w, _ = tensors(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ByGemm(Hopper())(x, w, LinearCall(LinearPrecision.uniform("fp4"), KEY))
    assert sorted(str(t.dtype) for t in kept) == ["torch.bfloat16", "torch.float32", "torch.uint8"]
    assert next(t for t in kept if t.dtype == torch.bfloat16).data_ptr() == w.data_ptr()


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        ("nvfp4_plain", "need a Blackwell GPU, the device is cpu"),
        ("fp8_e5m2", "fp8_e5m2 needs E5M2 for both operands"),
        ("e6m1", "e6m1's E6M1 elements fit neither E4M3 nor E5M2"),
        ("fp8", "need a Hopper GPU, the device is cpu"),
    ],
)
def test_what_cannot_run_is_refused_with_the_way_out(fmt, reason):
    with pytest.raises(ValueError, match=rf"scaled_mm cannot run {fmt} here: .*{reason}.*use --linear-impl .*emulated"):
        check_linear("scaled_mm", LinearPrecision.uniform(fmt), torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((9, 0), "13.0", None), ((9, 0), "12.8", "need CUDA 12.9"), ((10, 0), "13.0", "compute capability 9.0"),
     ((8, 9), "13.0", "compute capability 9.0")],
)  # fmt: skip
def test_devices(capability, cuda, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    refusal = ByGemm(Hopper()).refusal(LinearPrecision.uniform("fp4"), torch.device("cuda"))
    assert refusal is None if reason is None else reason in refusal


def test_a_float32_master_weights_gradient_is_not_rounded_to_bf16(scaled_mm):
    x, w, g = tensors(torch.bfloat16)
    master = w.detach().float().requires_grad_()
    y = ByGemm(Hopper())(x, master, LinearCall(LinearPrecision.uniform("fp8"), KEY))
    grad_x, grad = torch.autograd.grad(y, (x, master), g)
    assert (y.dtype, grad_x.dtype, grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert not torch.equal(grad, grad.bfloat16().float())
    rounded = ByGemm(Hopper())(x, w, LinearCall(LinearPrecision.uniform("fp8"), KEY))
    assert torch.equal(grad.bfloat16(), torch.autograd.grad(rounded, w, g)[0])


def test_plain_wgrad_gives_float32_at_once_where_the_device_can():
    g, x = (
        torch.empty(64, 32, dtype=torch.bfloat16, device="meta"),
        torch.empty(64, 16, dtype=torch.bfloat16, device="meta"),
    )
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with Calls():
        grad = product("wgrad", g, x, torch.float32)
    assert grad.dtype == torch.float32 and grad.shape == (32, 16) and called[-1] == "aten.mm.dtype"


@pytest.mark.parametrize("sizes", [(300, 256, 256), (256, 300, 256), (256, 256, 300)])
def test_sizes_that_do_not_fit_the_blocks_are_refused_or_emulated(sizes, scaled_mm):
    t, k, n = sizes
    x, w = torch.randn(t, k), torch.randn(n, k)
    call = LinearCall(LinearPrecision.uniform("fp8"), KEY)
    with pytest.raises(ValueError, match=r"300 .* no multiple of 128; use --linear-impl auto or emulated"):
        ByGemm(Hopper())(x, w, call)
    expected = quantized_linear(x, w, call.precision, key=KEY)
    assert torch.equal(ByGemm(Hopper(), Emulated())(x, w, call), expected) and not scaled_mm


def test_hybrid_needs_scales_without_padding(scaled_mm):
    """torch._scaled_mm does not know cuBLAS's padding of the scales of square blocks to a multiple of 4."""
    x, w, _ = tensors(torch.float32)
    call = LinearCall(LinearPrecision.uniform("fp8_hybrid"), KEY)
    with pytest.raises(ValueError, match="256 output channels are no multiple of 512, which fp8_hybrid's dgrad needs"):
        ByGemm(Hopper())(x, w, call)
    expected = quantized_linear(x, w, call.precision, key=KEY)
    assert torch.equal(ByGemm(Hopper(), Emulated())(x, w, call), expected) and not scaled_mm
    fmt = Format("mx_hybrid", E4M3, tile=32, weight_block=None, scale="e8m0", gradient_element=E5M2)
    assert MX().unfit_format(fmt) == "mx_hybrid has E5M2 gradients, which these tensor cores are not given"
    fmt = Format("backwards", E5M2, gradient_element=E4M3)
    assert "needs E5M2 for both operands" in str(Hopper().unfit_format(fmt))


def test_only_gemms_that_the_tensor_cores_take_go_there(scaled_mm):
    x, w, g = tensors(torch.float32)
    precision = LinearPrecision.parse("fp8/mxfp8/fp4")
    y = ByGemm(Hopper(), Emulated())(x, w, LinearCall(precision, KEY))
    ours, emulated = [y, *torch.autograd.grad(y, (x, w), g)], quantized_linear(x, w, precision, key=KEY)
    assert len(scaled_mm) == 2
    assert torch.equal(ours[1], torch.autograd.grad(emulated, x, g, retain_graph=True)[0])
    torch.testing.assert_close(ours[2], torch.autograd.grad(emulated, w, g)[0], rtol=1e-5, atol=1e-4)
