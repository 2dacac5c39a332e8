"""What a probe predicts and what is true, at checkpoints of one small training run with planted outliers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.study.plans import FP4, OPTIONS, oracle_quality, parts_batch, plan_by, probe, regret, shapes_of
from examples.study.planted import State, linears_of, make_parts, plant, train
from examples.study.truth import batches, even_truth, loss_of, losses_of, precisions
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.divergence import (
    loss_divergence,
    own_divergence,
    prop_divergence,
    residual_gain,
    weight_divergence,
)
from megatron_snip.snip.objectives import OBJECTIVES, ObjectiveInputs, get_objective, quality_loss
from megatron_snip.snip.stats import ProbeStats
from megatron_snip.train.setup import Parts
from tests.validation.truth import Updates, tiles_along_channels

ITERATIONS = {"early": 75, "mid": 150, "late": 300}
TARGETS = (0.75, 0.80)
RANDOM_PLANS = 5
#: Whole batches that gave no statistics, of as many sequences each: with 80 sequences in all, two plans that differ by
#: a fifth over 256 differed by half.
EVALUATED, EACH = 32, 8


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

    shapes = shapes_of(parts)
    for target in TARGETS:
        found[f"oracle {target}"] = increase(plan_by(oracle_quality(truth), shapes, target))
        for name in OBJECTIVES:
            seeds = range(RANDOM_PLANS) if name == "random" else [0]
            given = stats if get_objective(name).needs_stats else None
            for seed in seeds:
                quality = quality_loss(name, ObjectiveInputs(shapes, OPTIONS, given, seed=seed))
                key = f"random_{seed} {target}" if name == "random" else f"{name} {target}"
                found[key] = increase(plan_by(quality, shapes, target))
    found["all fp4"] = increase(dict.fromkeys(stats.linears, FP4))
    return found


def gains_in_bf16(folder: Path, parts: Parts, iteration: int, stats: ProbeStats) -> np.ndarray:
    """Gain of the backward noise with BF16 compute by that with float32, where there is one."""
    _, other = make_parts(folder, precision="snip", snip_start=10**6, bf16=True)
    State(parts).restore(other)
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
    before = State(parts)
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
        "regret": regret(predicted, truth, shapes_of(parts), 0.75),
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
    before.restore(parts)
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
