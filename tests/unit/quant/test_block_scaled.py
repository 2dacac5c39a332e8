"""Blackwell's backends without a Blackwell: layouts against PyTorch's own rules, values against the emulation.

`multiply` below stands in for the tensor cores.  It first shows the operands' shapes, strides and dtypes to
torch.nn.functional.scaled_mm on the meta device, which refuses what the hardware would refuse, then takes the scales
out of their tiles byte by byte and multiplies what codes and scales say.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.quant import LINEAR_IMPLS, LinearCall, LinearPrecision, RoundingKey, name_stream, quantized_linear
from megatron_snip.quant.casts.cast import Form
from megatron_snip.quant.casts.swizzled import swizzle
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears import linear_op
from megatron_snip.quant.linears.block_scaled import MX, NVFP4
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.linear import check_linear
from megatron_snip.quant.linears.operands import Sizes, unset

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
REAL = F.scaled_mm
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
TILED, PLAIN = F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE


def meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def untiled(scales: Tensor, rows: int, cols: int) -> Tensor:
    """Scales [rows, cols] out of cuBLASLt's tiles, written out from its documentation."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    tile = row // 128 * -(-cols // 4) + col // 4
    return scales[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + col % 4].float()


def values(codes: Tensor, scales: Tensor | list[Tensor]) -> Tensor:
    """What row-major codes [outer, reduction] and their scales say."""
    if isinstance(scales, list):
        packed = codes.view(torch.uint8)
        codes = E2M1[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(start_dim=1).long()]
        block, (scales, whole) = 16, scales
        assert whole.numel() == 1 and whole.dtype == torch.float32
    else:
        codes, block, whole = codes.float(), 32, torch.ones(())
    outer, reduction = codes.shape
    return codes * (untiled(scales, outer, reduction // block) * whole).repeat_interleave(block, dim=1)


def multiply(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
    shown = [[meta(s) for s in scale] if isinstance(scale, list) else meta(scale) for scale in (scale_a, scale_b)]
    shape = REAL(
        meta(a), meta(b), shown[0], recipe_a, shown[1], recipe_b, swizzle_a, swizzle_b, output_dtype=output_dtype
    )
    # torch's kernel asks for a swizzle a scale, which its rule for shapes does not look at
    assert swizzle_a == swizzle_b == ([TILED, PLAIN] if isinstance(scale_a, list) else TILED)
    assert shape.dtype == output_dtype
    product = values(a, scale_a) @ values(b.T, scale_b).T
    assert shape.shape == product.shape
    return product.to(output_dtype)


@pytest.fixture
def blackwell(monkeypatch):
    calls = []
    for backend in (MX, NVFP4):
        monkeypatch.setattr(backend, "unfit_device", lambda self, device: None)
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **how: calls.append(args) or multiply(*args, **how))
    return calls


def tensors(dtype: torch.dtype, sizes: tuple[int, int, int] = (160, 608, 288)) -> tuple[Tensor, Tensor, Tensor]:
    """By default several tiles of scales both ways, and edges in the last one."""
    generator = torch.Generator().manual_seed(0)
    t, k, n = sizes
    x, w, g = (torch.randn(shape, generator=generator).to(dtype) for shape in ((t, k), (n, k), (t, n)))
    return x.requires_grad_(), w.requires_grad_(), g


def results(implementation, precision, x, w, g) -> list[Tensor]:
    y = implementation(x, w, LinearCall(precision, KEY))
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


FORMATS = ["mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4_plain", "nvfp4", "mxfp8/nvfp4_plain/bf16", "nvfp4_plain/bf16/mxfp8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", FORMATS)
def test_the_same_codes_and_scales_as_the_emulation(precision, dtype, blackwell):
    x, w, g = tensors(dtype)
    precision = LinearPrecision.parse(precision)
    ours = results(ByGemm(MX(), NVFP4()), precision, x, w, g)
    # float32: only the order of sums differs; bfloat16 operands of the emulation are rounded once more
    worst = 2e-6 if dtype == torch.float32 else 8e-3
    for a, b in zip(ours, results(ByGemm(Emulated()), precision, x, w, g), strict=True):
        assert a.dtype == b.dtype and float((a - b).float().norm() / b.float().norm()) < worst
    assert len(blackwell) == sum(fmt != "bf16" for fmt in (precision.fprop, precision.dgrad, precision.wgrad))


@pytest.mark.parametrize("precision", ["fp8_pow2", "fp4_pow2"])
def test_blocks_of_128_with_a_power_of_two_are_four_of_32(precision, blackwell):
    x, w, g = tensors(torch.float32, (256, 384, 128))
    with torch.no_grad():
        x[:, :128] = 0  # whose scale is 0, and E8M0 has none
        w[:128, 128:256] *= 2.0**-100
    precision = LinearPrecision.uniform(precision)
    ours, theirs = (results(ByGemm(one), precision, x, w, g) for one in (MX(), Emulated()))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 2e-6
    assert len(blackwell) == 3


def test_a_nan_reaches_the_outputs_that_it_reaches_in_the_emulation(blackwell):
    x, w, g = tensors(torch.float32)
    with torch.no_grad():
        x[3, 5] = torch.nan
    for fmt in ("mxfp8", "nvfp4_plain"):
        ours, theirs = (
            results(implementation, LinearPrecision.uniform(fmt), x, w, g)
            for implementation in (ByGemm(MX(), NVFP4()), ByGemm(Emulated()))
        )
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
        assert ours[0].isnan().any() and not ours[0].isnan().all()


def test_tiles_of_scales_are_cublaslts():
    scales = torch.arange(1, 1 + 200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    tiled = swizzle(scales)
    assert tiled.shape == (2, 128 * 8) and tiled.is_contiguous()
    assert torch.equal(untiled(tiled.view(-1), 200, 6), scales.float())
    assert int((tiled != 0).sum()) == int((scales != 0).sum())


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4_plain"])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_kept_lies_the_same_through_a_graph_and_where_nothing_was_cast(fmt, dim):
    """Codes and scales travel through a compiled graph as they lie in memory."""
    x, form = torch.randn(160, 96), Form(get_format(fmt), "input", dim, output="swizzled")
    (made,) = cast(x, [form])
    nothing = unset(form, x)
    back = linear_op._unflat(form, linear_op._flat(made[1:4], x), (160, 96), x.dtype)
    for part, same, empty in zip(made[1:], back[1:], nothing[1:], strict=True):
        assert part is None or (torch.equal(part, same) and part.stride() == same.stride() == empty.stride())
        assert part is None or (part.shape, part.dtype) == (empty.shape, empty.dtype)
    assert made.scales.dtype == torch.uint8 and bool((nothing.scales == 0xFF).all())
    assert (made.tensor_scale is None) == (fmt == "mxfp8") and made.data.numel() * (
        1 + (fmt == "nvfp4_plain")
    ) == x.numel()


def pretend(monkeypatch, capability: tuple[int, int], cuda: str = "13.0") -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((10, 0), "12.8", None), ((10, 3), "13.0", None), ((10, 0), "12.6", "need CUDA 12.8"),
     ((12, 0), "13.0", None), ((12, 1), "13.0", None),
     ((9, 0), "13.0", "need a Blackwell GPU (compute capability 10.0 or 12.0), not some GPU"),
     ((8, 9), "13.0", "need a Blackwell GPU"), ((11, 0), "13.0", "need a Blackwell GPU")],
)  # fmt: skip
def test_devices(capability, cuda, reason, monkeypatch):
    device = pretend(monkeypatch, capability, cuda)
    for backend, fmt in ((MX(), "mxfp8"), (NVFP4(), "nvfp4_plain")):
        refusal = ByGemm(backend).refusal(LinearPrecision.uniform(fmt), device)
        assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("fmt", "hopper", "blackwell"),
    [
        ("fp8", "hopper", "emulated (tensor cores need a Hopper GPU (compute capability 9.0), not some GPU)"),
        ("fp4", "hopper", "emulated (tensor cores need a Hopper GPU"),
        ("fp8_pow2", "hopper", "blackwell (MXFP8"),
        ("mxfp8", "emulated (tensor cores need a Blackwell GPU", "blackwell (MXFP8"),
        ("mxfp4", "emulated", "blackwell (MXFP8"),
        ("nvfp4_plain", "emulated", "blackwell (NVFP4"),
        ("mxfp8_e5m2", "emulated", "emulated"),
        ("bf16", "torch", "torch"),
    ],
)
def test_what_runs_where_is_told_by_format(fmt, hopper, blackwell, monkeypatch):
    precision, sizes = LinearPrecision.parse(f"bf16/{fmt}/{fmt}"), Sizes(256, 512, 128)
    for capability, expected in (((9, 0), hopper), ((10, 0), blackwell)):
        told = LINEAR_IMPLS["auto"].runs(precision, pretend(monkeypatch, capability), sizes)
        assert told["bf16"] == "torch" and told[fmt].startswith(expected)
    assert LINEAR_IMPLS["auto"].runs(precision, pretend(monkeypatch, (9, 0)), Sizes(256, 500, 128))[fmt][:4] in (
        "emul",
        "torc",
    )
    told = LINEAR_IMPLS["transformer_engine"].runs(precision, pretend(monkeypatch, (9, 0)), sizes)[fmt]
    if fmt != "bf16":
        assert told.startswith(hopper) and "; not Transformer Engine: it " in told


def test_refusals_name_the_way_out(blackwell):
    x, w, _ = tensors(torch.float32, (160, 80, 288))
    with pytest.raises(
        ValueError, match=r"80 input channels are no multiple of 32; use --linear-impl auto or emulated"
    ):
        ByGemm(MX(), NVFP4())(x, w, LinearCall(LinearPrecision.uniform("mxfp8"), KEY))
    call = LinearCall(LinearPrecision.uniform("mxfp8"), KEY)
    assert torch.equal(ByGemm(MX(), Emulated())(x, w, call), quantized_linear(x, w, call.precision, key=KEY))
    with pytest.raises(ValueError, match="mxfp8_e5m2 needs E5M2 for both operands.*use --linear-impl auto or emulated"):
        check_linear("scaled_mm", LinearPrecision.uniform("mxfp8_e5m2"), torch.device("cpu"))
