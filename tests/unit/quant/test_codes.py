"""Weights that travel as codes: what is laid out of them is what a cast of the whole weight makes."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.formats import format_names, get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.casts.cast import Form
from megatron_snip.quant.casts.codes import Sent, to_send
from megatron_snip.quant.kernels import op
from megatron_snip.quant.kernels.dispatch import cast, operand_of
from megatron_snip.quant.linears.linear import _BUILT_IN
from megatron_snip.quant.linears.operands import LinearCall, weight_codes

N, K = 256, 288
AMAX = torch.tensor(3.5)
PLANS = [*format_names(), "fp8/fp4/fp8", "nvfp4/fp8_pow2/bf16", "fp4/bf16_dequantized/fp8"]


def weight() -> torch.Tensor:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, N)[:, None]
    w[130, 7], w[5, 5], w[:16, :32] = -AMAX, 0.0, 0.0
    return w


def gathered(w: torch.Tensor, form: Form, ranks: int = 2) -> Sent:
    """What each rank's cast of its rows sends, one after another."""
    parts = [to_send(cast(rows, [form], amax=AMAX, dtype=torch.bfloat16)[0]) for rows in w.chunk(ranks)]
    data, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    whole = cast(w, [form], amax=AMAX, dtype=torch.bfloat16)[0].tensor_scale
    return Sent(data, scales, whole)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("plan", PLANS)
def test_every_backend_gets_what_a_cast_of_the_whole_weight_makes(plan):
    precision, w = LinearPrecision.parse(plan), weight()
    forms, seen = weight_codes(precision), 0
    codes = {form: gathered(w, form) for form in forms}
    for gemm in ("fprop", "dgrad") if forms else ():
        fmt = get_format(getattr(precision, gemm))
        if (gemm, "weight") in precision.sources:
            continue
        for backend in _BUILT_IN:
            if backend.unfit_format(fmt) is not None:
                continue
            for kept in (True, False):
                backends = {"fprop": backend, "dgrad": backend}
                call = LinearCall(precision, None, codes=codes, backends=backends)
                form = call.wanted(gemm, "weight", kept=kept)
                expected = cast(w, [form], amax=AMAX, dtype=torch.bfloat16)[0]
                (made,) = call.cast_weight(torch.empty(0), [form], torch.bfloat16)
                assert made.form == form and all(same(*parts) for parts in zip(made[1:4], expected[1:4], strict=True))
                seen += 1
    assert seen or not forms


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("fp8", ["fp8"]), ("fp4", ["fp4"]), ("nvfp4", ["nvfp4"]), ("fp8/fp4/bf16", ["fp8", "fp4"]),
        ("mxfp8", []),  # two casts, with their scales more bytes than BF16
        ("mxfp4", ["mxfp4", "mxfp4"]), ("mxfp8_dequantized", ["mxfp8_dequantized"]),
        ("bf16/fp8/fp8", []), ("fp8/bf16/fp8", []), ("fp8/bf16_dequantized/bf16", ["fp8"]),
        ("mxfp4_tetrajet", ["mxfp4_tetrajet"]),  # dgrad's, which rounds at random, is made from fprop's
    ],
)  # fmt: skip
def test_codes_travel_only_where_they_are_smaller_and_serve_both_gemms(plan, expected):
    assert [form.fmt.name for form in weight_codes(LinearPrecision.parse(plan))] == expected


def test_bytes_on_the_way_are_one_a_code_or_half_of_one():
    w = weight()
    sizes = {name: gathered(w, weight_codes(LinearPrecision.uniform(name))[0]).data.numel() for name in ("fp8", "fp4")}
    assert sizes == {"fp8": N * K, "fp4": N * K // 2}


@pytest.mark.parametrize("name", ["fp8", "fp4", "nvfp4"])
def test_a_nan_stays_a_nan(name):
    w = weight()
    w[200, 100] = torch.nan
    (form,) = weight_codes(LinearPrecision.uniform(name))
    values = operand_of(gathered(w, form), form.held("values"), form, torch.bfloat16).data
    plain = cast(w, [form.held("values")], amax=AMAX, dtype=torch.bfloat16)[0].data
    nan, side = values.isnan(), form.block[0]
    assert nan[200, 100] and torch.equal(values[~nan], plain[~nan])
    rows, columns = (
        slice(200 // side * side, 200 // side * side + side),
        slice(100 // side * side, 100 // side * side + side),
    )
    assert nan.sum() == (1 if name == "fp8" else nan[rows, columns].numel())


@pytest.mark.parametrize("plan", ["fp4", "nvfp4", "fp8"])
@pytest.mark.parametrize("output", ["codes", "operand", "swizzled"])
def test_the_operator_that_stands_for_it_says_what_it_makes(plan, output):
    (codes,) = weight_codes(LinearPrecision.uniform(plan))
    if output == "swizzled" and plan != "nvfp4":
        return
    sent, form = gathered(weight(), codes), Form(codes.fmt, "weight", 0, output=output)
    torch.library.opcheck(
        torch.ops.megatron_snip.lay_out, (*sent, form.text), test_utils=("test_schema", "test_faketensor")
    )
    made = op.lay_out(sent, form)
    parts = torch.ops.megatron_snip.lay_out(*sent, form.text)
    assert all(same(*both) for both in zip(parts, [part for part in made[1:4] if part is not None], strict=True))
