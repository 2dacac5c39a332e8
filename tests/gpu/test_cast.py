"""The Triton kernels on a GPU against the specification on the same GPU and against the casts on CPU, bit for bit.

    python -m pytest tests/gpu

on a machine with an NVIDIA GPU (compute capability 8.0 or later), torch for CUDA and triton; elsewhere all is skipped.
The first run compiles some hundred kernels, about a second each; triton keeps them in ~/.triton.
An H200 has run core.py and a tenth of these tests: where one goes red, the kernel is wrong, or the compiler is.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_snip.formats import Format, format_names, get_format
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Operand, Quantized, finite_amax, reference
from megatron_snip.quant.casts.scales import tensor_scale
from megatron_snip.quant.kernels import dispatch, triton_cast
from tests.unit.quant.kernels.operands import bits, draw_ties, held, operands, scale_ties

pytestmark = pytest.mark.gpu

LARGE, RAGGED = (4096, 4096), (1031, 2571)
FORMATS = [name for name in format_names() if get_format(name).quantised] + ["e3m4", "e6m1", "e2m5"]
SIDES = [("input", 1), ("input", 0), ("weight", 1), ("weight", 0)]
OUTPUTS = ["values", "codes", "operand"]
KEY = RoundingKey(seed=-5, iteration=2**32 - 1, stream=3, row0=2**32 - 3, col0=2**33 + 8)
UNALIGNED = RoundingKey(seed=7, iteration=3, stream=2**63, row0=2**40, col0=6)


def plain(fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Form:
    return Form(get_format(fmt), role, dim, key)


def outputs_of(form: Form) -> list[str]:
    return OUTPUTS if form.element.carrier is not None else OUTPUTS[:2]


def same(one: Operand, other: Operand) -> bool:
    pairs = zip(one[1:], other[1:], strict=True)
    return all((a is None and b is None) or torch.equal(bits(a), bits(b).to(a.device)) for a, b in pairs)


def check(x: torch.Tensor, forms: list[Form], outputs: list[str], copy: torch.Tensor | None = None) -> None:
    """The kernel on x against the specification, on x's device or where ``copy``, a copy of x, is."""
    forms = held(forms, outputs)
    assert triton_cast.takes(x, forms), "the kernels should take this"
    amax = finite_amax(x)
    made = triton_cast.run(x, forms, amax)
    copy = x if copy is None else copy
    for form, ours in zip(forms, made, strict=True):
        expected = reference(copy, [form], amax.to(copy.device))[0]
        assert same(ours, expected), form
        if form.output == "operand":
            assert ours.data.stride() == expected.data.stride() and ours.scales.stride() == expected.scales.stride()


