"""Runs the Triton kernels in Triton's interpreter, on CPU, against the specification: bit for bit, on small tensors.

``python -m tests.unit.quant.kernels.interpreted`` with TRITON_INTERPRET=1, which triton reads when it is imported;
test_triton_cast.py starts it in a process of its own.  Prints what differs and exits 1 if anything does.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_snip.formats import ROW, Element, Format, Hadamard, format_names, get_format
from megatron_snip.model import rotary
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import (
    OPERANDS,
    Form,
    Operand,
    Output,
    Quantized,
    allocate,
    finite_amax,
    reference,
    swiglu_product,
)
from megatron_snip.quant.casts.codes import Sent, in_pairs, lay_out, to_send
from megatron_snip.quant.casts.hadamard import hadamard
from megatron_snip.quant.casts.rounding import Rows
from megatron_snip.quant.casts.scales import tensor_scale
from megatron_snip.quant.kernels import triton_cast, triton_codes
from megatron_snip.quant.kernels.triton_launches import FP8_AND_FP4
from tests.unit.quant.kernels.instructions import as_instructions_round
from tests.unit.quant.kernels.operands import bits, draw_ties, held, operands, scale_ties

KEY = RoundingKey(seed=-5, iteration=2**32 - 1, stream=3, row0=2**32 - 3, col0=2**33 + 8)
OUTPUTS: tuple[Output, ...] = ("values", "codes", "operand")
SIDES = (("input", 1), ("input", 0), ("weight", 1), ("weight", 0))


class Case(NamedTuple):
    """One call of the cast.  fp8: whether the device converts to FP8 and to pairs of E2M1.  The rest as
    triton_cast.run has it.
    """

    x: torch.Tensor
    forms: list[Form]
    outputs: list[Output]
    fp8: bool
    dtype: torch.dtype | None = None
    count: bool = True
    up: torch.Tensor | None = None


def differences(made: Sequence[Operand], expected: Sequence[Operand]) -> Iterator[str]:
    """Which parts of which forms are not the same bits, operands in the same layout."""
    for number, (one, other) in enumerate(zip(made, expected, strict=True)):
        assert one.form is not None
        output = one.form.output
        if one.form != other.form:
            yield f"form {number}: {one.form} against {other.form}"
        for part in Operand._fields[1:]:
            ours, theirs = getattr(one, part), getattr(other, part)
            if ours is None or theirs is None:
                if ours is not theirs:
                    yield f"form {number}: {part} is there in one only"
            elif ours.dtype != theirs.dtype or ours.shape != theirs.shape or not torch.equal(bits(ours), bits(theirs)):
                yield f"form {number}: {part}"
            elif output not in OPERANDS and not ours.is_contiguous():
                yield f"form {number}: {part} is not stored by rows"
            elif output in OPERANDS and ours.ndim == 2 and min(ours.shape) > 1 and ours.stride() != theirs.stride():
                yield f"form {number}: layout of {part}, {ours.stride()} against {theirs.stride()}"


def plain(fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Form:
    """A form of a format's name; kernels cast x itself, also where the format would transform it first."""
    return Form(get_format(fmt), role, dim, key)


