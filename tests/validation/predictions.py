"""What a probe predicts and what is true, at checkpoints of one small training run with planted outliers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_snip.snip.divergence import (
    loss_divergence,
    own_divergence,
    prop_divergence,
    residual_gain,
    weight_divergence,
)
from megatron_snip.snip.objectives import OBJECTIVES, ObjectiveInputs, get_objective, quality_loss
from megatron_snip.snip.stats import ProbeStats

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.cost import LinearShape, efficiency
from megatron_snip.snip.plan.ilp import solve
from megatron_snip.train.setup import Parts
from tests.validation.planted import linears_of, make_parts, plant, train
from tests.validation.truth import Updates, batches, even_truth, loss_of, losses_of, precisions, tiles_along_channels

FP8, FP4 = (LinearPrecision.uniform(name) for name in ("fp8", "fp4"))
OPTIONS = [FP8, FP4]
ITERATIONS = {"early": 75, "mid": 150, "late": 300}
TARGETS = (0.75, 0.80)
RANDOM_PLANS = 5
#: Whole batches that gave no statistics, of as many sequences each: with 80 sequences in all, two plans that differ by
#: a fifth over 256 differed by half.
EVALUATED, EACH = 32, 8


def probe(parts: Parts, iteration: int, formats: tuple[str, ...] = ("fp4", "fp8")) -> ProbeStats:
    """Statistics of the coming batch with all passes that any objective asks for."""
    measured = parts.coordinator.probe
    before, measured.formats = measured.formats, sorted(formats)
    batch = parts.train_loader.make((iteration - 1) * parts_batch(parts))
    passes = {name for objective in OBJECTIVES.values() for name in objective.passes or ()}
    try:
        return measured.run(parts.stepper.pass_runner(batch, iteration), parts.optimizer.zero_grad, iteration, passes)
    finally:
        measured.formats = before


def parts_batch(parts: Parts) -> int:
    """Sequences in a batch of the run."""
    return int(parts.train_loader.make(0).tokens.flatten(0, 1).shape[0])


def shapes_of(parts: Parts) -> list[LinearShape]:
    """Shapes of all linears, in order."""
    return [LinearShape(name, linear.out_features, linear.in_features) for name, linear in linears_of(parts).items()]


def plan_by(quality: np.ndarray, parts: Parts, target: float) -> dict[str, LinearPrecision]:
    """The plan of least quality loss [L, O] at a share of FP4."""
    shapes = shapes_of(parts)
    chosen = solve(quality, efficiency(shapes, OPTIONS), target, gap=0.0).choice
    return {shape.name: OPTIONS[option] for shape, option in zip(shapes, chosen, strict=True)}


def end_to_end(parts: Parts, stats: ProbeStats, truth: np.ndarray, over: list[Any]) -> dict[str, np.ndarray]:
    """Loss increase in nats of each objective's plan on each batch [B], by "objective target"; also of the oracle's
    and of all FP4."""
    base, found = losses_of(parts, over), {}
    known: dict[tuple[str, ...], np.ndarray] = {}  # by plan: objectives often agree

    def increase(plan: dict[str, LinearPrecision]) -> np.ndarray:
        if (key := tuple(map(str, plan.values()))) not in known:
            with precisions(parts, plan):
                known[key] = losses_of(parts, over) - base
        return known[key]

    oracle = np.stack([np.zeros_like(truth), truth], axis=1)
    shapes = shapes_of(parts)
    for target in TARGETS:
        found[f"oracle {target}"] = increase(plan_by(oracle, parts, target))
        for name in OBJECTIVES:
            seeds = range(RANDOM_PLANS) if name == "random" else [0]
            given = stats if get_objective(name).needs_stats else None
            for seed in seeds:
                quality = quality_loss(name, ObjectiveInputs(shapes, OPTIONS, given, seed=seed))
                key = f"random_{seed} {target}" if name == "random" else f"{name} {target}"
                found[key] = increase(plan_by(quality, parts, target))
    found["all fp4"] = increase(dict.fromkeys(stats.linears, FP4))
    return found


def regret(predicted: np.ndarray, truth: np.ndarray, parts: Parts, target: float) -> float:
    """(plan - best) / (all FP4 - best) by the true costs of single linears."""

    def cost(costs: np.ndarray) -> float:
        plan = plan_by(np.stack([np.zeros_like(costs), costs], axis=1), parts, target)
        return float(sum(t for t, precision in zip(truth, plan.values(), strict=True) if precision == FP4))

    best = cost(truth)
    return (cost(predicted) - best) / (float(truth.sum()) - best)


def gains_in_bf16(folder: Path, parts: Parts, iteration: int, stats: ProbeStats) -> np.ndarray:
    """Gain of the backward noise with BF16 compute by that with float32, where there is one."""
    _, other = make_parts(folder, precision="snip", snip_start=10**6, bf16=True)
    for name, tensor in other.tensors().items():
        tensor.copy_(parts.tensors()[name])
    other.optimizer.set_steps(parts.optimizer.steps)
    low = probe(other, iteration)
    both = [(residual_gain(low, name), residual_gain(stats, name)) for name in stats.linears]
    other.train_loader.close()
    return np.sqrt([a / b for a, b in both if b > 0])


def rho_without_fwd(stats: ProbeStats) -> np.ndarray:
    """sqrt(own^2 + prop^2) of each linear in FP4: [L]."""
    names = list(stats.linears)
    return np.sqrt((own_divergence(stats, names, [FP4]) + prop_divergence(stats, names, [FP4]))[:, 0])


def scaled_with_sigma(parts: Parts, iteration: int) -> np.ndarray:
    """|D(3 sigma)|_F / |D(sigma)|_F of each linear's gradients by backward noise: [L]."""
    run_pass = parts.stepper.pass_runner(parts.train_loader.make((iteration - 1) * parts_batch(parts)), iteration)
    norms = []
    for sigma in (1e-4, 3e-4):  # no power of two, which would change no bit
        run_pass("backward_noise", sigma)
        names = [f"{name}.weight" for name in linears_of(parts)]
        norms.append([float(torch.linalg.vector_norm(parts.optimizer.gradient(name))) for name in names])
        parts.optimizer.zero_grad()
    return np.divide(norms[1], norms[0])


