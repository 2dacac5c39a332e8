"""The Triton kernels compile for Hopper and Blackwell without a GPU, and what the compiler made of them.

Each kernel goes through triton's own launch, up to the compiled code, with the arguments that a launch on a GPU would
have.  Covered on sm_90a: the training formats fp8, fp8_e5m2, fp4, mxfp8, mxfp4, nvfp4_plain and nvfp4_4over6, all
scale rules and fp32_pow2 besides; 1xB, Bx1 and square blocks; values, codes and operands; both roundings; one form and
two; bf16 and float32; whole and ragged tiles; dequantisation, the largest magnitude, the Hadamard transform.  On
sm_100a: pairs, swizzled where Blackwell reads them.  On sm_120a: those of mxfp8 and nvfp4_plain.  A kernel takes one to
four seconds; those marked slow differ from others here in one thing that a third one has.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; pip install triton")

import triton
import triton.language as tl

from benchmarks.kernel_resources import (
    BLACKWELL,
    HOPPER,
    LAUNCHES,
    SWEEP,
    compile_ahead,
    compile_tiled,
    devices,
    resources,
    work,
)
from megatron_snip.formats import Hadamard, get_format
from megatron_snip.model import rotary, rotary_kernel
from megatron_snip.parallel import loss, loss_kernel
from megatron_snip.quant import RoundingKey, quantize
from megatron_snip.quant.casts import codes as codes_module
from megatron_snip.quant.casts.cast import Form, allocate
from megatron_snip.quant.kernels import triton_cast, triton_code_kernels, triton_codes, triton_kernels, triton_launches
from tests.gpu import core
from tests.unit.quant.kernels.operands import held

KEY = RoundingKey(1, 2, 3)
SHIFTED = RoundingKey(1, 2, 3, col0=2)
#: Where no instruction is Blackwell's own, its kernels are Hopper's but for ptxas's registers.
BOTH = pytest.mark.parametrize("capability", [HOPPER, pytest.param(BLACKWELL, marks=pytest.mark.slow)])
slow = partial(pytest.param, marks=pytest.mark.slow)
# Products and sums without .rn are free to be fused later; approximate division; subnormal numbers flushed to 0.
# The compiler multiplies and adds bfloat16 numbers that are rounded at once in bfloat16, which gives the same bits.
FORBIDDEN = re.compile(r"\bfma\.rn\.\w+|\b(?:mul|add|sub)\.\w*(?:f32|bf16)\w*|div\.full|div\.approx|rcp\.approx|\.ftz")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function (kernel name, capability, call) that returns what the call would have launched there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_(name: str, capability: int, call: Any) -> Any:
        result = compile_ahead(name, capability, call)
        assert f".target sm_{capability}a" in result.asm["ptx"] and result.asm["cubin"]
        return result

    return compile_


def form(fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Form:
    return Form(get_format(fmt), role, dim, key)


def ptx(compiled: Any, forms: list[Form], output: str, capability: int = HOPPER, **x: Any) -> str:
    """The PTX of a cast, clean of arithmetic that rounds otherwise than the specification's."""
    operand = torch.empty(x.get("shape", (256, 512)), dtype=x.get("dtype", torch.bfloat16))
    wanted = [form.held(output) for form in forms]
    result = compiled("cast_kernel", capability, lambda: triton_cast.run(operand, wanted, torch.ones(())))
    text: str = result.asm["ptx"]
    assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
    return text


ONE_FORM = [
    ("fp8", "input", 1, None, "values"),
    ("fp8", "input", 0, None, "operand"),
    ("fp8", "weight", 1, None, "codes"),
    ("fp8_e5m2", "grad_output", 1, None, "codes"),
    ("fp8_pow2", "input", 1, None, "values"),
    ("fp4", "weight", 0, None, "operand"),
    ("fp4", "grad_output", 1, KEY, "values"),
    ("fp4", "grad_output", 0, SHIFTED, "codes"),
    ("mxfp8", "weight", 1, None, "codes"),
    ("mxfp4", "input", 0, None, "codes"),
    ("nvfp4_plain", "weight", 1, None, "codes"),
    ("nvfp4_plain", "grad_output", 1, KEY, "operand"),
]


