"""The compiled CPU kernel gives the specification's bits."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch

from megatron_snip.formats import SCALES, Element, Format, format_names, get_format
from megatron_snip.quant import RoundingKey, fake_quantize
from megatron_snip.quant.casts.cast import Form, Operand, Output, Quantized, finite_amax, reference
from megatron_snip.quant.casts.rounding import Rows
from megatron_snip.quant.kernels import cpu
from tests.unit.quant.kernels.operands import bits, draw_ties, held, operands, scale_ties

built = pytest.mark.skipif(cpu.library() is None, reason="the CPU kernel is not built; pip install -e .")

SHAPES = [(1, 1), (1, 128), (128, 128), (3, 5), (130, 259), (257, 127), (1, 300), (300, 1), (33, 1100), (2, 4200)]
OUTPUTS: tuple[Output, ...] = ("values", "codes", "operand")
ISAS = {"generic": 0, "avx2": 1, "avx512": 2}
E3M2 = Element(3, 2, "finite")


def formats() -> list[Format]:
    """All registered formats, other grids, and blocks that fit no vector, with every kind of scale."""
    known = [get_format(name) for name in (*format_names(), "e3m2", "e2m3", "e3m4", "e6m1", "e2m5")]
    chosen = [fmt for fmt in known if fmt.quantised and not fmt.hadamard]
    for scale in SCALES:
        chosen.append(Format(name=f"odd_{scale}", element=E3M2, tile=24, weight_block=40, scale=scale))
        chosen.append(Format(name=f"wide_{scale}", element=E3M2, tile=48, weight_block=96, scale=scale))
        chosen.append(Format(name=f"least_{scale}", element=Element(2, 1, "fn"), tile=1, weight_block=3, scale=scale))
    return chosen


FORMATS = formats()


def same(got: Operand, want: Operand) -> bool:
    """Whether two casts agree in bits, shapes and layout."""
    for one, other in zip(got[1:], want[1:], strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        layout = [step for step, side in zip(one.stride(), one.shape, strict=True) if side > 1]
        wanted = [step for step, side in zip(other.stride(), other.shape, strict=True) if side > 1]
        if (one.dtype, one.shape, layout) != (other.dtype, other.shape, wanted):
            return False
        if not torch.equal(bits(one), bits(other)):
            return False
    return True


def check(x: torch.Tensor, forms: list[Form], outputs: list[Output], isa: int = cpu.BEST_ISA) -> list[Operand]:
    """Cast by the kernel and compare with the specification; returns the casts."""
    amax, forms = finite_amax(x), held(forms, outputs)
    assert cpu.takes(x, forms)
    got, want = cpu.run(x, forms, amax, isa=isa), reference(x.contiguous(), forms, amax)
    for form, one, other in zip(forms, got, want, strict=True):
        assert one.form == form and same(one, other), form
    return got


def some_form(draw: random.Random, x: torch.Tensor) -> tuple[Form, Output]:
    fmt = draw.choice(FORMATS)
    key = None
    if draw.random() < 0.5:
        rows, cols = draw.choice([0, 7, 2**32 - 3, 2**40]), draw.choice([0, 4, 1, 2, 3, 2**34 - x.shape[1]])
        pieces = draw.choice([None, Rows(3, 40, 3, 20)])
        key = RoundingKey(-5, 2**32 - 1, draw.randrange(2**64), rows, cols, rows=pieces)
    form = Form(fmt, draw.choice(["input", "weight"]), draw.choice([0, 1]), key)
    return form, draw.choice(OUTPUTS if form.element.carrier else OUTPUTS[:2])


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_as_the_specification(shape, dtype, isa):
    if ISAS[isa] > cpu.library().megatron_snip_isa():
        pytest.skip(f"this CPU has no {isa}")
    draw = random.Random(f"{shape}{dtype}")
    for x in operands(shape, dtype):
        for count in (1, 1, 1, 2, 3):
            forms, outputs = zip(*(some_form(draw, x) for _ in range(count)), strict=True)
            made = check(x, forms, outputs, ISAS[isa])
            for form, output, cast in zip(forms, outputs, made, strict=True):
                if output == "codes":
                    check_dequantize(cast, form, dtype, ISAS[isa])


def check_dequantize(cast: Operand, form: Form, dtype: torch.dtype, isa: int) -> None:
    whole = torch.tensor(1.7) if form.fmt.needs_tensor_amax else None
    quantized = Quantized(cast.data, cast.scales, form.fmt, form.block, whole)
    assert torch.equal(bits(cpu.dequantize(quantized, dtype, isa)), bits(quantized.dequantize(dtype)))


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_in_every_block_output_and_rounding(fmt, isa):
    key = RoundingKey(1, 2, 3, 4, 5)
    normal, special, *_ = operands((70, 200), torch.bfloat16)
    for role, dim in (("input", 1), ("input", 0), ("weight", 1)):
        for output in OUTPUTS if fmt.element.carrier else OUTPUTS[:2]:
            check(normal, [Form(fmt, role, dim)], [output], ISAS[isa])
            check(special, [Form(fmt, role, dim, key)], [output], ISAS[isa])


@built
@pytest.mark.parametrize("isa", ISAS)
def test_every_bfloat16_number_and_every_code(isa):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(33, -1)
    scales = torch.logspace(-40, 38, 33 * 2).view(33, 2)
    for fmt in FORMATS:
        for key in (None, RoundingKey(1, 2, 3)):
            check(x, [Form(fmt, "input", 1, key)], ["codes"], ISAS[isa])
        for dtype in (torch.bfloat16, torch.float32):
            form = Form(Format(name="a", element=fmt.element), "input", 1)
            check_dequantize(Operand(form, codes, scales), form, dtype, ISAS[isa])


@built
@pytest.mark.parametrize("isa", ISAS)
def test_ties_of_scales_and_of_draws(isa):
    for unit in (0.001, 1.0, 77.0, 0.3):
        x = scale_ties(torch.tensor(unit).bfloat16().item())
        check(x, [Form(get_format("nvfp4_plain"), "input", 1)], ["codes"], ISAS[isa])
    key = RoundingKey(1, 2, 3)
    for above in (False, True):
        check(draw_ties(key, above=above), [Form(get_format("fp4"), "input", 1, key)], ["codes"], ISAS[isa])


@built
@pytest.mark.parametrize("isa", ISAS)
def test_power_of_two_scales_of_the_largest_numbers(isa):
    """3.94 / 3.4e38 is a subnormal number, of which no power of two is left if only its exponent is kept."""
    x = torch.full((3, 200), torch.finfo(torch.float32).max)
    fmt = Format(name="a", element=Element(2, 5, "ieee"), scale="fp32_pow2")
    check(x, [Form(fmt, "input", 1)], ["codes"], ISAS[isa])


@built
def test_amaxes_that_are_not_the_tensors_own():
    x = torch.randn(40, 200)
    for amax in (0.0, 1e-3, 1e-40, 3e38, 100.0):
        forms = [Form(get_format("nvfp4_plain"), "input", dim, output="codes") for dim in (0, 1)]
        whole = torch.tensor(amax)
        for got, want in zip(cpu.run(x, forms, whole), reference(x, forms, whole), strict=True):
            assert same(got, want)


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stores_that_go_past_the_caches(dtype, isa, monkeypatch):
    """Rows of whole cache lines, and others, which take plain stores."""
    monkeypatch.setattr(cpu, "_STREAM_BYTES", 0)
    forms = [Form(get_format("fp8"), "input", 1), Form(get_format("fp4"), "input", 0, RoundingKey(1, 2, 3))]
    for cols in (4096 + 64, 1024 + 8):
        x = torch.randn(140, cols).to(dtype)
        check(x, forms, ["values"] * 2, ISAS[isa])
        for form, made in zip(forms, check(x, forms, ["codes"] * 2, ISAS[isa]), strict=True):
            check_dequantize(made, form, dtype, ISAS[isa])


@built
def test_a_call_returns_when_all_is_written(monkeypatch):
    """Two shares of one block's height each; the last row, which the second thread writes, is read at once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.randn(2048, 1024)
    form = Form(Format(name="a", element=E3M2, tile=1024), "input", 0, RoundingKey(1, 2, 3))
    room = cpu.room(x, [form])
    want = cpu.run(x, [form])[0].data[-1]
    for _ in range(20):
        room[0].data.fill_(1.0)
        cpu.fill(x, room, None)
        assert torch.equal(room[0].data[-1], want)


