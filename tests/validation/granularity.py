"""Fifty training steps with the plan of each granularity, from one state of a small run with planted outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.study.planted import State, make_parts, plant, train
from examples.study.truth import loss_of, precisions
from megatron_snip.config import Config
from megatron_snip.quant import GEMMS, LinearPrecision
from megatron_snip.snip.cost import achieved
from megatron_snip.snip.objectives import ObjectiveInputs, finite_or_held, get_objective
from megatron_snip.snip.options import read_choices, solve_request
from megatron_snip.snip.stats import ProbeStats
from megatron_snip.train.setup import Parts, snip_shapes

OBJECTIVE, TARGET = "snip", 0.75
#: Iterations before the probe, and those after it that a plan trains.
BASE, STEPS = 120, 50
EVALUATED, FEW = 32, 4  # batches of validation
#: Half of planted.py's tokens an iteration, for time; a tenth of the files is for validation.  The learning rate has
#: fallen by the time of the probe: at a high one the model unlearns the outliers in 50 steps, and all plans end alike.
CHANGED = {
    "micro_batch_size": 4, "global_batch_size": 4, "lr_decay_iters": BASE, "min_lr": 1e-4,
    "split": "90,10,0", "eval_interval": 1, "eval_iters": EVALUATED, "snip_start": 10**6,
}  # fmt: skip

Precisions = dict[str, LinearPrecision]


def probe(parts: Parts, config: Config, iteration: int) -> ProbeStats:
    """What the objective needs to know, from the batch of an iteration to come."""
    batch = parts.train_loader.batch((iteration - 1) * config.training.global_batch_size)
    assert parts.coordinator is not None
    return parts.coordinator.probe.run(
        parts.stepper.pass_runner(batch, iteration),
        parts.optimizer.zero_grad,
        iteration,
        get_objective(OBJECTIVE).passes or (),
    )


def plan_of(config: Config, stats: ProbeStats, granularity: str, target: float) -> Precisions:
    """The plan that a run with these options would take."""
    snip = config.replace(snip_granularity=granularity, snip_target=target, snip_objective=OBJECTIVE).snip
    shapes = snip_shapes(config)
    choices = read_choices(snip, shapes)
    inputs = ObjectiveInputs(shapes, choices.options, stats, update_weight=snip.snip_weight)
    quality, held, _ = finite_or_held(OBJECTIVE, inputs)
    chosen = solve_request(snip, shapes, choices, quality, held=held).solve().choice
    return {shape.name: choices.options[int(option)] for shape, option in zip(shapes, chosen, strict=True)}


def loss_after(config: Config, parts: Parts, plan: Precisions, over: list[Any]) -> float:
    """Validation loss after the steps with a plan, in its own precisions as a user's run has it."""
    with precisions(parts, plan):
        train(config, parts, BASE + 1, BASE + STEPS)
        return loss_of(parts, over)


def described(config: Config, plan: Precisions) -> dict[str, Any]:
    """FP4's share of the linears' FLOPs, FP4 GEMMs by type, linears whose GEMMs differ."""
    found: dict[str, Any] = {"share": achieved(snip_shapes(config), plan)}
    found |= {gemm: sum(getattr(precision, gemm) == "fp4" for precision in plan.values()) for gemm in GEMMS}
    return found | {"mixed": sum(len({getattr(p, gemm) for gemm in GEMMS}) > 1 for p in plan.values())}


def measure(folder: Path, seed: int, target: float = TARGET) -> dict[str, Any]:
    """Everything the tests look at for one seed: of initial weights, order of data and stochastic rounding."""
    config, parts = make_parts(folder, precision="snip", seed=seed, **CHANGED)
    assert parts.valid_loader is not None
    size = config.training.global_batch_size
    over = [parts.valid_loader.batch(i * size) for i in range(EVALUATED)]
    losses = [loss_of(parts, over[:FEW])]
    train(config, parts, 1, BASE)
    losses.append(loss_of(parts, over[:FEW]))
    plant(parts)
    losses.append(loss_of(parts, over[:FEW]))
    stats = probe(parts, config, BASE + 1)
    plans = {"linear": plan_of(config, stats, "linear", target)}
    # Whole linears may overshoot the target: the other plan has to reach what this one does.
    plans["gemm"] = plan_of(config, stats, "gemm", achieved(snip_shapes(config), plans["linear"]))
    state, after = State(parts), {}
    for name, plan in plans.items():
        state.restore(parts)
        after[name] = loss_after(config, parts, plan, over)
    parts.train_loader.close()
    flops = [shape.gemm_flops for shape in snip_shapes(config)]
    return {
        "losses": losses,  # with new weights, trained, planted
        "plans": {name: described(config, plan) for name, plan in plans.items()},
        "unit": min(flops) / (len(GEMMS) * sum(flops)),  # share of the smallest linear's GEMM
        "after": after,
    }