@pytest.mark.parametrize("case", ONE_FORM, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}-{case[4]}")
def test_one_form(compiled, case):
    fmt, role, dim, key, output = case
    text = ptx(compiled, [form(fmt, role, dim, key)], output)
    # The specification's divisions: fp32 scales divide twice, an E8M0 scale not at all.
    assert ("div.rn.f32" in text) == (not get_format(fmt).scale.startswith("e8m0"))
    assert ("cvt.rn.bf16x2.f32" in text) == (output == "values")
    by_instruction = "cvt.rn.satfinite" in text and fmt not in ("fp4", "nvfp4_plain")  # which are rounded, then carried
    assert by_instruction or "min.NaN.f32" in text, "NaN stays NaN"
    assert bool(re.search(r"st\.global\.v4\.b32", text)), "codes and values are stored by 16 bytes"
    assert bool(re.search(r"ld\.global\.v4\.b32", text)), "x is read by 16 bytes"


@pytest.mark.parametrize(
    ("fmt", "capability"),
    [
        ("fp8", HOPPER),
        ("fp4", HOPPER),
        ("mxfp8", BLACKWELL),
        ("nvfp4_plain", BLACKWELL),
        ("nvfp4_4over6", BLACKWELL),
        slow("fp8", BLACKWELL),  # as BOTH says
        slow("fp4", BLACKWELL),
        slow("mxfp8", HOPPER),  # its scales are test_one_form's there, and two forms fp8's
        slow("nvfp4_plain", HOPPER),
        slow("nvfp4_4over6", HOPPER),  # its candidates are Blackwell's, but for the instruction that packs them
    ],
)
def test_two_forms(compiled, fmt, capability):
    key = KEY if fmt == "fp4" else None
    output = "values" if fmt.startswith("nvfp4") else "operand"
    if capability == BLACKWELL and (fmt == "mxfp8" or fmt.startswith("nvfp4")):
        output = "swizzled"
    text = ptx(compiled, [form(fmt, "grad_output", 1, key), form(fmt, "grad_output", 0, key)], output, capability)
    if not fmt.startswith("nvfp4"):
        assert "cvt.rn.satfinite.e4m3x2.f32" in text, "codes saturate and round to nearest even"
    elif output == "swizzled":
        assert "cvt.rn.satfinite.e2m1x2.f32" in text, "an instruction rounds and packs"
        if fmt == "nvfp4_plain":  # no candidates to round
            assert "st.global.v2.b32" in text, "packed codes along the other dim are stored by 8 bytes"
            assert "min.NaN.f32" not in text


@pytest.mark.parametrize(("fmt", "key"), [("mxfp8", None), slow("nvfp4_plain", None), ("nvfp4_plain", KEY)])
def test_what_compute_capability_12_reads(compiled, fmt, key):
    """RTX 50 reads what Blackwell's data centre GPUs read; FP4 has the same instruction."""
    forms = [form(fmt, "grad_output", 1, key), form(fmt, "grad_output", 0, key)]
    text = ptx(compiled, forms, "swizzled", 120)
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == (fmt == "nvfp4_plain")


def test_e5m2_codes_come_from_the_instruction_that_saturates(compiled):
    text = ptx(compiled, [form("fp8_e5m2", "input", 1)], "codes", dtype=torch.float32)
    assert "cvt.rn.satfinite.e5m2x2.f32" in text


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_codes_that_are_stored_twice_are_no_halves_of_registers(compiled, fmt):
    """ptxas of CUDA 12.8 reads such halves before they are written (benchmarks/results/2026-11-26-gpu-h200.md)."""
    x = torch.empty(256, 512)
    forms = [form(fmt, "weight", dim).held("operand") for dim in (1, 0)]
    call = partial(triton_cast.run, x, forms, torch.ones(()), torch.bfloat16)
    text = compiled("cast_kernel", HOPPER, call).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in text and "shr.u16" not in text


