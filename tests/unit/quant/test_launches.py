"""How many kernels a linear and step launch on a GPU, counted without one.

The tensors are on the meta device and take the GPU's path.  Counted are: each launch of a Triton kernel, in whose
place a counter stands, and each operator of torch that is neither a view nor an allocation.  Not seen is what one
operator may launch besides its kernel, such as cuBLASLt's own reductions.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed; pip install triton")

from megatron_snip.quant import GEMMS, Casts, LinearCall, LinearPrecision, RoundingKey
from megatron_snip.quant.kernels import op, triton_cast, triton_kernels
from megatron_snip.quant.kernels.triton_launches import FP8
from megatron_snip.quant.linears.block_scaled import MX, NVFP4
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.group import Group, run_group
from megatron_snip.quant.linears.scaled_mm import Hopper

KEY = RoundingKey(seed=1, iteration=2, stream=3)
BACKENDS = {"bf16": Emulated, "mxfp8": MX, "mxfp4": MX, "fp8_pow2": MX, "nvfp4_plain": NVFP4, "nvfp4": NVFP4}
KERNELS = ("cast_kernel", "dequantize_kernel", "amax_kernel", "hadamard_kernel", "swiglu_backward_kernel")


class Launches(TorchDispatchMode):
    """Collects the names of what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> Any:
        """In the place of a Triton kernel: ``kernel[grid](...)`` is counted."""
        counter = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args, **options: counter.names.append(name)

        return Kernel()


def step(
    precision: str,
    master: torch.dtype,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    key: RoundingKey = KEY,
    *,
    product: bool = False,
) -> list[str]:
    """What forward and backward of one linear launch after an optimiser step; kept: whether the weight's casts are.

    product: whether the linear reads SwiGLU's.  The iteration and the row of KEY, which a microbatch's first linear
    writes to the device, are there already.
    """
    triton_cast._written.cache_clear()
    triton_cast._random(KEY, torch.device("meta"))
    triton_cast._state(torch.device("meta"), 0)  # once for the whole run
    launches = Launches()
    monkeypatch.setattr(op, "_traced", lambda x: False)
    monkeypatch.setattr(triton_cast, "on_nvidia", lambda x: True)
    monkeypatch.setitem(op.KERNELS, "meta", op.KERNELS["cuda"])
    monkeypatch.setattr(triton_cast, "_converts", lambda device: FP8)
    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, launches.kernel(name))
    x = torch.empty(256, 640, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(384, 640, dtype=master, device="meta", requires_grad=True)
    g = torch.empty(256, 384, dtype=torch.bfloat16, device="meta")
    up = torch.empty_like(x, requires_grad=True)
    formats = precision.split("/") * (3 // len(precision.split("/")))
    backends = {gemm: BACKENDS.get(fmt, Hopper)() for gemm, fmt in zip(GEMMS, formats, strict=True)}
    casts = Casts() if kept else None
    call = LinearCall(LinearPrecision.parse(precision), key, weight_casts=casts, backends=backends)
    with launches:
        (y,) = run_group([x, up] if product else [x], [w], Group([call]))
        torch.autograd.grad(y, (x, up, w) if product else (x, w), g)
    return launches.names


@pytest.mark.parametrize("precision", ["fp8", "fp4", "fp4/fp4/fp8"])
def test_a_linear_launches_three_casts_and_three_gemms(precision, monkeypatch):
    """The weight's one launch reads the master, and serves fprop and dgrad."""
    for master in (torch.bfloat16, torch.float32):  # wgrad's GEMM writes the master's type
        names = step(precision, master, True, monkeypatch)
        gemms = [name for name in names if "scaled_mm" in name]
        assert (names.count("cast_kernel"), len(gemms)) == (3, 3)
        assert len(names) == 6


@pytest.mark.parametrize(("precision", "largest"), [("mxfp8", 0), ("mxfp4", 0), ("fp8_pow2", 0), ("nvfp4_plain", 3)])
def test_on_blackwell_nothing_comes_between_a_cast_and_its_gemm(precision, largest, monkeypatch):
    """NVFP4 needs the largest magnitude of each operand first.  A float32 master is rounded as it is read."""
    for master, kept in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        names = step(precision, master, kept, monkeypatch)
        again = 0 if kept else 1  # the weight's cast for dgrad
        expected = {"cast_kernel": 3 + again, "amax_kernel": largest and largest + again}
        assert {name: names.count(name) for name in expected} == expected
        assert len(names) == sum(expected.values()) + 3 and sum("scaled_mm" in name for name in names) == 3


def test_a_transform_is_one_launch_that_finds_its_largest_magnitude_too(monkeypatch):
    """Of wgrad's two operands, which are cast apart from fprop's and dgrad's."""
    names = step("nvfp4", torch.float32, True, monkeypatch)
    expected = {"amax_kernel": 3, "hadamard_kernel": 2, "cast_kernel": 5, "_scaled_mm_v2": 3}
    assert {name: names.count(name) for name in set(names)} == expected


def test_formats_that_differ_are_cast_from_one_read_too(monkeypatch):
    assert step("fp8/fp4/fp8", torch.float32, True, monkeypatch).count("cast_kernel") == 3


def test_a_weight_that_is_not_kept_is_cast_where_it_is_used(monkeypatch):
    names = step("fp4", torch.float32, False, monkeypatch)
    assert len(names) == 7 and names.count("cast_kernel") == 4


def test_what_random_bits_depend_on_is_written_once_a_microbatch(monkeypatch):
    later = RoundingKey(seed=1, iteration=3, stream=3, row0=128)
    names = step("fp4", torch.float32, True, monkeypatch, later)
    assert len(names) == 8 and names.count("full") == 2
    assert triton_cast._written.cache_info().currsize == 4, "two forms of a gradient share them"


def test_swiglus_product_is_made_by_the_cast_that_reads_it(monkeypatch):
    """Apart it would be two launches more forward and three backward; a GEMM in bf16 needs the product itself."""
    names = step("fp8", torch.float32, True, monkeypatch, product=True)
    assert names == ["cast_kernel"] * 2 + [names[2]] + ["cast_kernel"] + names[4:6] + ["swiglu_backward_kernel"]
    assert all("scaled_mm" in name for name in (names[2], *names[4:6]))
    scaled = step("nvfp4_plain", torch.float32, True, monkeypatch, product=True)  # its largest magnitude needs it, too
    expected = {"amax_kernel": 3, "cast_kernel": 3, "_scaled_mm_v2": 3, "swiglu_backward_kernel": 1}
    assert {name: scaled.count(name) for name in set(scaled)} == expected
    plain = step("fp8/fp8/bf16", torch.float32, True, monkeypatch, product=True)
    assert plain.count("silu") == plain.count("mul") == plain.count("swiglu_backward_kernel") == 1
