"""The arms of the study: quality losses Q [L, O], each with some of the objective's terms.

    dL    loss divergence / loss
    own   c/2 weight divergence with c = 1: wgrad's error in the linear's own update

Source: docs/numerics.md; docs/evidence.md has the terms that were tried and are gone.
Convention: Q is the difference from FP8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.predict.divergence import loss_divergence, weight_divergence
from megatron_snip.snip.predict.objectives import ObjectiveInputs, base_option, quality_loss

Floats = NDArray[np.float64]

#: Arms that are sums of terms, by name.
SUMS = {"dL": ("dL",), "dL+own": ("dL", "own"), "own": ("own",)}
#: Arms that are objectives of the package.
OTHERS = ("abs_err", "rel_err", "layer_id", "layer_type")
RANDOM = 5
ORACLE = "oracle"
#: Arms that need not be evaluated at every target and checkpoint.
LEFT_OUT = ("layer_id", "layer_type", *(f"random_{seed}" for seed in range(1, RANDOM)))
#: Arms of single GEMMs, and those taken from the BF16 probe too.
BY_GEMM = ("dL", "dL+own")
IN_BF16 = ("dL", "dL+own")


def terms(stats: Statistics, options: Sequence[LinearPrecision]) -> dict[str, Floats]:
    """Every term [L, O] as the difference from FP8, in the objective's unit."""
    found = {"dL": loss_divergence(stats, options) / stats.loss, "own": weight_divergence(stats, options) / 2}
    return {name: values - values[:, [base_option(options)]] for name, values in found.items()}


def quality_of(
    arm: str, stats: Statistics, shapes: Sequence[LinearShape], options: Sequence[LinearPrecision]
) -> Floats:
    """Q [L, O] of an arm; "random_3" is the objective random with seed 3."""
    if arm in SUMS:
        known = terms(stats, options)
        return sum((known[term] for term in SUMS[arm]), np.zeros((len(shapes), len(options))))
    objective, _, seed = arm.partition("_") if arm.startswith("random_") else (arm, "", "0")
    return quality_loss(objective, ObjectiveInputs(shapes, options, stats, seed=int(seed)))[0]


def arms() -> list[str]:
    """All arms of whole linears but the oracle, in the order of the tables."""
    return [*SUMS, *OTHERS, *(f"random_{seed}" for seed in range(RANDOM))]