@pytest.mark.parametrize("output", [slow("values"), "operand"])  # masks are the same
def test_ragged_float32(compiled, output):
    ptx(compiled, [form("fp8", "input", 1), form("fp8", "input", 0)], output, shape=(131, 77), dtype=torch.float32)


def test_new_random_bits_need_no_new_kernel(compiled):
    keys = [RoundingKey(0, 0, 0), RoundingKey(1, 2**32 - 1, 3, 2**40 + 16, 2**33), RoundingKey(5, 1, 6, 1, 8)]
    operand = torch.empty(64, 256, dtype=torch.bfloat16)
    kernels = set()
    for key in keys:
        call = partial(triton_cast.run, operand, [form("mxfp4", "grad_output", 1, key).held("codes")])
        kernels.add(compiled("cast_kernel", HOPPER, call).hash)
    assert len(kernels) == 1


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4_plain"])
def test_dequantisation(compiled, fmt):
    codes = quantize(torch.ones(128, 256), fmt, role="input", dim=0)
    result = compiled("dequantize_kernel", HOPPER, lambda: triton_cast.dequantize(codes, torch.bfloat16))
    assert not FORBIDDEN.search(result.asm["ptx"])


def test_largest_magnitude(compiled):
    result = compiled("amax_kernel", HOPPER, lambda: triton_cast.finite_amax(torch.ones(64, 64)))
    assert "red.global" in result.asm["ptx"] or "atom.global" in result.asm["ptx"]