def at_checkpoint(parts: Parts, iteration: int, *, plans: bool, formats: tuple[str, ...]) -> dict[str, Any]:
    """Predictions and truth before an iteration, with outliers planted for the time.

    plans: also whole plans from end to end, and tiles along channels.  formats: others than FP4.
    """
    size = parts_batch(parts)
    others = batches(parts, iteration * size, 8, size)
    before = {name: tensor.clone() for name, tensor in parts.tensors().items()}
    plain = loss_of(parts, others)
    plant(parts)
    stats = probe(parts, iteration)
    names = list(stats.linears)
    updates = Updates(parts, parts.train_loader.make((iteration - 1) * size), iteration)
    truth = even_truth(parts, others, "fp4", names)
    predicted = loss_divergence(stats, names, [FP4])[:, 0]
    true_change = updates.change(FP4)
    without = rho_without_fwd(stats)
    found = {
        "names": names,
        "losses": (plain, loss_of(parts, others)),
        "dL": (predicted, truth),
        "own": (
            np.sqrt(own_divergence(stats, names, [FP4])[:, 0]),
            updates.change_of_wgrad("fp4"),
        ),
        "prop": (
            np.sqrt(prop_divergence(stats, names, [FP4])[:, 0]),
            updates.change(LinearPrecision("bf16", "fp4", "bf16")),
        ),
        "rho": (np.sqrt(weight_divergence(stats, names, [FP4])[:, 0]), true_change),
        "rho without fwd": (without, true_change),
        "rho without fwd, of dgrad and wgrad": (without, updates.change(LinearPrecision("bf16", "fp4", "fp4"))),
        "regret": regret(predicted, truth, parts, 0.75),
        "noise by sigma": scaled_with_sigma(parts, iteration),
        "stats": stats,
    }
    if plans:
        over = batches(parts, iteration * size, EVALUATED, EACH)
        found["end to end"] = end_to_end(parts, stats, truth, over)
        with tiles_along_channels():
            found["rho without fwd, tiles along channels"] = (
                rho_without_fwd(probe(parts, iteration)),
                updates.change(FP4),
            )
    for fmt in formats:
        one = probe(parts, iteration, (fmt,))
        precision = [LinearPrecision.uniform(fmt)]
        found[fmt] = (loss_divergence(one, names, precision)[:, 0], even_truth(parts, others, fmt, names))
    with torch.no_grad():
        for name, tensor in parts.tensors().items():
            tensor.copy_(before[name])
    return found


def measure(folder: Path, checkpoints: Sequence[str]) -> dict[str, Any]:
    """Everything the tests look at, by checkpoint, from a run in float32 compute."""
    config, parts = make_parts(folder, precision="snip", snip_start=10**6)
    start = parts.stepper.evaluate(parts.train_loader.make(0), 1)
    found: dict[str, Any] = {}
    done = 0
    for name in checkpoints:
        iteration = ITERATIONS[name]
        trained = train(config, parts, done + 1, iteration - 1)
        formats = ("nvfp4", "mxfp4") if name == "late" else ()
        found[name] = at_checkpoint(parts, iteration, plans=name != "early", formats=formats)
        found[name]["training"], done = (start, trained), iteration - 1
        found[name]["bf16 gain"] = gains_in_bf16(folder, parts, iteration, probe(parts, iteration))
    parts.train_loader.close()
    return found
