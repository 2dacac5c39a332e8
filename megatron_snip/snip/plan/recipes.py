"""--snip-options recipes: formats from published recipes as the options of a plan, GEMM by GEMM.

    fprop   BF16, FP8, and every FP4; the probe measures which is best
    dgrad   BF16, FP8, and the FP4 of the published recipes
    wgrad   as dgrad; with --snip-weight also FP4 without the Hadamard transform.  Without --snip-weight, no measurement
            distinguishes the two

"recipes:" and a key of RECIPES selects a table on any device, so you can make a plan for Blackwell on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron_snip.errors import UserError
from megatron_snip.quant import GEMMS, LinearPrecision

RECIPES_WORD = "recipes"

#: Name -> GEMM -> formats, preferred ones first; and formats of wgrad that only the weight divergence distinguishes.
RECIPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "blackwell": {
        "fprop": ("bf16", "mxfp8", "nvfp4", "nvfp4_4over6", "nvfp4_plain"),
        "dgrad": ("bf16", "mxfp8", "nvfp4"),
        "wgrad": ("bf16", "mxfp8", "nvfp4"),
        "wgrad, measured": ("nvfp4_plain",),
    },
    "hopper": {
        "fprop": ("bf16", "fp8", "fp8_pow2", "fp4", "fp4_pow2"),
        "dgrad": ("bf16", "fp8", "fp4"),
        "wgrad": ("bf16", "fp8", "fp4"),
        "wgrad, measured": (),
    },
}


def is_recipes(words: str) -> bool:
    """Whether --snip-options asks for recipes, of this device's table or of a named one."""
    return words.partition(":")[0] == RECIPES_WORD


def recipe_options(words: str, *, measured: bool) -> list[LinearPrecision]:
    """The options of "recipes:NAME": all combinations over the three GEMMs.  measured: whether wgrad's errors are.

    Raises UserError for an unknown name.
    """
    name = words.partition(":")[2]
    if name not in RECIPES:
        known = ", ".join(f"{RECIPES_WORD}:{each}" for each in RECIPES)
        raise UserError(f"no such table of recipes; known: {RECIPES_WORD} for this device's, {known}")
    table = RECIPES[name]
    formats = [table[gemm] for gemm in GEMMS]
    if measured:
        formats[-1] += table["wgrad, measured"]
    return [LinearPrecision(*triple) for triple in product(*formats)]
