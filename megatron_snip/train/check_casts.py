"""Before training on a GPU: whether its kernels give the specification's bits, on small tensors.

Triton compiles the kernels on the user's machine, and compilers err: what ptxas of CUDA 12.8 made of a weight's cast
trained to NaN, and nothing before a GPU could tell (benchmarks/results/2026-11-26-gpu-h200.md).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.quant import GEMMS, LinearCall, LinearPrecision, RoundingKey
from megatron_snip.quant.casts.cast import Form, Operand, as_read, finite_amax, reference
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears.linear import LINEAR_IMPLS
from megatron_snip.train.setup import Parts

LOGGER = logging.getLogger("megatron_snip")
#: Tokens, and channels of either side: whole tiles, so that the kernels are those of training.
_TOKENS, _CHANNELS = 256, 512
#: The share of a cast's elements that may differ: rounding a few otherwise does no harm.
_FEW = 1e-3
_KEY = RoundingKey(seed=1, iteration=2, stream=3)


def check_casts_of(parts: Parts, impl: str, device: torch.device) -> None:
    """``check_casts`` of every format that a run's linears have or may get.

    Each is checked alone: `recipes` has dozens of precisions, and a kernel for each pair of formats would be compiled.
    """
    found = {linear.precision for linear in parts.linears.values()}
    found |= {*parts.coordinator.options} if parts.coordinator is not None else set()
    found |= {parts.final.of(precision) for precision in found} if parts.final is not None else set()
    names = sorted({getattr(precision, gemm) for precision in found for gemm in GEMMS})
    check_casts(map(LinearPrecision.uniform, names), impl, device)


def check_casts(precisions: Iterable[LinearPrecision], impl: str, device: torch.device) -> None:
    """Cast as linears in these precisions do.

    UserError if more than a few elements of a result differ from the specification's on the device, a warning if fewer.
    """
    begin, names = time.perf_counter(), set()
    draw = torch.Generator(device).manual_seed(0)
    x, up = (torch.randn(_TOKENS, _CHANNELS, generator=draw, device=device).bfloat16() for _ in range(2))
    w = torch.randn(_CHANNELS, _CHANNELS, generator=draw, device=device)
    done: set[object] = set()
    for precision in precisions:
        for role, forms in _forms(precision, impl, device):
            names |= {form.fmt.name for form in forms}
            read, dtype = (w, torch.bfloat16) if role == "weight" else (x, None)
            for factor in (None, up) if role == "input" else (None,):
                case = (role, tuple(form.text for form in forms), factor is None)
                if case not in done:
                    _compare(read, forms, dtype, factor)
                done.add(case)
    if names:
        LOGGER.info(f"casts of {', '.join(sorted(names))} checked in {time.perf_counter() - begin:.1f} s")


def _forms(precision: LinearPrecision, impl: str, device: torch.device) -> Iterator[tuple[str, list[Form]]]:
    """Role and forms of each cast that a linear launches in training, none if Transformer Engine runs it."""
    call = LinearCall(precision, _KEY)
    backends = LINEAR_IMPLS[impl].backends(call, device, _TOKENS, _CHANNELS, _CHANNELS)
    if not backends:
        return
    call = call.on(backends)
    casts = {
        "input": [call.wanted("fprop", "input"), call.wanted("wgrad", "input", kept=True)],
        "weight": [call.wanted(gemm, "weight", kept=True) for gemm in ("fprop", "dgrad")],
        "grad_output": [call.wanted(gemm, "grad_output") for gemm in ("dgrad", "wgrad")],
    }
    for role, wanted in casts.items():
        if forms := [form for form in dict.fromkeys(wanted) if form is not None]:
            yield role, forms


def _compare(x: Tensor, forms: Sequence[Form], dtype: torch.dtype | None, up: Tensor | None) -> None:
    read = as_read(x, dtype, up)
    amax = finite_amax(read)
    for ours, right in zip(op.run(x, forms, amax, dtype, False, up), reference(read, forms, amax), strict=True):
        assert right.form is not None
        for part in Operand._fields[1:4]:
            one, other = getattr(ours, part), getattr(right, part)
            wrong = 0.0 if one is None else float((_bits(one) != _bits(other)).float().mean())
            if not wrong:
                continue
            what = right.form.output if part == "data" else part
            version = getattr(sys.modules.get("triton"), "__version__", "of an unknown version")
            told = (
                f"casts on {_name(x.device)} differ from the specification in {wrong:.1%} of the {what} of the "
                f"{right.form.role} in {right.form.fmt.name}; Triton {version} compiles them wrongly here"
            )
            if wrong > _FEW:
                raise UserError(f"{told}: install another version of it, or none, and PyTorch casts slowly")
            LOGGER.warning(told)


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
