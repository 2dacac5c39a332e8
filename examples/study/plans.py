"""From statistics to plans: the probe of a small run, the plans with the least quality loss, and their regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import efficiency
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.train.setup import Parts

Floats = NDArray[np.float64]
Precisions = dict[str, LinearPrecision]

FP8, FP4 = (LinearPrecision.uniform(name) for name in ("fp8", "fp4"))
OPTIONS = [FP8, FP4]


def parts_batch(parts: Parts) -> int:
    """Sequences in a batch of the run."""
    return int(parts.train_loader.make(0).tokens.flatten(0, 1).shape[0])


def probe(
    parts: Parts, iteration: int, formats: Sequence[str] = ("fp4", "fp8"), batches: int = 1, *, updates: bool = True
) -> Statistics:
    """Probe the coming batches."""
    assert parts.coordinator is not None
    measured = parts.coordinator.probe
    before, measured.formats = measured.formats, sorted(formats)
    size = parts_batch(parts)

    def batch(ahead: int) -> Any:
        return parts.train_loader.make((iteration - 1 + ahead) * size)

    run_pass = parts.stepper.pass_runner(batch(0), iteration, batch)
    try:
        return measured.run(run_pass, parts.optimizer.zero_grad, iteration, batches, updates=updates)
    finally:
        measured.formats = before


def shapes_of(parts: Parts) -> list[LinearShape]:
    """Shapes of all linears, in order."""
    assert parts.coordinator is not None
    return parts.coordinator.shapes


def plan_by(quality: Floats, shapes: Sequence[LinearShape], target: float) -> Precisions:
    """The plan over FP8 and FP4 with the least quality loss [L, 2], at a share of FP4."""
    chosen = SolveRequest(quality, efficiency(shapes, OPTIONS), target, gap=0.0).solve().choice
    return {shape.name: OPTIONS[option] for shape, option in zip(shapes, chosen, strict=True)}


def oracle_quality(truth: Floats) -> Floats:
    """Quality loss [L, 2] of FP8 and FP4 by the true costs [L] of FP4."""
    return np.stack([np.zeros_like(truth), truth], axis=1)


def cost_of(plan: Mapping[str, LinearPrecision], truth: Floats) -> float:
    """Sum of the true costs [L] of the linears whose fprop is in FP4."""
    return float(sum(t for t, precision in zip(truth, plan.values(), strict=True) if precision.fprop == "fp4"))


def regret(predicted: Floats, truth: Floats, shapes: Sequence[LinearShape], target: float) -> float:
    """(plan - best) / (all FP4 - best) by the true costs of single linears; predicted, truth [L]."""
    best = cost_of(plan_by(oracle_quality(truth), shapes, target), truth)
    cost = cost_of(plan_by(oracle_quality(predicted), shapes, target), truth)
    return (cost - best) / (float(truth.sum()) - best)
