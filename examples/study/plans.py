"""From statistics to plans: the probe of a small run, plans of least quality loss, and their regret."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import efficiency
from megatron_snip.snip.plan.options import read_choices, solve_request
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
    """Statistics of the coming batches."""
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
    """The plan of least quality loss [L, 2], of FP8 and FP4, at a share of FP4."""
    chosen = SolveRequest(quality, efficiency(shapes, OPTIONS), target, gap=0.0).solve().choice
    return {shape.name: OPTIONS[option] for shape, option in zip(shapes, chosen, strict=True)}


def options_of(config: Config, granularity: str, shapes: Sequence[LinearShape]) -> tuple[LinearPrecision, ...]:
    """What each linear may take at a granularity, from FP8 and FP4."""
    snip = config.replace(snip_granularity=granularity).snip
    return read_choices(snip, shapes).options


def plan_as_run(
    config: Config, quality: Floats, shapes: Sequence[LinearShape], granularity: str, target: float
) -> Precisions:
    """The plan that a run would take by a quality loss [L, O] over ``options_of``."""
    snip = config.replace(snip_granularity=granularity, snip_target=target).snip
    choices = read_choices(snip, shapes)
    chosen = solve_request(snip, shapes, choices, quality).solve().choice
    return {shape.name: choices.options[int(option)] for shape, option in zip(shapes, chosen, strict=True)}


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


def key_of(plan: Mapping[str, LinearPrecision], *, fprop: bool = False) -> str:
    """A short hash of linear -> precision, the same for the same plan; fprop: of fprop's formats alone."""
    words = [f"{name}={precision.fprop if fprop else precision}" for name, precision in sorted(plan.items())]
    return hashlib.blake2b("\n".join(words).encode(), digest_size=6).hexdigest()
