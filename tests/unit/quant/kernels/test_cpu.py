"""The compiled CPU kernel gives the specification's bits."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_snip.quant import RoundingKey, fake_quantize, quantize
from megatron_snip.quant.kernels import cpu
from tests.unit.quant.specification import fake_quantize_reference, quantize_reference

built = pytest.mark.skipif(cpu.library() is None, reason="the CPU kernel is not built; pip install -e .")

SHAPES = [(1, 1), (1, 128), (128, 128), (3, 5), (130, 259), (257, 127), (1, 300), (300, 1), (0, 5), (5, 0)]
FORMATS = ["fp8", "fp4", "fp8_e5m2", "e3m2", "e2m3", "e3m4", "e6m1", "e2m5"]
ROLES = [("input", 1), ("input", 0), ("weight", 1)]
SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40, 3.3e38, -3e38, 1e-37]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns; every NaN counts as one pattern."""
    patterns = x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
    return torch.where(x.isnan(), -1, patterns)


def operands(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Normal numbers, with special ones, tiny ones, subnormal ones, and a wide range with a zero half."""
    generator = torch.Generator().manual_seed(sum(shape))
    normal = torch.randn(shape, generator=generator)
    special = normal.clone()
    where = torch.rand(shape, generator=generator) < 0.05
    picks = torch.randint(len(SPECIAL), shape, generator=generator)
    special[where] = torch.tensor(SPECIAL)[picks][where]
    wide = (normal * 20).exp() * normal
    wide[: shape[0] // 2] = 0.0
    return [x.to(dtype) for x in (normal, special, normal * 1e-37, normal * 1e-40, wide)]


def compare(x: torch.Tensor, fmt: str, **how: object) -> None:
    fake, spec = fake_quantize(x, fmt, **how), fake_quantize_reference(x, fmt, **how)
    assert torch.equal(bits(fake), bits(spec))
    codes, spec_codes = quantize(x, fmt, **how), quantize_reference(x, fmt, **how)
    assert torch.equal(codes.codes, spec_codes.codes) and torch.equal(codes.scales, spec_codes.scales)
    assert torch.equal(bits(codes.dequantize(x.dtype)), bits(spec))


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_as_the_specification(shape, dtype):
    for index, x in enumerate(operands(shape, dtype)):
        for number, fmt in enumerate(FORMATS):
            role, dim = ROLES[(index + number) % 3]
            compare(x, fmt, role=role, dim=dim, rounding="nearest")
            key = RoundingKey(seed=-5, iteration=2**32 - 1, stream=number, row0=2**32 - 3, col0=index)
            compare(x, fmt, role=role, dim=dim, rounding="stochastic", key=key)


@built
@pytest.mark.parametrize(("role", "dim"), ROLES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_operands_that_are_not_contiguous(role, dim, rounding):
    x = torch.randn(300, 400).bfloat16()
    for view in (x.T, x[:, 5:300], x[::2, ::3], x[:1].expand(130, -1)):
        compare(view, "fp4", role=role, dim=dim, rounding=rounding, key=RoundingKey(1, 2, 3))


@built
@pytest.mark.parametrize(("role", "dim"), ROLES)
def test_the_number_of_threads_changes_nothing(role, dim, monkeypatch):
    x = torch.randn(700, 1000)
    key = RoundingKey(1, 2, 3)
    one = fake_quantize(x, "fp4", role=role, dim=dim, rounding="stochastic", key=key)
    monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", 1)
    for threads in (2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        y = fake_quantize(x, "fp4", role=role, dim=dim, rounding="stochastic", key=key)
        assert torch.equal(y, one)


def test_without_the_kernel_the_specification_runs_and_says_so_once(tmp_path, monkeypatch, caplog):
    x = torch.randn(10, 200)
    expected = fake_quantize(x, "fp8", role="input", dim=1)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    cpu.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert torch.equal(fake_quantize(x, "fp8", role="input", dim=1), expected)
        assert len(caplog.records) == 1 and "not built" in caplog.text
        (tmp_path / "_cpu.so").write_bytes(b"no library")
        cpu.library.cache_clear()
        assert cpu.library() is None and "does not load" in caplog.text
    finally:
        cpu.library.cache_clear()


@built
def test_a_library_of_another_version_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "ABI", cpu.ABI + 1)
    cpu.library.cache_clear()
    try:
        assert cpu.library() is None
        assert "ABI" in caplog.text
    finally:
        cpu.library.cache_clear()


def test_fake_tensors_take_the_specification():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(256, 256)
        assert fake_quantize(x, "fp8", role="input", dim=1).shape == (256, 256)