@built
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_up_to_the_widest(isa):
    """Blocks that fill a tile, and pairs of blocks that no tile holds."""
    x, key = torch.randn(1100, 2100).bfloat16(), RoundingKey(1, 2, 3)
    wide = [Format(name="a", element=E3M2, tile=size, weight_block=size) for size in (1024, 1000, 513)]
    for fmt in wide:
        for role, dim in (("input", 1), ("input", 0), ("weight", 1)):
            check(x, [Form(fmt, role, dim)], ["codes"], ISAS[isa])
    pairs = [Form(wide[1], "input", 1), Form(get_format("fp8"), "weight", 1), Form(wide[2], "input", 0, key)]
    check(x, pairs, ["codes", "values", "values"], ISAS[isa])


@built
def test_operands_that_are_not_contiguous():
    x = torch.randn(300, 400).bfloat16()
    for view in (x.T, x[:, 5:300], x[::2, ::3], x[:1].expand(130, -1)):
        check(view, [Form(get_format("fp4"), "input", 1, RoundingKey(1, 2, 3))], ["values"])
        check(view, [Form(get_format("mxfp8"), "input", 0)], ["operand"])
        assert torch.equal(cpu.finite_amax(view), finite_amax(view))


@built
def test_the_largest_finite_magnitude():
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            for x in operands(shape, dtype):
                assert torch.equal(cpu.finite_amax(x), finite_amax(x))
        assert cpu.finite_amax(torch.full((3, 3), float("nan"), dtype=dtype)) == 0
        assert cpu.finite_amax(torch.empty(0, 5, dtype=dtype)) == 0


