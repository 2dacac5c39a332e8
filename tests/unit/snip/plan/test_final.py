"""The late switch: what it makes of a precision and of a plan, and what cannot be read."""

from __future__ import annotations

import pytest

from megatron_snip.errors import UserError
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.plan_file import Plan

SHAPES = [LinearShape("a", 2, 3), LinearShape("b", 6, 3)]
PLAN = Plan.by_hand({"a": LinearPrecision.parse("fp4"), "b": LinearPrecision.parse("fp8/fp4/fp8")}, SHAPES, iteration=3)


@pytest.mark.parametrize(
    ("text", "a", "b"),
    [
        ("bf16/plan/plan", "bf16/fp4/fp4", "bf16/fp4/fp8"),
        ("plan/plan/bf16", "fp4/fp4/bf16", "fp8/fp4/bf16"),
        ("fp8", "fp8", "fp8"),
        ("bf16/fp8/plan", "bf16/fp8/fp4", "bf16/fp8/fp8"),
    ],
)
def test_each_gemm_is_switched_or_kept(text, a, b):
    final = Final.parse(text, 5)
    assert str(final) == text
    made = final.plan(PLAN, SHAPES, 7)
    assert {name: str(precision) for name, precision in made.linears.items()} == {"a": a, "b": b}
    assert made.iteration == 7 and made.hash != PLAN.hash and made.target == PLAN.target
    made.check_achieved(SHAPES, "made")
    assert final.plan(made, SHAPES, 8) is made, "a second time changes nothing"
    assert final.plan(PLAN, SHAPES, 4) is PLAN, "it is not due yet"


def test_what_it_leaves_to_plan():
    assert Final.parse("plan/bf16/bf16", 5).plans_fprop and not Final.parse("bf16/plan/plan", 5).plans_fprop
    assert Final.parse("bf16/plan/fp8", 5).formats == {"bf16", "fp8"}


def test_names_tell_switches_apart():
    names = {Final.parse(text, 5).hash(before) for text in ("bf16", "bf16/plan/plan") for before in (None, PLAN.hash)}
    assert len(names) == 4 and all(len(name) == 16 for name in names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp5", "--snip-final-precision fp5: fprop: unknown format 'fp5'"),
        ("bf16/plan", "write one format, or three as fprop/dgrad/wgrad; plan keeps a GEMM as planned"),
        ("plan", "--snip-final-precision plan changes nothing; name a format, as in bf16/plan/plan"),
    ],
)
def test_what_cannot_be_read(text, said):
    with pytest.raises(UserError) as error:
        Final.parse(text, 5)
    assert said in str(error.value)
