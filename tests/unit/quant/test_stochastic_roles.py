"""``stochastic_roles`` of a format: what it names rounds by the key's random bits, in those GEMMs and no others."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_snip.formats import ROLES, get_format, register
from megatron_snip.formats import format as format_module
from megatron_snip.quant import GEMMS, LinearPrecision, RoundingKey, fake_quantize, quantize, quantized_linear
from megatron_snip.quant.casts.cast import Quantized
from megatron_snip.quant.linears.operands import REDUCTION_DIM, LinearCall

OPERANDS = [f"{gemm}.{role}" for gemm, roles in REDUCTION_DIM.items() for role in roles]
BASES = ["fp4", "mxfp4", "nvfp4"]  # square blocks of weights; tiles; a transform of wgrad and the tensor's amax


@pytest.fixture
def drawing():
    """A function (base, what is named) that registers such a format for a test and returns its name."""
    names = []

    def add(base, *named):
        name = f"{base} drawing {', '.join(named)}"  # forms are kept by name
        names.append(register(replace(get_format(base), name=name, stochastic_roles=frozenset(named))).name)
        return name

    yield add
    for name in names:
        del format_module._FORMATS[name]


def drawn_by(named):
    """The operands that a set of names has drawn: those named, and all of a role."""
    return {operand for operand in OPERANDS if operand in named or operand.partition(".")[2] in named}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("named", [*ROLES, *OPERANDS])
def test_forms_of_the_operands_named_have_the_key(named, base, drawing):
    call = LinearCall(LinearPrecision.uniform(drawing(base, named)), RoundingKey(1, 2, 3))
    for output in ("values", "codes", "operand"):
        forms = {f"{gemm}.{role}": call.form(gemm, role, output=output) for gemm, role in
                 (one.split(".") for one in OPERANDS)}  # fmt: skip
        assert {operand for operand, form in forms.items() if form.key is not None} == drawn_by({named})
        for operand, form in forms.items():  # a weight's cast that serves both GEMMs has no key
            assert form.dim == REDUCTION_DIM[operand.partition(".")[0]][form.role] or form.key is None


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("named", [(), *((one,) for one in (*ROLES, *OPERANDS)), *itertools.combinations(ROLES, 2)])
def test_another_key_changes_the_gemms_that_read_what_is_drawn(named, base, drawing):
    precision = LinearPrecision.uniform(drawing(base, *named))
    x, w = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
    g = torch.randn(128, 128)

    def run(iteration):
        x.grad = w.grad = None
        y = quantized_linear(x, w, precision, key=RoundingKey(1, iteration, 3))
        y.backward(g)
        return dict(zip(GEMMS, (y, x.grad, w.grad), strict=True))

    one, other = run(1), run(2)
    changed = {gemm for gemm in GEMMS if not torch.equal(one[gemm], other[gemm])}
    assert changed == {operand.partition(".")[0] for operand in drawn_by({*named})}


@pytest.mark.parametrize("base", ["fp4", "mxfp4"])
@pytest.mark.parametrize("operand", OPERANDS)
def test_what_is_drawn_is_unbiased(operand, base, drawing):
    """The mean over 10^4 draws: scales of both leave nothing beyond the largest value, and steps are at most 2 scales.

    A draw's standard deviation is at most half a step, so the mean's is a hundredth of the scale.
    """
    gemm, role = operand.split(".")
    name, dim = drawing(base, operand), REDUCTION_DIM[gemm][role]
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    total, draws = torch.zeros(32, 32, dtype=torch.float64), 10_000
    for iteration in range(draws):
        total += fake_quantize(x, name, role=role, dim=dim, key=RoundingKey(1, iteration, 3))
    q = quantize(x, name, role=role, dim=dim, rounding="nearest")
    scales = Quantized(torch.full_like(q.codes, 2), q.scales, q.fmt, q.block).dequantize()  # E2M1's code of 1
    error = (total / draws - x) / scales
    assert error.abs().max() < 5 / 100 and error.mean().abs() < 5 / 100 / 32
    assert (q.dequantize() - x).div(scales).abs().max() > 0.2, "to nearest it is not"