@built
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty_operands(shape):
    x = torch.empty(shape)
    for output in OUTPUTS:
        check(x, [Form(get_format("fp4"), "input", 0)], [output])
    codes = Quantized(x.to(torch.uint8), torch.empty(0, 0), get_format("fp4"), (1, 128))
    assert cpu.dequantize(codes, torch.float32).shape == shape


@built
def test_the_number_of_threads_changes_nothing(monkeypatch):
    x = torch.randn(700, 1000)
    forms = [Form(get_format("fp4"), "input", dim, RoundingKey(1, 2, 3), "codes") for dim in (0, 1)]
    one = cpu.run(x, forms)
    monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", 1)
    for threads in (2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for got, want in zip(cpu.run(x, forms), one, strict=True):
            assert same(got, want)


@built
def test_calls_from_several_threads_and_from_a_forked_child(monkeypatch):
    monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, form = torch.randn(300, 500), Form(get_format("fp8"), "input", 0)
    want = cpu.run(x, [form])[0].data
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(50) if not torch.equal(cpu.run(x, [form])[0].data, want))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    child = os.fork()
    if child == 0:  # the pool's threads exist in the parent only; the child starts its own
        same_values = torch.equal(cpu.run(x, [form])[0].data, want)
        tasks = Path("/proc/self/task")
        os._exit(0 if same_values and (not tasks.exists() or len(list(tasks.iterdir())) > 1) else 1)
    assert os.waitpid(child, 0)[1] == 0


@built
def test_a_caller_that_flushes_subnormal_numbers_changes_nothing():
    x = torch.randn(64, 128) * 1e-39
    form = Form(get_format("fp8"), "input", 1)
    want = cpu.run(x, [form])[0].data
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        got = cpu.run(x, [form])[0].data
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want) and want.any()


@built
def test_what_the_kernel_leaves_to_the_specification():
    x = torch.randn(32, 32)
    assert not cpu.takes(x, [Form(Format(name="a", element=E3M2, tile=4096), "input", 1)])
    assert not cpu.takes(x, [Form(get_format("mxfp8"), "input", 0, output="swizzled")])
    far = RoundingKey(1, 2, 3, col0=2**34 - 8)
    assert not cpu.takes(x, [Form(get_format("fp4"), "input", 1, far)])
    assert not cpu.takes(x.to("meta"), [Form(get_format("fp4"), "input", 1)])


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


def test_kinds_of_scale_stand_in_one_order():
    """A kind's place in SCALES is its number in cpu_kernels.h."""
    header = Path(cpu.__file__).with_name("cpu_kernels.h").read_text()
    (names,) = re.findall(r"enum Scale : int32_t \{(.*?)\}", header)
    assert [name.strip() for name in names.split(",")] == [
        "k" + "".join(part.capitalize() for part in scale.split("_")) for scale in SCALES
    ]
