"""What a probe predicts and what is true, at checkpoints of small training runs with planted outliers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.study.plans import FP4, OPTIONS, oracle_quality, parts_batch, plan_by, probe, regret, shapes_of
from examples.study.planted import State, linears_of, make_parts, plant, train
from examples.study.truth import batches, even_truth, loss_of, losses_of, precisions
from megatron_snip.config import SnipConfig
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.measure.updates import adam_update
from megatron_snip.snip.predict.divergence import loss_divergence, weight_divergence
from megatron_snip.snip.predict.objectives import OBJECTIVES, ObjectiveInputs, get_objective, quality_loss
from megatron_snip.train.setup import Parts

#: Where predictions are checked: before which iteration, and the run's options beside those of planted.py.
CHECKPOINTS: dict[str, tuple[int, dict[str, int]]] = {
    "narrow": (150, {"hidden_size": 128, "ffn_hidden_size": 384, "seed": 2}),
    "early": (75, {}), "mid": (150, {}), "late": (300, {}),
    "mid, seed 1": (150, {"seed": 1}), "mid, seed 2": (150, {"seed": 2}), "mid, seed 3": (150, {"seed": 3}),
}  # fmt: skip
TARGETS = (0.75, 0.80)
#: Random plans at a checkpoint: the mean of five has a standard error of a tenth, which decided where a ratio to it is
#: near its bound; the narrow model's is far away.
RANDOM_PLANS = {name: 5 if name == "narrow" else 20 for name in CHECKPOINTS if name != "early"}
#: Whole batches that gave no statistics, of as many sequences each: with 80 sequences in all, two plans that differ by
#: a fifth over 256 differed by half.
EVALUATED, EACH = 32, 8
#: Of them for rules and all FP4, which cost ten times as much as the plans that are compared with the oracle's.
FEWER = 8
#: Batches of the truth of single linears: with 8 its own noise took 0.06 of the early checkpoint's rank correlation;
#: with 4, up to 0.16 at the others.
TRUE, TRUE_EARLY = 8, 16


def end_to_end(
    parts: Parts, stats: Statistics, snip: np.ndarray, truth: np.ndarray, over: list[Any], random: int
) -> dict[str, np.ndarray]:
    """Loss increase in nats of each objective's plan on each batch [B], by "objective target"; also of the oracle's
    and of all FP4.  snip [L, 2]: the quality loss of FP8 and FP4 by all tokens, of the rules by one batch.  random: how
    many plans of it.
    """
    base, found = losses_of(parts, over), {}
    known: dict[tuple[str, ...], np.ndarray] = {}  # by plan: objectives often agree

    def increase(plan: dict[str, LinearPrecision], count: int = FEWER) -> np.ndarray:
        key = (*map(str, plan.values()), str(count))
        if key not in known:
            with precisions(parts, plan):
                known[key] = losses_of(parts, over[:count]) - base[:count]
        return known[key]

    shapes = shapes_of(parts)
    for target in TARGETS:
        found[f"oracle {target}"] = increase(plan_by(oracle_quality(truth), shapes, target), len(over))
        for name in OBJECTIVES:
            seeds = range(random) if name == "random" else [0]
            given = stats if get_objective(name).needs_stats else None
            for seed in seeds:
                quality = snip
                if name != "snip":
                    quality, _ = quality_loss(name, ObjectiveInputs(shapes, OPTIONS, given, seed=seed))
                key = f"random_{seed} {target}" if name == "random" else f"{name} {target}"
                found[key] = increase(plan_by(quality, shapes, target), len(over) if name == "snip" else FEWER)
    found["all fp4"] = increase(dict.fromkeys(stats.names, FP4))
    return found


def change_of_wgrad(parts: Parts, batch: Any, iteration: int, fmt: str) -> np.ndarray:
    """|u - u0|_F / U of each linear's update with wgrad alone in a format: [L].

    All linears at once: wgrad's error reaches no other linear.
    """
    clip = parts.stepper.gradients(batch, iteration)[0].clip

    def updates() -> list[Any]:
        adam, found = parts.coordinator.probe.updates.adam, []
        for name in linears_of(parts):
            moments = parts.optimizer.moments(f"{name}.weight")
            grad = parts.optimizer.gradient(f"{name}.weight") * clip
            found.append(adam_update(grad, *moments, parts.optimizer.steps + 1, adam).double())
        parts.optimizer.zero_grad()
        return found

    base = updates()
    with precisions(parts, dict.fromkeys(linears_of(parts), LinearPrecision("bf16", "bf16", fmt))):
        parts.stepper.gradients(batch, iteration)
    changes = [float((u - u0).square().sum()) for u, u0 in zip(updates(), base, strict=True)]
    return np.sqrt(np.array(changes) / sum(float(u.square().sum()) for u in base))


def at_checkpoint(parts: Parts, iteration: int, *, true: int, random: int, formats: tuple[str, ...]) -> dict[str, Any]:
    """Predictions and truth before an iteration, with outliers planted for the time.

    true: batches of the truth.  random: how many random plans beside the others from end to end; 0: no plans at all.
    formats: others than FP4.
    """
    size = parts_batch(parts)
    # what a run takes: as many batches as --snip-probe-tokens asks for; the first of them is the coming iteration's
    probed = -(-SnipConfig().snip_probe_tokens // parts.coordinator.probe.tokens)
    others = batches(parts, (iteration - 1 + probed) * size, true, size)
    before = State(parts)
    plain = loss_of(parts, others)
    plant(parts)
    one = probe(parts, iteration)
    more = [probe(parts, iteration + ahead, updates=False) for ahead in range(1, probed)]
    each = [loss_divergence(stats, OPTIONS) for stats in (one, *more)]
    truth = even_truth(parts, others, "fp4", one.names)
    of_one, every = each[0][:, 1], np.mean(each, axis=0)
    batch = parts.train_loader.make((iteration - 1) * size)
    found = {
        "names": one.names,
        "losses": (plain, loss_of(parts, others)),
        "dL": (of_one, truth),
        "dL, all tokens": (every[:, 1], truth),
        "own": (np.sqrt(weight_divergence(one, [FP4])[:, 0]), change_of_wgrad(parts, batch, iteration, "fp4")),
        "regret": regret(of_one, truth, shapes_of(parts), 0.75),
    }
    if random:
        over = batches(parts, (iteration - 1 + probed) * size, EVALUATED, EACH)
        found["end to end"] = end_to_end(parts, one, every - every[:, :1], truth, over, random)
    for fmt in formats:
        other = loss_divergence(probe(parts, iteration, (fmt,), updates=False), [LinearPrecision.uniform(fmt)])
        found[fmt] = (other[:, 0], even_truth(parts, others, fmt, one.names))
    before.restore(parts)
    return found


def measure(folder: Path, checkpoints: Sequence[str]) -> dict[str, Any]:
    """Everything the tests look at, by checkpoint, all of one run in float32 compute."""
    (options,) = {tuple(CHECKPOINTS[name][1].items()) for name in checkpoints}
    config, parts = make_parts(folder, precision="snip", snip_start=10**6, **dict(options))
    start = parts.stepper.evaluate(parts.train_loader.make(0), 1)
    found: dict[str, Any] = {}
    done = 0
    for name in checkpoints:
        iteration = CHECKPOINTS[name][0]
        trained = train(config, parts, done + 1, iteration - 1)
        formats = ("nvfp4_plain", "mxfp4_floor") if name == "late" else ()
        true, random = TRUE_EARLY if name == "early" else TRUE, RANDOM_PLANS.get(name, 0)
        found[name] = at_checkpoint(parts, iteration, true=true, random=random, formats=formats)
        found[name]["training"], done = (start, trained), iteration - 1
    parts.train_loader.close()
    return found
