"""The linear implementations on a GPU: `python -m pytest tests/gpu` on a machine that has one.

scaled_mm is compared with the emulation, whose codes and scales it shares: what differs is where products are
rounded and summed.  The emulation's bf16 operands are rounded once more, so float32 is its stricter judge.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import LinearPrecision, RoundingKey, check_linear, name_stream, quantized_linear

pytestmark = pytest.mark.gpu

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
SIZES = [(1024, 2048, 1024), (384, 640, 256), (8192, 4096, 14336)]
DEVICE = torch.device("cuda")


def needs_scaled_mm() -> None:
    try:
        check_linear("scaled_mm", LinearPrecision.uniform("fp8"), DEVICE)
    except ValueError as error:
        pytest.skip(str(error))


def tensors(sizes: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    t, k, n = sizes
    x, w, g = (torch.randn(s, generator=generator, device=DEVICE).to(dtype) for s in ((t, k), (n, k), (t, n)))
    return x.requires_grad_(), w.requires_grad_(), g


def run(impl: str, precision: str, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    y = quantized_linear(x, w, LinearPrecision.parse(precision), key=KEY, impl=impl)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["fp8", "fp4", "fp8_pow2", "fp4_pow2", "fp4/fp8/bf16"])
def test_scaled_mm_is_the_emulation_but_for_sums(precision, sizes):
    needs_scaled_mm()
    x, w, g = tensors(sizes)
    exact = [t.detach().float() for t in (x, w, g)]
    expected = run("emulated", precision, exact[0].requires_grad_(), exact[1].requires_grad_(), exact[2])
    for ours, theirs in zip(run("scaled_mm", precision, x, w, g), expected, strict=True):
        # bf16 results have a relative error of 2**-9 at most, 1.1e-3 in the mean; Hopper adds its 14-bit sums'
        assert distance(ours, theirs) < 4e-3


def test_the_same_call_gives_the_same_bits():
    needs_scaled_mm()
    x, w, g = tensors(SIZES[0])
    first, second = (run("scaled_mm", "fp4", x, w, g) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_auto_takes_the_tensor_cores_where_it_can():
    needs_scaled_mm()
    x, w, g = tensors(SIZES[0])
    for precision in ("fp8", "fp4"):
        both = run("auto", precision, x, w, g), run("scaled_mm", precision, x, w, g)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    for precision in ("nvfp4_plain", "mxfp8"):
        both = run("auto", precision, x, w, g), run("emulated", precision, x, w, g)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("precision", ["fp8", "fp4", "mxfp8", "nvfp4_plain"])
def test_the_emulation_is_the_cpus(precision):
    x, w, g = tensors((512, 1024, 768), torch.float32)
    ours = run("emulated", precision, x, w, g)
    on_cpu = [t.detach().cpu() for t in (x, w, g)]
    theirs = run("emulated", precision, on_cpu[0].requires_grad_(), on_cpu[1].requires_grad_(), on_cpu[2])
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a.cpu(), b) < 1e-5
