"""The casts that training launches, on a GPU against the specification: at most 150 kernels, so that minutes do.

    python -m tests.gpu.core --workers 14        # on a GPU; test_core.py runs the same cases under pytest
    TRITON_INTERPRET=1 python -m tests.gpu.core --rehearse   # small tensors on a CPU, in Triton's interpreter

Prints one JSON object: how many cases there were, and what differs.  test_cast.py has all other formats and layouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from megatron_snip.formats import Hadamard, get_format
from megatron_snip.model import rotary
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Operand, Output, as_read, finite_amax, reference, swiglu_product
from megatron_snip.quant.casts.hadamard import hadamard
from megatron_snip.quant.kernels import triton_cast
from tests.unit.quant.kernels.operands import bits, held, operands

FORMATS = ("fp8", "fp4", "mxfp8", "mxfp4", "nvfp4_plain")
#: Of which Blackwell reads swizzled operands.
SWIZZLED = ("mxfp8", "mxfp4", "nvfp4_plain", "fp8_pow2", "nvfp4")
SIDES = (("input", 1), ("input", 0), ("weight", 1), ("weight", 0))
KEY = RoundingKey(seed=-5, iteration=2**32 - 1, stream=3, row0=2**32 - 3, col0=2**33 + 8)
#: Of a GPU and of a rehearsal: whole tiles, and edges that no tile and no block divides.
SHAPES = {False: ((2048, 4096), (1031, 2571)), True: ((128, 256), (131, 75))}


class Case(NamedTuple):
    """Forms of one read; ragged: of a tensor with edges, NaN, infinities and subnormal numbers.

    product: of SwiGLU's product of two such tensors.  rounded: float32 is rounded to bfloat16 as it is read.
    """

    forms: tuple[Form, ...]
    outputs: tuple[Output, ...]
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = True
    product: bool = False
    rounded: bool = False

    @property
    def name(self) -> str:
        """What a report calls it."""
        each = " and ".join(
            f"{form.fmt.name} {form.role} {form.dim} {output}{' stochastic' if form.key else ''}"
            for form, output in zip(self.forms, self.outputs, strict=True)
        )
        marks = "".join(
            f", {word}"
            for word, holds in (("ragged", self.ragged), ("of SwiGLU", self.product), ("rounded", self.rounded))
            if holds
        )
        return f"{each}, {str(self.dtype).removeprefix('torch.')}{marks}"


def _form(fmt: str, role: str, dim: int, key: RoundingKey | None = None) -> Form:
    return Form(get_format(fmt), role, dim, key)


def _outputs(form: Form) -> tuple[Output, ...]:
    return ("values", "codes", "operand") if form.element.carrier is not None else ("values", "codes")


def cases() -> list[Case]:
    """Every case, in an order that does not change."""
    return list(_each())


def _each() -> Iterator[Case]:
    for fmt, (role, dim) in itertools.product(FORMATS, SIDES):
        form = _form(fmt, role, dim)
        for output in _outputs(form):
            yield Case((form,), (output,))
    for fmt, dim in itertools.product(FORMATS, (0, 1)):
        form = _form(fmt, "grad_output", dim, KEY)
        for output in _outputs(form)[1:]:
            yield Case((form,), (output,))
        yield Case((_form(fmt, "input", dim),), ("codes",), ragged=False)
    for fmt, other, key in itertools.product(FORMATS[:2], FORMATS[:2], (None, KEY)):
        pair = (_form(fmt, "grad_output", 1, key), _form(other, "grad_output", 0, key))
        yield Case(pair, ("operand", "operand"), ragged=False)
    for fmt in FORMATS:
        pair = (_form(fmt, "input", 1), _form(fmt, "input", 0))
        yield Case(pair, ("codes", "codes"))
        yield Case((_form(fmt, "weight", 1),), ("codes",), torch.float32)
    for fmt, ragged in itertools.product(FORMATS[:2], (False, True)):
        pair = (_form(fmt, "input", 1), _form(fmt, "input", 0))
        yield Case(pair, ("operand", "operand"), ragged=ragged, product=True)
    for fmt, rounded, ragged in itertools.product(FORMATS[:2], (False, True), (False, True)):
        pair = (_form(fmt, "weight", 1), _form(fmt, "weight", 0))  # one cast, stored twice
        dtype = torch.float32 if rounded else torch.bfloat16
        yield Case(pair, ("operand", "operand"), dtype, ragged, rounded=rounded)
    for fmt in ("mxfp8", "nvfp4_plain"):
        yield Case((_form(fmt, "input", 1), _form(fmt, "input", 0)), ("codes", "codes"), product=True)
    for fmt in SWIZZLED:
        for role, key, ragged in (("input", None, True), ("grad_output", KEY, False), ("weight", None, True)):
            pair = (_form(fmt, role, 1, key), _form(fmt, role, 0, key))
            yield Case(pair, ("swizzled", "swizzled"), ragged=ragged)


def differences(ours: Operand, expected: Operand) -> list[str]:
    """Parts of a cast that are not the same bits."""
    found = []
    for part in Operand._fields[1:]:
        a, b = getattr(ours, part), getattr(expected, part)
        if (a is None) != (b is None) or (a is not None and not torch.equal(bits(a), bits(b).to(a.device))):
            found.append(part)
    return found


def run(number: int, *, rehearse: bool) -> str:
    """What differs in one case; empty if nothing does."""
    case, device = cases()[number], "cpu" if rehearse else "cuda"
    x = operands(SHAPES[rehearse][case.ragged], case.dtype, device)[1 if case.ragged else 0]
    up = x.flip(0) if case.product else None
    dtype = torch.bfloat16 if case.rounded else None
    read = as_read(x, dtype, up)
    amax = finite_amax(read)
    try:
        with _on_the_cpu() if rehearse else nullcontext():
            forms = held(case.forms, case.outputs)
            assert rehearse or triton_cast.takes(x, forms, up), "the kernels do not take it"
            made = triton_cast.run(x, forms, amax, dtype, up=up)
        found = []
        for ours, form in zip(made, forms, strict=True):
            for where in {device, "cpu"}:  # the specification on either device, of the product that x's device makes
                expected = reference(read.to(where), [form], amax.to(where))[0]
                found += [f"{part} against the specification on {where}" for part in differences(ours, expected)]
    except Exception as error:
        return f"{case.name}: {''.join(traceback.format_exception_only(error)).strip()}"
    return f"{case.name}: {', '.join(found)}" if found else ""


def _on_the_cpu() -> AbstractContextManager[None]:
    from tests.unit.quant.kernels.instructions import as_instructions_round

    return as_instructions_round()


def elementwise(*, rehearse: bool) -> list[str]:
    """Where SwiGLU's gradients over every bf16 gate, rotary positions or the Hadamard transform differ from torch's."""
    device = "cpu" if rehearse else "cuda"
    gate = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    gate = gate.repeat(1 if rehearse else 256)
    generator = torch.Generator(device).manual_seed(1)
    grad, up, x = (torch.randn(gate.shape, generator=generator, device=device).bfloat16() for _ in range(3))
    x = x.view(-1, 64, 8, 64).transpose(1, 2)
    angles = torch.randn(64, 64, generator=generator, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    whole, ragged = grad.view(-1, 256), grad.view(-1, 256)[16:, 3:]
    transforms = [(whole, Hadamard("+-" * (length // 2)), dim) for length in (16, 32, 128) for dim in (0, 1)]
    transforms.append((ragged, Hadamard("+-" * 8), 0))
    transformed = [(one.shape, how, hadamard(one, *how)) for one, *how in transforms]
    expected = {
        "SwiGLU's gradient of gate": torch.ops.aten.silu_backward(grad * up, gate),
        "SwiGLU's gradient of up": grad * torch.nn.functional.silu(gate),
        "rotary positions": rotary._rotate(x, cos, sin),
        "rotary positions backward": rotary._rotate_back(x, cos, sin),
        **{
            f"{what} by {how} of {shape}": part
            for shape, how, y in transformed
            for what, part in (("the Hadamard transform", y), ("its largest magnitude", finite_amax(y)))
        },
        "the largest magnitude of SwiGLU's product": finite_amax(swiglu_product(gate, up)),
    }
    try:
        with _on_the_cpu() if rehearse else nullcontext():
            made = (
                *triton_cast.swiglu_backward(grad, gate, up),
                *(rotary.launch(x, cos, sin, back=back) for back in (False, True)),
                *(part for one, *how in transforms for part in triton_cast.hadamard(one, *how)),
                triton_cast.finite_amax(gate, up=up),
            )
    except Exception as error:
        return [f"elementwise kernels: {''.join(traceback.format_exception_only(error)).strip()}"]
    alike = zip(expected.items(), made, strict=True)
    return [f"{name} against torch's" for (name, one), other in alike if not torch.equal(bits(one), bits(other))]


def in_parallel(one: Callable[[int], list[str]], numbers: Sequence[int], workers: int, seconds: float) -> list[str]:
    """``one`` of each number, by processes of one thread each; what is not done by then, or whose process died, is
    told.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
    made = {pool.submit(one, number): number for number in numbers}
    done, late = wait(made, timeout=seconds)
    found = [text for future in done if future.exception() is None for text in future.result()]
    found += [f"{_name(made[future])}: {error}" for future in done if (error := future.exception())]
    found += [f"{_name(made[future])}: not done in {seconds:.0f} s" for future in late]
    for child in multiprocessing.active_children() if late else ():
        child.kill()
    pool.shutdown(cancel_futures=True)
    return found


def _name(number: int) -> str:
    return cases()[number].name if number >= 0 else "elementwise kernels"


def _one(number: int, *, rehearse: bool) -> list[str]:
    """What differs in a case, or for -1 in the kernels that cast nothing."""
    if number < 0:
        return elementwise(rehearse=rehearse)
    found = run(number, rehearse=rehearse)
    return [found] if found else []


def main() -> int:
    """Run all cases; 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="take each such case alone")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what is not done by then counts as wrong")
    args = parser.parse_args()
    numbers = range(0, len(cases()), args.every)
    found = in_parallel(partial(_one, rehearse=args.rehearse), [-1, *numbers], args.workers, args.seconds)
    print(json.dumps({"cases": len(numbers), "differences": found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