def every_format() -> Iterator[Case]:
    """Every format and side, every other one rounded stochastically too, which takes most of the time.

    Outputs, dtypes and kinds of operands take turns.
    """
    turn = itertools.count()
    names = [name for name in format_names() if get_format(name).quantised] + ["e3m4", "e6m1"]
    for (number, name), (role, dim) in itertools.product(enumerate(names), SIDES):
        if not triton_cast.natural(plain(name, role, dim).part):
            continue  # cast.py's
        stochastic = number % 2 == (role == "input") ^ dim
        forms = [plain(name, role, dim, key) for key in ((None, KEY) if stochastic else (None,))]
        outputs = [output for output in OUTPUTS if output != "operand" or forms[0].element.carrier is not None]
        n = next(turn)
        shape = (131, 40) if forms[0].block[0] > 32 else (35, 136)
        x = operands(shape, (torch.bfloat16, torch.float32)[n // 2 % 2])[n % 5]
        yield Case(x, forms, [outputs[(n + i) % len(outputs)] for i in range(len(forms))], fp8=n % 2 == 0)


def pairs() -> Iterator[Case]:
    """Two directions from one read, whole tiles, special values in all, and positions of every kind."""
    ends = RoundingKey(0, 0, 0, 2**63 - 200, 2**34 - 128)
    shifted = [RoundingKey(7, 3, 2**63, 2**40, 8 * 5 + phase) for phase in (1, 4, 7)]
    for number, (one, other, keys) in enumerate(
        [
            ("fp8", "fp8", (None, None)),
            ("fp4", "fp4", (shifted[0], shifted[0])),
            ("mxfp8", "fp8_e5m2", (shifted[1], shifted[1])),
            ("nvfp4_plain", "mxfp4", (shifted[2], shifted[2])),
            ("fp4_pow2", "nvfp4_plain", (ends, ends)),
            ("fp4", "fp4", (ends, KEY)),
        ]
    ):
        forms = [plain(one, "grad_output", 1, keys[0]), plain(other, "grad_output", 0, keys[1])]
        for output in (*OUTPUTS[:2], "swizzled" if one == "nvfp4_plain" else "operand"):
            x = operands((128, 128), torch.bfloat16)[1]
            yield Case(x, forms, [output, output], fp8=number % 2 == 0)


def weights() -> Iterator[Case]:
    """Operands of both dims, alike and not, rounded to bfloat16 on the way, with scales to pad on either side."""
    tiny = Format("tiny", get_format("fp4").element, tile=4, weight_block=2, scale="e8m0")
    for number, (one, other, shape) in enumerate(
        [("fp8", "fp8", (256, 130)), ("fp4", "fp4", (131, 256)), ("fp4_pow2", "fp8", (128, 128)), ("", "", (35, 18))]
    ):
        forms = [Form(get_format(name) if name else tiny, "weight", 1 - dim) for dim, name in enumerate((one, other))]
        x = operands(shape, torch.float32)[1]
        for dtype in (None, torch.bfloat16):
            yield Case(x, forms, ["operand", "operand"], number % 2 == 0, dtype, dtype is None)
        yield Case(x, forms[::-1], ["operand", "operand"], True)
    x = operands((40, 130), torch.float32)[1]
    x[0, 0] = torch.finfo(torch.float32).max  # infinite in bfloat16
    yield Case(x, [plain("mxfp8", "weight", 1), plain("fp8", "weight", 1)], ["values", "codes"], True, torch.bfloat16)


def of_two_pieces() -> Iterator[Case]:
    """Rows that stand elsewhere in the whole, as context parallelism has them; across a step of the row's high word."""
    for name, piece, sequences in (("fp4", 128, 1), ("mxfp4", 32, 2)):
        rows = Rows(piece, 4 * piece, piece, 2 * piece)
        key = RoundingKey(7, 3, 9, 2**32 - 3 * piece, 3, rows=rows)
        forms = [plain(name, "grad_output", dim, key) for dim in (1, 0)]
        yield Case(operands((2 * piece * sequences, 40), torch.bfloat16)[0], forms, ["codes", "operand"], fp8=True)


def of_rows() -> Iterator[Case]:
    """Scales of whole rows: both dims at once, special values, products, ragged tiles, every bf16 pattern."""
    key = RoundingKey(7, 3, 9, 5, 3)
    for number, (shape, dtype, keys) in enumerate(
        [
            ((131, 300), torch.bfloat16, (None, None)),
            ((128, 256), torch.float32, (key, None)),
            ((3, 5), None, (key, key)),
        ]
    ):
        forms = [plain("fp8_rowwise", "input", dim, keys[1 - dim]) for dim in (1, 0)]
        for outputs in (["operand", "operand"], ["values", "codes"], ["codes", "values"]):
            x = operands(shape, dtype or torch.float32)[1]
            yield Case(x, forms, outputs, number % 2 == 0, torch.bfloat16 if dtype is None else None)
    gate, up = (operands((35, 136), torch.bfloat16)[1] for _ in range(2))
    yield Case(gate, [*forms[:1], plain("fp8", "input", 0)], ["codes", "operand"], True, up=up.flip(0))
    wide = Format("rows", get_format("fp4").element, tile=ROW, weight_block=None)
    mixed = [Form(wide, "weight", 0), plain("fp8", "weight", 1), Form(wide, "weight", 1), plain("mxfp8", "weight", 0)]
    yield Case(operands((130, 140), torch.bfloat16)[4], mixed, ["codes"] * 4, True)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    yield Case(every, [plain("fp8_rowwise", "input", dim) for dim in (1, 0)], ["codes", "operand"], True)


def swizzled() -> Iterator[Case]:
    """What Blackwell reads: two forms and one, twins, blocks wider than its own, edges of tiles and of bytes."""
    both: list[Output] = ["swizzled", "swizzled"]
    for name, role, shape in (
        ("mxfp8", "input", (35, 75)),
        ("nvfp4_plain", "input", (35, 75)),
        ("fp8_pow2", "input", (131, 40)),
        ("nvfp4_plain", "grad_output", (131, 64)),
        ("nvfp4", "weight", (35, 70)),
        ("nvfp4_4over6", "input", (35, 75)),
        ("nvfp4_4over6", "weight", (35, 70)),
        ("nvfp4_4over6", "grad_output", (33, 64)),
        ("fp4_pow2", "weight", (70, 131)),
    ):
        forms = [plain(name, role, dim, KEY if role == "grad_output" else None) for dim in (1, 0)]
        yield Case(operands(shape, torch.bfloat16)[1], forms, both, fp8=name != "mxfp8", count=role == "input")
    x = operands((40, 160), torch.float32)[1]
    forms = [plain("nvfp4_plain", "weight", 1), plain("fp4", "weight", 0)]
    yield Case(x, forms, ["swizzled", "operand"], True, torch.bfloat16)
    yield Case(x, [plain("fp8", "weight", 1), plain("mxfp6_e2m3", "weight", 0)], ["values", "swizzled"], True)


def products() -> Iterator[Case]:
    """SwiGLU's product as it is cast: whole and ragged tiles, special values, rows of any strides, both roundings."""
    for name, shape, key in (("fp8", (256, 128), None), ("fp4", (131, 104), KEY), ("mxfp8", (35, 136), None)):
        gate, up = (operands(shape, torch.bfloat16)[1] for _ in range(2))
        forms = [plain(name, "input", dim, key) for dim in (1, 0)]
        yield Case(gate, forms, ["operand", "operand"], fp8=True, count=False, up=up.flip(0))
    gate, up = (operands((35, 136), torch.bfloat16)[1] for _ in range(2))
    yield Case(
        gate, [plain("nvfp4_plain", "input", dim) for dim in (1, 0)], ["swizzled", "codes"], fp8=True, up=up.flip(0)
    )
    wide = operands((70, 300), torch.bfloat16)[1]
    rows = Rows(32, 128, 32, 64)
    forms = [plain("mxfp4", "input", 1, RoundingKey(7, 3, 9, 5, 3, rows=rows)), plain("mxfp4", "weight", 0)]
    yield Case(wide[:, 5:105], forms, ["codes", "values"], fp8=False, up=wide[:, 100:200])
    yield Case(wide[:, 5:105], forms[:1], ["values"], fp8=False, up=wide.T.contiguous()[100:200, :70].T)


def odd_ones() -> Iterator[Case]:
    """Layouts and mixtures that a launch has to see through."""
    wide = operands((40, 300), torch.float32)[1]
    forms = [plain("fp8", "input", 1), plain("fp4", "input", 0)]
    for x in (wide.T, wide[:, 5:300], wide[::2, ::3], wide[:1].expand(33, -1), wide[:1, :1], wide[:, :1]):
        yield Case(x, forms, ["codes", "operand"], fp8=True)
    for unit in (1.0, 1.2345, 1.7, 0.0123, 987.6, 3.3e-5):
        x = scale_ties(float(torch.tensor(unit).bfloat16()))
        yield Case(x, [plain("nvfp4_plain", "input", 1), plain("nvfp4_4over6", "input", 1)], ["codes"] * 2, fp8=True)
    for above in (False, True):
        yield Case(draw_ties(KEY, above=above), [plain("fp4", "input", 1, KEY)], ["values"], fp8=True)
    huge = Format("huge", Element(2, 5, "ieee"), scale="fp32_pow2")  # 3.94 / 3.4e38 is a subnormal number
    yield Case(torch.full((3, 40), torch.finfo(torch.float32).max), [Form(huge, "input", 1)], ["codes"], fp8=True)
    half = Format("half", get_format("fp8").element, tile=64, weight_block=64)
    tall = [Form(half, "input", 0), plain("fp8", "weight", 1), plain("mxfp8", "input", 0), Form(half, "weight", 0)]
    yield Case(operands((130, 20), torch.bfloat16)[1], tall, ["codes"] * 4, fp8=True)
    subnormal = Format("subnormal", get_format("e2m5").element, tile=32, weight_block=32, scale="fp32_pow2")
    # 3.94 / 3.4e38 is no normal number
    steep = torch.tensor([[3.4e38, 2.2e38, -1e38, 0.0], [2.2e38, 1.0, 1e30, -1e36]])
    for role in ("input", "weight"):
        yield Case(steep, [Form(subnormal, role, 1), Form(subnormal, role, 1)], ["codes", "values"], fp8=False)
    tiny = Format("tiny", get_format("fp4").element, tile=4, weight_block=2, scale="e8m0")
    small = [Form(tiny, "input", 1), Form(tiny, "weight", 0)]
    yield Case(operands((9, 20), torch.float32)[4], small, ["values", "codes"], fp8=False)


def filled(*args: Any, **kwargs: Any) -> Operand:
    """Room for a cast, full of what no cast leaves there."""
    made = allocate(*args, **kwargs)
    for part in made[1:]:
        if part is not None:
            part.fill_(float("nan") if part.is_floating_point() else 77)
    return made


def cast_differences(case: Case) -> list[str]:
    """How the kernel differs from the specification."""
    x = case.x if case.dtype is None else case.x.to(case.dtype)
    x = x if case.up is None else swiglu_product(x, case.up)
    amax, wanted = finite_amax(x), held(case.forms, case.outputs)
    with (
        mock.patch.object(triton_cast, "_converts", lambda device: FP8_AND_FP4 if case.fp8 else ()),
        mock.patch.object(triton_cast, "allocate", filled),
    ):
        made = triton_cast.run(case.x, wanted, amax, case.dtype, case.count, case.up)
    found = differences(made, reference(x, wanted, amax, count=case.count))
    forms = [f"{form.fmt.name} {form.role} {form.dim}" for form in case.forms]
    return [f"{forms} {case.outputs} {case.x.dtype} {list(case.x.shape)} fp8 {case.fp8}: {what}" for what in found]


def dequantised() -> Iterator[str]:
    """Where dequantisation differs: every byte as a code, in codes by rows and by columns."""
    names = ("fp8", "fp4", "fp8_e5m2", "mxfp6_e3m2", "nvfp4_plain", "e6m1", "fp8_rowwise")
    for name, dim in [*((name, 0) for name in names), ("fp8_rowwise", 1)]:
        form = plain(name, "input", dim)
        x = operands((256, 6), torch.float32)[4]
        made = reference(x, [form.held("codes")], finite_amax(x))[0]
        codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 6)
        whole = tensor_scale(finite_amax(x), form.fmt) if form.fmt.needs_tensor_amax else None
        assert made.scales is not None
        for dtype, layout in itertools.product((torch.bfloat16, torch.float32), (codes, codes.T.contiguous().T)):
            quantized = Quantized(layout, made.scales, form.fmt, form.block, whole)
            ours, expected = triton_cast.dequantize(quantized, dtype), quantized.dequantize(dtype)
            if ours.dtype != dtype or not torch.equal(bits(ours), bits(expected)):
                yield f"dequantize {name} {dtype} {layout.stride()}"


def of_products() -> Iterator[str]:
    """Where silu of any bf16 number differs from torch's, or SwiGLU's gradients from autograd's."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    normal = operands((130, 96), torch.bfloat16)
    for grad, gate, up in ((every.flip(0), every, torch.ones_like(every)), (normal[0] * 3, normal[1], normal[4])):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        expected = torch.autograd.grad(torch.nn.functional.silu(leaves[0]) * leaves[1], leaves, grad)
        for name, ours, theirs in zip(
            ("gate", "up"), triton_cast.swiglu_backward(grad, gate, up), expected, strict=True
        ):
            if not torch.equal(bits(ours), bits(theirs)):
                yield f"gradient of {name} {list(gate.shape)}"


def rotated() -> Iterator[str]:
    """Where rotary positions differ from torch's: odd numbers of heads and tokens, parts of them, tables a sample."""
    for heads, channels, of_samples, part in ((5, 12, False, slice(None)), (3, 64, True, slice(10, 29))):
        x = operands((2 * 40 * heads, channels), torch.bfloat16)[1].view(2, 40, heads, channels).transpose(1, 2)
        x[..., ::2] *= 0.0  # of both signs
        angles = torch.randn((2, 1, 40, channels) if of_samples else (40, channels))
        cos, sin = angles.cos().bfloat16()[..., part, :], angles.sin().bfloat16()[..., part, :]
        for back, plain_ in ((False, rotary._rotate), (True, rotary._rotate_back)):
            made, expected = rotary.launch(x[:, :, part], cos, sin, back=back), plain_(x[:, :, part], cos, sin)
            if not torch.equal(bits(made), bits(expected)):
                yield f"rotate {heads} heads of {channels}, back {back}"
    with tempfile.NamedTemporaryFile() as file:  # heads beyond 32-bit offsets; nearly nothing of the file is touched
        flat = torch.from_file(file.name, shared=True, size=2 * 2**30 + 64, dtype=torch.bfloat16)
        x = flat.as_strided((1, 3, 4, 8), (0, 2**30, 8, 1)).copy_(torch.randn(1, 3, 4, 8))
        cos, sin = (table[0, 0, :4, :8] for table in (cos, sin))
        if not torch.equal(rotary.launch(x, cos, sin, back=False), rotary._rotate(x, cos, sin)):
            yield "rotate heads that lie far apart"


def transformed() -> Iterator[str]:
    """Where the Hadamard transform differs, or its largest magnitude: whole and ragged tiles, rows that stand apart.

    Every length and dim; one operand has every bf16 pattern.
    """
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for length, dim, dtype in itertools.product((16, 32, 128), (0, 1), (torch.bfloat16, torch.float32)):
        transform = Hadamard(("+-" * 7 + "--") * (length // 16))
        sizes = [(4 * length, 128), (3 * length, 133), (length, 8)]
        xs = [operands(shape if dim == 0 else shape[::-1], dtype)[n] for n, shape in enumerate(sizes)]
        apart = (
            operands((2 * length, 2 * length), dtype)[0][length:]
            if dim
            else operands((length, 160), dtype)[0][:, 7:140]
        )
        for x in (*xs, apart, *([every] if dtype == torch.bfloat16 else [])):
            made, expected = triton_cast.hadamard(x, transform, dim), hadamard(x, transform, dim)
            broken = expected.isnan()
            same = torch.equal(bits(made[0])[~broken], bits(expected)[~broken]) and torch.equal(made[0].isnan(), broken)
            if not same or not torch.equal(made[1], finite_amax(expected)):
                yield f"hadamard {length} along {dim} {dtype} {list(x.shape)}"


def largest() -> Iterator[str]:
    """Where the largest magnitude differs."""
    for x in (*operands((130, 259), torch.bfloat16), torch.full((3, 5), -float("inf")), -torch.ones(4, 4).T):
        if not torch.equal(triton_cast.finite_amax(x), finite_amax(x)):
            yield f"finite_amax {x.dtype} {list(x.shape)}"
    for x in (operands((35, 40), torch.float32)[0], torch.tensor([[torch.finfo(torch.float32).max, 1.001]])):
        if not torch.equal(triton_cast.finite_amax(x, torch.bfloat16), finite_amax(x.bfloat16())):
            yield f"finite_amax of float32 {list(x.shape)} in bfloat16"
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    pairs = operands((130, 259), torch.bfloat16)
    for gate, up in (
        (every, every.flip(0)),
        (pairs[0], pairs[1]),
        (every[:3], every[5:8] * 0),
        (-every[60:64], every[:4]),
    ):
        if not torch.equal(triton_cast.finite_amax(gate, up=up), finite_amax(swiglu_product(gate, up))):
            yield f"finite_amax of SwiGLU's product {list(gate.shape)}"


def travelling() -> Iterator[str]:
    """Where codes differ on their way between ranks, or what is laid out of them: NaN, ragged tiles, both dims."""
    for name, shape in (("fp4", (200, 170)), ("nvfp4", (48, 144)), ("mxfp4", (64, 160)), ("fp8", (131, 258)),
                        ("e3m2", (20, 130)), ("fp8_e5m2", (256, 40))):  # fmt: skip
        for dim in (1, 0):
            x = operands(shape, torch.bfloat16)[1]
            codes = reference(x, [plain(name, "weight", dim).held("codes")], finite_amax(x))[0]
            assert codes.form is not None and codes.scales is not None
            sent = Sent(*to_send(codes), codes.tensor_scale)
            if in_pairs(codes.form):
                for ours, theirs in zip(triton_codes.to_send(codes), sent, strict=False):
                    if not torch.equal(bits(ours), bits(theirs)):
                        yield f"to_send {name} {dim}"
            for output in ("codes", "operand"):
                form = codes.form.held(output)
                with mock.patch.object(triton_codes, "allocate", filled):
                    made = triton_codes.lay_out(sent, form)
                yield from (
                    f"lay_out {name} {dim} {output}: {what}" for what in differences([made], [lay_out(sent, form)])
                )


def main() -> int:
    """Compare everything; 0 if nothing differs."""
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of divisions by zero and of overflow
    count, problems = 0, []
    with as_instructions_round():
        for case in itertools.chain(
            every_format(), pairs(), weights(), of_two_pieces(), swizzled(), products(), of_rows(), odd_ones()
        ):
            count += 1
            problems += cast_differences(case)
        problems += [*dequantised(), *of_products(), *rotated(), *transformed(), *largest(), *travelling()]
    print("\n".join([*problems, f"{count} casts, {len(problems)} differences"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