@pytest.mark.parametrize("key", [None, KEY, UNALIGNED], ids=["nearest", "stochastic", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_large_tensors(fmt, dtype, key):
    x = operands(LARGE, dtype, "cuda")[0]
    for role, dim in SIDES:
        form = plain(fmt, role, dim, key)
        for output in outputs_of(form):
            check(x, [form], [output])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_special_values_and_ragged_edges_as_on_the_cpu(fmt, dtype):
    for x, (role, dim) in zip(operands(RAGGED, dtype, "cuda"), itertools.cycle(SIDES)):
        form = plain(fmt, role, dim, UNALIGNED)
        for chosen in (form, plain(fmt, role, dim)):
            outputs = outputs_of(chosen)
            check(x, [chosen] * len(outputs), outputs, x.cpu())


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("one", "other"), [("fp8", "fp8"), ("fp4", "fp4"), ("mxfp8", "fp4"), ("nvfp4_plain", "mxfp4")])
def test_two_forms_from_one_read(one, other, output, key):
    for shape, which in ((LARGE, 0), (LARGE, 1), (RAGGED, 1)):
        x = operands(shape, torch.bfloat16, "cuda")[which]
        check(x, [plain(one, "grad_output", 1, key), plain(other, "grad_output", 0, key)], [output, output])


@pytest.mark.parametrize("fmt", ["fp8", "fp8_e5m2", "fp4"])
def test_the_conversion_instructions_round_every_tie(fmt):
    """Each grid value and tie, the float32 numbers beside it, and every bf16 number, in blocks that encode by 1."""
    element = get_format(fmt).element
    grid = torch.tensor(element.values())
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    near = [points, *(torch.nextafter(points, torch.tensor(end)) for end in (-float("inf"), float("inf")))]
    all_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([*near, all_bf16])
    values = torch.cat([values, -values])
    values = values[values.abs() <= element.max]
    x = torch.zeros(-(-len(values) // 127), 128)
    x[:, 0] = element.max
    x[:, 1:] = torch.nn.functional.pad(values, (0, x.shape[0] * 127 - len(values))).view(-1, 127)
    check(x.cuda(), [plain(fmt, "input", 1)] * 3, OUTPUTS, x)


def test_draws_that_equal_the_distance():
    for x in (draw_ties(KEY), draw_ties(KEY, above=True)):
        check(x.cuda(), [plain("fp4", "input", 1, KEY)], ["values"], x)


def test_scales_on_ties():
    for unit in torch.rand(50).bfloat16().tolist():
        x = scale_ties(unit)
        check(x.cuda(), [plain("nvfp4_plain", "input", 1)], ["codes"], x)


def test_layouts_and_blocks_of_all_kinds():
    wide = operands((400, 3000), torch.float32, "cuda")[1]
    for x in (wide.T, wide[:, 5:300], wide[::2, ::3], wide[:1].expand(33, -1), wide[:1, :1], wide[:, :1]):
        check(x, [plain("fp8", "input", 1), plain("fp4", "input", 0)], ["codes", "operand"])
    for tile, block in ((2, 4), (8, 1), (64, 64), (128, 32)):
        fmt = Format("test", get_format("fp8").element, tile=tile, weight_block=block)
        forms = [Form(fmt, role, dim) for role, dim in SIDES[:3]]
        check(wide, [*forms, plain("fp8", "input", 0)], ["operand"] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantisation(fmt, dtype):
    for role, dim in SIDES:
        form = plain(fmt, role, dim)
        x = operands(RAGGED, torch.float32, "cuda")[1]
        made = reference(x, [form.held("codes")], finite_amax(x))[0]
        codes = torch.randint(256, RAGGED, device="cuda", dtype=torch.uint8)
        whole = tensor_scale(finite_amax(x), form.fmt) if form.fmt.needs_tensor_amax else None
        for layout in (made.data, codes, codes.T.contiguous().T):
            quantized = Quantized(layout, made.scales, form.fmt, form.block, whole)
            assert triton_cast.takes_codes(quantized)
            assert torch.equal(bits(triton_cast.dequantize(quantized, dtype)), bits(quantized.dequantize(dtype)))


def test_largest_magnitude():
    for shape, dtype in itertools.product((LARGE, RAGGED, (1, 1)), (torch.bfloat16, torch.float32)):
        for x in operands(shape, dtype, "cuda"):
            assert torch.equal(triton_cast.finite_amax(x), finite_amax(x))


def test_the_dispatched_cast_takes_the_kernel_and_never_waits_for_the_device():
    x = operands(LARGE, torch.bfloat16, "cuda")[1]
    forms = held([plain("nvfp4_plain", "grad_output", 1, KEY), plain("fp8", "weight", 0)], ["operand", "operand"])
    dispatch.cast(x, forms, count=True)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = dispatch.cast(x, forms, count=True)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    expected = reference(x, forms, finite_amax(x))
    assert all(same(ours, theirs) for ours, theirs in zip(made, expected, strict=True))


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(operands(RAGGED, torch.bfloat16, "cuda:1")[1], [plain("fp8", "input", 0)], ["operand"])