@BOTH
@pytest.mark.parametrize(("length", "dim"), [(16, 0), (32, 1), (128, 0), slow(16, 1), slow(32, 0), slow(128, 1)])
def test_hadamard_transform(compiled, capability, length, dim):
    """A group of 16 is a thread's own: shared memory is for the largest magnitude of a program alone."""
    x = torch.ones(256, 512, dtype=torch.bfloat16)
    transform = Hadamard("+-" * (length // 2))
    result = compiled("hadamard_kernel", capability, lambda: triton_cast.hadamard(x, transform, dim))
    text, made = result.asm["ptx"], resources(result)
    assert not FORBIDDEN.search(text) and made.spills == 0 and made.warps_an_sm >= (8 if length == 128 else 16)
    assert made.shared <= (64 if length == 16 else 4096)
    if length == 16 and dim == 0:
        assert text.count("ld.global.v2.b32") == text.count("st.global.v2.b32") == length


def fused(text: str) -> float:
    """Fused multiply-adds of an exponential in PTX; nothing else of FORBIDDEN but the exponential's own is in it."""
    exponentials = text.count("ex2.approx.ftz.f32")
    assert exponentials == text.count("fma.rm.f32") == text.count(".ftz") > 0
    assert set(FORBIDDEN.findall(text)) == {"fma.rn.f32", ".ftz"}
    return text.count("fma.rn.f32") / exponentials


def test_swiglu_fuses_what_torch_does(compiled):
    """CUDA's exponential takes three fused operations.  A gradient has one more, in 1 + x (1 - s), as torch's."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    gradients = compiled("swiglu_backward_kernel", HOPPER, lambda: triton_cast.swiglu_backward(x, x, x))
    product = compiled("cast_kernel", HOPPER, LAUNCHES["fp8 input of SwiGLU, two operands"])
    largest = compiled("amax_kernel", HOPPER, lambda: triton_cast.finite_amax(x, up=x))
    assert fused(product.asm["ptx"]) == fused(largest.asm["ptx"]) == 3 and fused(gradients.asm["ptx"]) == 4
    assert set(re.findall(r"ld\.global[.\w:]*", gradients.asm["ptx"])) == {"ld.global.v4.b32"}
    made = resources(gradients)
    assert made.spills == 0 and made.warps_an_sm >= 32


@pytest.mark.parametrize("back", [False, True])
def test_rotary_positions(compiled, back):
    x = torch.ones(1, 64, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    table = torch.ones(64, 128, dtype=torch.bfloat16)
    result = compile_ahead(
        "rotate_kernel", HOPPER, lambda: rotary.launch(x, table, table, back=back), module=rotary_kernel
    )
    made = resources(result)
    assert not FORBIDDEN.search(result.asm["ptx"]) and "ld.global.v4.b32" in result.asm["ptx"]
    assert made.spills == 0 and made.warps_an_sm >= 16


@pytest.mark.parametrize("kernel", ["softmax_kernel", "gradient_kernel"])
@BOTH
def test_cross_entropy(compiled, kernel, capability):
    logits, labels = torch.empty(64, 128256, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    found = torch.ones(3, 64)
    scale = None if kernel == "softmax_kernel" else torch.ones(64)
    made = compile_ahead(kernel, capability, lambda: loss.launch(logits, labels, 0, found, scale), module=loss_kernel)
    assert "ld.global.v4.b32" in made.asm["ptx"], "logits are read by 16 bytes"
    needed = resources(made)
    assert needed.spills == 0 and needed.warps_an_sm >= 32


@BOTH
@pytest.mark.parametrize(("fmt", "dim"), [("fp8", 0), ("fp4", 0), slow("fp4", 1), ("nvfp4", 1)])
def test_codes_that_ranks_gather_are_read_and_written_by_8_bytes_or_more(compiled, fmt, dim, capability):
    codes = Form(get_format(fmt), "weight", 1, output="codes")
    made = allocate(torch.empty(512, 1024), codes, count=False)
    sent = codes_module.Sent(*codes_module.to_send(made), made.tensor_scale)
    wanted = Form(codes.fmt, "weight", dim, output="codes" if fmt == "nvfp4" else "operand")
    calls = {"lay_out_kernel": lambda: triton_codes.lay_out(sent, wanted)}
    if fmt != "fp8":
        calls["send_kernel"] = lambda: triton_codes.to_send(made)
    for name, call in calls.items():
        result = compile_ahead(name, capability, call, module=triton_code_kernels)
        needed, text = resources(result), result.asm["ptx"]
        assert re.search(r"ld\.global\.v[24]\.b32", text), "bytes; a table of codes is read one by one"
        assert re.search(r"st\.global\.v[24]\.b32", text) and "st.global.b8" not in text
        assert needed.spills == 0 and needed.warps_an_sm >= 16


@pytest.mark.slow
@pytest.mark.parametrize("case", core.cases()[::4], ids=lambda case: case.name)
def test_what_a_gpu_compares_first_compiles(compiled, case):
    """Every fourth of the casts of tests/gpu/core.py, of tensors as they have there."""
    x = torch.empty(core.SHAPES[False][case.ragged], dtype=case.dtype)
    up = torch.empty_like(x) if case.product else None
    call = partial(triton_cast.run, x, held(case.forms, case.outputs), torch.ones(()), up=up)
    text = compiled("cast_kernel", HOPPER, call).asm["ptx"]
    assert set(FORBIDDEN.findall(text)) <= ({"fma.rn.f32", ".ftz"} if case.product else set())


FIRST = (
    "fp8 input of SwiGLU, two operands",
    "fp8 input, two operands",
    "fp8 weight from float32, two operands",
    "fp4 grad_output, stochastic, two operands",
)
#: What does not hold yet, by Triton 3.9; only a Blackwell GPU can say whether another tiling is faster.
KNOWN = {
    "nvfp4_4over6 weight, two swizzled": "138 registers leave 8 warps; a tiling with 16 issues half as much again",
    "nvfp4_4over6 grad_output, stochastic, two swizzled": "10 instructions spill at 128 registers",
}
EVERY = [
    pytest.param(
        name,
        capability,
        marks=[
            *([] if name in FIRST and capability == HOPPER else [pytest.mark.slow]),
            *([pytest.mark.xfail(reason=KNOWN[name], strict=True)] if name in KNOWN else []),
        ],
    )
    for name, launch in LAUNCHES.items()
    for capability in devices(launch)
]


@pytest.mark.parametrize(("name", "capability"), EVERY)
def test_registers_leave_room_for_warps(compiled, name, capability):
    """As launched, every entry of TILINGS; benchmarks/kernel_resources.py --sweep has the other tilings.

    That of blocks of 128 was chosen by its time on a GPU, where eight warps were faster than sixteen.
    """
    launch = LAUNCHES[name]
    made = resources(compiled("cast_kernel", capability, launch))
    measured = launch.tiling == triton_launches.TILINGS[128]
    assert made.spills == 0 and made.warps_an_sm >= (8 if measured else 16) and (measured or made.registers <= 128)


#: Bytes that a thread must load an element, and instructions that it may issue.
WORK = {
    ("fp8 input, two operands", HOPPER): (4, 21),  # of which it reads each twice
    ("fp4 grad_output, stochastic, two operands", HOPPER): (4, 45),
    ("nvfp4_plain input, two swizzled", BLACKWELL): (2, 32),
}


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 issues up to a tenth more instructions",
)
@pytest.mark.parametrize(("name", "capability"), WORK)
def test_instructions_and_bytes_of_an_element(compiled, name, capability):
    """What a thread issues on its way; what it loads shows that the way is the right one."""
    launch, (loaded, issued) = LAUNCHES[name], WORK[name, capability]
    done = work(compiled("cast_kernel", capability, launch), launch, launch.tiling)
    assert loaded <= done.loaded < 1.4 * loaded and issued / 1.2 < done.issued <= issued


@pytest.mark.slow
@pytest.mark.parametrize("tiling", SWEEP, ids=str)
@pytest.mark.parametrize("name", [name for name in LAUNCHES if "stochastic" not in name])
def test_no_tiling_spills(compiled, name, tiling):
    """Those with random bits are held to 128 registers, and are held to no spills above, as launched."""
    assert resources(compile_tiled(HOPPER, LAUNCHES[name], tiling)).spills == 0


def test_both_forms_of_a_gradient_take_one_draw(compiled):
    """A draw is seven rounds of two products, for 8 elements; some are the same for all of a thread's 16."""

    def products(*keys: RoundingKey) -> int:
        forms = [form("fp4", "grad_output", dim, key) for dim, key in zip((1, 0), keys, strict=True)]
        return len(re.findall(r"mul\.wide\.u32", ptx(compiled, forms, "operand")))

    assert 14 < products(KEY, KEY) <= 28 and products(KEY, RoundingKey(5, 2, 3)) > 1.8 * products(KEY, KEY)


def test_each_entry_of_the_table_is_a_launch_here():
    sides = {max(max(form.block) for form in launch.forms) for launch in LAUNCHES.values()}
    assert sides == set(triton_launches.TILINGS)
    launched = {launch.tiling for launch in LAUNCHES.values()}
    others = {getattr(triton_launches, name) for name in ("SWIZZLED", "STOCHASTIC", "PRODUCT", "FOUR_OVER_SIX")}
    assert launched == {*triton_launches.TILINGS.values(), *others}


@triton.jit
def fused_kernel(x, out):
    at = tl.arange(0, 128)
    value = tl.load(x + at)
    tl.store(out + at, value * 3.0 + 1.0 / value)


def test_a_fused_multiply_add_would_be_seen(compiled, monkeypatch):
    """The assertion on the code is alive: this is what the compiler makes of plain ``*``, ``+`` and ``/``."""
    monkeypatch.setattr(triton_kernels, "fused_kernel", fused_kernel, raising=False)
    x = torch.ones(128)
    result = compiled("fused_kernel", HOPPER, lambda: triton_kernels.fused_kernel[(1,)](x, x, enable_fp_fusion=True))
    assert set(FORBIDDEN.findall(result.asm["ptx"])) == {"fma.rn.f32", "div.full"}
