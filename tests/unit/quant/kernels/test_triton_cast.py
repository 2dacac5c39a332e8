"""The Triton kernels give the specification's bits in Triton's interpreter, and are taken only where they can run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.formats import Format, get_format
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Output
from megatron_snip.quant.kernels import triton_cast, triton_launches

ROOT = Path(__file__).resolve().parents[4]
with_triton = pytest.mark.skipif(not triton_cast.installed(), reason="triton is not installed; pip install triton")


@with_triton
def test_same_bits_as_the_specification_in_the_interpreter():
    command = [sys.executable, "-m", "tests.unit.quant.kernels.interpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and " casts, 0 differences" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


def on_a_gpu(x: torch.Tensor) -> torch.Tensor:
    """Stands for a tensor on a GPU, as far as ``takes`` looks at it."""
    return SimpleNamespace(is_cuda=True, numel=x.numel, shape=x.shape, device=x.device, dtype=x.dtype)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(triton_cast, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_cast, "installed", lambda: True)
    monkeypatch.setattr(triton_cast, "Tensor", SimpleNamespace)
    return monkeypatch


def form(role: str = "input", output: Output = "codes", **fmt: object) -> Form:
    return Form(Format("test", get_format("fp8").element, **fmt), role, 0, output=output)


def test_takes_what_it_can_run(hopper):
    x = on_a_gpu(torch.ones(64, 64))
    assert triton_cast.takes(x, [form(output="values"), form("weight", "operand")])
    assert triton_cast.takes(x, [Form(get_format("fp4"), "input", 1, RoundingKey(1, 2, 3), "operand")])
    assert not triton_cast.takes(x, [form(), form(tile=24)])
    assert not triton_cast.takes(x, [form("weight", weight_block=256)])
    assert not triton_cast.takes(x, [Form(get_format("e3m4"), "input", 0, output="operand")])
    assert triton_cast.takes(x, [Form(get_format("e3m4"), "input", 0, output="codes")])
    assert not triton_cast.takes(on_a_gpu(torch.ones(0, 64)), [form()])
    hopper.setattr(triton_cast, "_capability", lambda device: (7, 5))
    assert not triton_cast.takes(x, [form()])


def test_takes_nothing_without_triton_or_elsewhere(hopper):
    x = on_a_gpu(torch.ones(64, 64))
    assert triton_cast.takes(x, [form()]) and triton_cast.on_nvidia(x)
    hopper.setattr(torch.version, "hip", "7.0")
    assert not triton_cast.takes(x, [form()])
    hopper.undo()
    assert not triton_cast.takes(torch.ones(64, 64), [form()])
    hopper.setattr(importlib.util, "find_spec", lambda name: None)
    triton_cast.installed.cache_clear()
    try:
        assert not triton_cast.installed()
    finally:
        hopper.undo()
        triton_cast.installed.cache_clear()


def test_takes_nothing_while_a_compiler_watches_and_shows_it_nothing(hopper):
    x = on_a_gpu(torch.ones(64, 64))
    hopper.setattr(torch.compiler, "is_compiling", lambda: True)
    hopper.setattr(triton_cast, "installed", lambda: pytest.fail("the compiler traced how triton is found"))
    assert not triton_cast.on_nvidia(x)


def test_the_package_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from megatron_snip.quant import fake_quantize\n"
        "assert fake_quantize(torch.ones(3, 5), 'fp8', role='input', dim=1).sum() == 15"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_tiling_follows_blocks_and_rounding():
    key, tilings = RoundingKey(1, 2, 3), triton_launches.TILINGS

    def tiling(forms, output="codes"):
        return triton_launches.tiling([triton_launches.Kind.of(form.held(output)) for form in forms])

    fp4, mxfp4 = ([Form(get_format(name), "input", dim, key) for dim in (1, 0)] for name in ("fp4", "mxfp4"))
    assert tiling(fp4) == triton_launches.STOCHASTIC != tilings[128] == tiling([Form(get_format("fp4"), "weight", 1)])
    assert tiling([Form(get_format("nvfp4_plain"), "input", 0)]) == tilings[16]
    mxfp8 = [Form(get_format("mxfp8"), "input", 0)]
    assert tiling(mxfp8, "swizzled") == triton_launches.SWIZZLED != tilings[32]
    assert triton_launches.STOCHASTIC.chunk < 32 <= tiling([fp4[1], mxfp4[1]]).chunk, "one launch as before"
    assert tiling([form(tile=64)]) == triton_launches.ANY


def test_words_of_a_key_are_its_bits():
    key = RoundingKey(seed=1, iteration=2**32 - 1, stream=3, row0=2**40 + 2**31, col0=2**34 - 1)
    *words, iteration, row0, _ = triton_cast._random(key, torch.device("cpu"))
    assert [word & 0xFFFFFFFF for word in words] == [*key.words, 2**31 - 1]
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert iteration.tolist() == [2**32 - 1] and row0.tolist() == [2**40 + 2**31]
