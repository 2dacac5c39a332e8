"""The Triton kernel of AdamW gives the specification's bits in Triton's interpreter, and compiles for GPUs as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install triton")

from benchmarks.kernel_resources import BLACKWELL, HOPPER, compile_ahead
from megatron_snip.quant.adamw import triton_step
from megatron_snip.quant.adamw.step import Scalars
from tests.unit.quant.adamw.numbers_of import STORED, parameter
from tests.unit.quant.kernels.test_triton_compile import FORBIDDEN

ROOT = Path(__file__).resolve().parents[4]


def test_same_bits_as_the_specification_in_the_interpreter():
    command = [sys.executable, "-m", "tests.unit.quant.adamw.interpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and " steps, 0 differences" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("precision", STORED)
def test_compiles_without_other_arithmetic(precision, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = set()
    for step, clip in ((1, 1.0), (16, 0.5)):
        stored, grad = parameter(precision, 0, 16, 256)
        s = Scalars.of(step, 1e-3 * step, 0.1, (0.9, 0.999), 1e-8, clip)
        made = compile_ahead("adamw_kernel", capability, partial(triton_step.run, stored, grad, s), triton_step)
        kernels.add(made.hash)
        text = made.asm["ptx"]
        assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
        assert "sqrt.rn.f32" in text and "div.rn.f32" in text and not re.search(r"sqrt\.approx", text)
    assert len(kernels) == 1, "other numbers need no other kernel"
