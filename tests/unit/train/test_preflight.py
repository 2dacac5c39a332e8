"""What a preflight tries of many options."""

from __future__ import annotations

from megatron_snip.quant import GEMMS, LinearPrecision
from megatron_snip.snip.plan.recipes import RECIPES, recipe_options
from megatron_snip.train.preflight import FEW, covering


def test_few_options_are_all_tried_and_of_many_enough():
    few = [LinearPrecision.parse(text) for text in ("fp8", "fp4", "fp4/fp4/fp8")]
    assert covering(few) == few
    for name in RECIPES:
        options = recipe_options(f"recipes:{name}", measured=True)
        tried = covering(options)
        assert len(options) > FEW and len(tried) < len(options) / 3 and set(tried) <= set(options)
        for gemm in GEMMS:
            assert {getattr(option, gemm) for option in tried} == {getattr(option, gemm) for option in options}
