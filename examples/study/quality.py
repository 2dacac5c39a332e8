"""The arms of the study: quality losses Q [L, O], each with some of the objective's terms.

    dL           loss divergence / loss, as objective snip_loss
    own          wgrad's error in the linear's own update
    prop-far     eps^2 Gamma^2: dgrad's error in updates before the residual stream it reaches
    near-plain   near^2 with both of its correction factors at 1
    prop         prop-far + near^2 with its factors, as the code has it
    fwd          fprop's error in all updates

Terms of the weight divergence are halved, as c = 1 in the objective has it.  Source: docs/numerics.md.
Convention: Q is the difference from FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.cost import FUSED_GROUPS, LinearShape
from megatron_snip.snip.divergence import (
    fwd_divergence,
    loss_divergence,
    own_divergence,
    prop_divergence,
    residual_gain,
)
from megatron_snip.snip.objectives import ObjectiveInputs, base_option, quality_loss
from megatron_snip.snip.stats import ProbeStats

Floats = NDArray[np.float64]

#: Arms that are sums of terms, by name.
SUMS = {
    "dL": ("dL",),
    "dL+own": ("dL", "own"),
    "dL+own+prop-far": ("dL", "own", "prop-far"),
    "dL+own+prop-far+near-plain": ("dL", "own", "prop-far", "near-plain"),
    "dL+own+prop": ("dL", "own", "prop"),
    "snip": ("dL", "own", "prop", "fwd"),
    "dL+fwd": ("dL", "fwd"),
    "own": ("own",),
    "prop": ("prop",),
    "fwd": ("fwd",),
}
#: Arms that are objectives of the package.
OTHERS = ("ggn", "norms", "paper", "abs_err", "rel_err", "layer_id", "layer_type")
RANDOM = 5
ORACLE = "oracle"
#: Arms that need not be evaluated at every target and checkpoint.
LEFT_OUT = ("layer_id", "layer_type", *(f"random_{seed}" for seed in range(1, RANDOM)))
#: Arms of single GEMMs, and those taken from the BF16 probe too.
BY_GEMM = ("dL", "dL+own", "dL+own+prop", "snip")
IN_BF16 = ("dL", "dL+own", "snip")


def near_plain(stats: ProbeStats, name: str, fmt: str) -> float:
    """near^2 of o_proj and down_proj in ``fmt``, whatever way the errors of single tokens go together."""
    block, _, kind = name.rpartition(".")
    if kind not in ("o_proj", "down_proj"):
        return 0.0
    linear, total = stats.linears[name], 0.0
    if not linear.dgrad_signal_sq > 0:
        return 0.0
    relative = linear.dgrad_error_sq[fmt] / linear.dgrad_signal_sq
    for between in FUSED_GROUPS[0 if kind == "o_proj" else 1]:
        other = stats.linears[f"{block}.{between}"]
        errors = [
            other.error_sq[f"{fmt}/wgrad/{role}"] / other.norm_sq[tensor]
            for role, tensor in (("grad_output", "G"), ("input", "X"))
            if other.norm_sq[tensor] > 0
        ]
        total += other.own_sq[fmt] * relative / sum(errors) if sum(errors) > 0 else 0.0
    return total


def _by_dgrad(
    stats: ProbeStats,
    names: Sequence[str],
    options: Sequence[LinearPrecision],
    value: Callable[[str, str], float],
) -> Floats:
    """[L, O] of ``value(linear, dgrad's format)`` by the squared update."""
    whole = sum(linear.update_norm_sq for linear in stats.linears.values() if np.isfinite(linear.update_norm_sq))
    rows = [[value(name, o.dgrad) if get_format(o.dgrad).quantised else 0.0 for o in options] for name in names]
    return np.array(rows) / whole


def terms(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> dict[str, Floats]:
    """Every term [L, O] as the difference from FP8, in the objective's unit."""

    def far(name: str, fmt: str) -> float:
        return stats.linears[name].dgrad_error_sq[fmt] * residual_gain(stats, name)

    found = {
        "dL": loss_divergence(stats, names, options) / stats.loss,
        "own": own_divergence(stats, names, options) / 2,
        "prop-far": _by_dgrad(stats, names, options, far) / 2,
        "near-plain": _by_dgrad(stats, names, options, lambda name, fmt: near_plain(stats, name, fmt)) / 2,
        "prop": prop_divergence(stats, names, options) / 2,
        "fwd": fwd_divergence(stats, names, options) / 2,
    }
    return {name: values - values[:, [base_option(options)]] for name, values in found.items()}


def quality_of(
    arm: str, stats: ProbeStats, shapes: Sequence[LinearShape], options: Sequence[LinearPrecision]
) -> Floats:
    """Q [L, O] of an arm; "random_3" is the objective random with seed 3."""
    if arm in SUMS:
        known = terms(stats, [shape.name for shape in shapes], options)
        return sum((known[term] for term in SUMS[arm]), np.zeros((len(shapes), len(options))))
    objective, _, seed = arm.partition("_") if arm.startswith("random_") else (arm, "", "0")
    return quality_loss(objective, ObjectiveInputs(shapes, options, stats, seed=int(seed)))


def arms() -> list[str]:
    """All arms of whole linears but the oracle, in the order of the tables."""
    return [*SUMS, *OTHERS, *(f"random_{seed}" for seed in range(RANDOM))]
