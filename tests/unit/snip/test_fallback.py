"""Plans to fall back to."""

from __future__ import annotations

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.quant import LinearShape
from megatron_snip.snip.fallback import base_plan, linears_of, plan_before
from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.options import read_choices

NAMES = ["layers.0.mlp.up_proj", "layers.0.mlp.down_proj"]
SHAPES = [LinearShape(name, 128, 128, block=0, kind=name.split(".")[-1]) for name in NAMES]
UP, DOWN = NAMES


def history(*changes: dict[str, str]) -> list[dict]:
    return [{"iteration": 10 * i, "hash": f"h{i}", "changed": change} for i, change in enumerate(changes, 1)]


MADE = history({UP: "fp4", DOWN: "fp8"}, {DOWN: "fp4"}, {UP: "fp8"}, {DOWN: "fp8", UP: "fp4"})


def words(linears) -> list[str] | None:
    return None if linears is None else [str(linears[name]) for name in NAMES]


def test_what_each_plan_held():
    assert [words(one) for one in linears_of(MADE, NAMES)] == [
        ["fp4", "fp8"], ["fp4", "fp4"], ["fp8", "fp4"], ["fp4", "fp8"]
    ]  # fmt: skip
    old = history({}, {UP: "fp4"}, {DOWN: "fp8"})
    assert [words(one) for one in linears_of(old, NAMES)] == [None, None, ["fp4", "fp8"]]


@pytest.mark.parametrize(
    ("blamed", "expected"),
    [([], ["fp4", "fp8"]), (["h4"], ["fp8", "fp4"]), (["h4", "h3"], ["fp4", "fp4"]), (["h1", "h2", "h3"], None)],
)
def test_the_last_one_without_trouble_and_none_with_the_same_precisions(blamed, expected):
    plan = plan_before(MADE, SHAPES, blamed, 41)
    assert words(plan and plan.linears) == expected
    if plan is not None:
        assert plan.iteration == 41 and plan.achieved == plan.target == plan.fp4_share(SHAPES)
        plan.check_achieved(SHAPES, "plan")


@pytest.mark.parametrize(
    ("blamed", "expected"), [([], ["bf16/fp4/fp4", "bf16/fp8/fp8"]), (["h4"], ["bf16/fp8/fp8", "bf16/fp4/fp4"])]
)
def test_after_the_late_switch_plans_are_as_it_makes_them(blamed, expected):
    """The first is blamed with the fourth, which the switch makes equal to it."""
    final = Final.parse("bf16/plan/plan", 41)
    assert words(plan_before(MADE, SHAPES, blamed, 41, final).linears) == expected
    assert words(plan_before(MADE, SHAPES, blamed, 40, final).linears) == [one.split("/")[1] for one in expected]
    switched = {UP: "bf16/fp4/fp4", DOWN: "bf16/fp8/fp8"}
    only = plan_before(history({UP: "fp4", DOWN: "fp8"}, switched), SHAPES, ["h2"], 41, final)
    assert only is None, "what the switch made of it is blamed"
    base = base_plan(read_choices(SnipConfig(snip_options="fp8,fp4"), SHAPES), SHAPES, 41, final)
    assert words(base.linears) == ["bf16/fp8/fp8"] * 2


def test_no_history_no_plan():
    assert plan_before([], SHAPES, [], 5) is None


@pytest.mark.parametrize(
    ("options", "fix", "expected"),
    [
        ("fp8,fp4", "", ["fp8", "fp8"]),
        ("fp4,fp8", "", ["fp8", "fp8"]),
        ("bf16,fp4", "", ["bf16", "bf16"]),
        ("nvfp4,mxfp8", "", ["mxfp8", "mxfp8"]),
        ("fp8,fp4", "*.up_proj=bf16", ["bf16", "fp8"]),
        ("fp8,fp4", "*.down_proj=fp4", ["fp8", "fp4"]),
    ],
)
def test_the_base_option_keeps_what_is_fixed(options, fix, expected):
    snip = SnipConfig(snip_options=options, snip_fix=fix)
    plan = base_plan(read_choices(snip, SHAPES), SHAPES, 7)
    assert (
        words(plan.linears) == expected and plan.iteration == 7 and plan.objective == f"guard: {options_base(options)}"
    )


def options_base(options: str) -> str:
    return {"bf16,fp4": "bf16", "nvfp4,mxfp8": "mxfp8"}.get(options, "fp8")
