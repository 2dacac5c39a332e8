"""Whether a plan by GEMM trains as well as a plan by linear with the same share of FP4.

    python -m examples.study.granularity [--seeds 1,2,3] [--weights 0,1]

Fifty training steps with the plan of each granularity, from one state of a small run with planted outliers, for three
seeds of weights, data order and rounding; ten minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from examples.study.plans import Precisions, options_of, plan_as_run, probe
from examples.study.planted import State, make_parts, plant, train
from examples.study.truth import loss_of, precisions
from megatron_snip.config import Config
from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.predict.objectives import ObjectiveInputs, quality_loss
from megatron_snip.train.setup import Parts, snip_shapes

TARGET = 0.75
#: Iterations before the probe, and those after it that a plan trains.
BASE, STEPS = 120, 50
EVALUATED, FEW = 32, 4  # batches of validation
#: Half of planted.py's tokens an iteration, for time; a tenth of the files is for validation.  The learning rate has
#: fallen by the time of the probe: at a high one the model unlearns the outliers in 50 steps, and all plans end alike.
CHANGED = {
    "micro_batch_size": 4, "global_batch_size": 4, "lr_decay_iters": BASE, "min_lr": 1e-4,
    "split": "90,10,0", "eval_interval": 10**6, "eval_iters": EVALUATED, "snip_start": 10**6,
}  # fmt: skip


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


def measure(folder: Path, seed: int, weight: float, target: float = TARGET) -> dict[str, Any]:
    """Losses and plans for one seed: of initial weights, order of data and stochastic rounding."""
    config, parts = make_parts(folder, precision="snip", seed=seed, **CHANGED)
    assert parts.valid_loader is not None
    size = config.training.global_batch_size
    over = [parts.valid_loader.batch(i * size) for i in range(EVALUATED)]
    losses = [loss_of(parts, over[:FEW])]
    train(config, parts, 1, BASE)
    losses.append(loss_of(parts, over[:FEW]))
    plant(parts)
    losses.append(loss_of(parts, over[:FEW]))
    stats, shapes = probe(parts, BASE + 1), snip_shapes(config)

    def plan_of(granularity: str, share: float) -> Precisions:
        options = options_of(config, granularity, shapes)
        quality, _ = quality_loss("snip", ObjectiveInputs(shapes, options, stats, weight))
        return plan_as_run(config, quality, shapes, granularity, share)

    plans = {"linear": plan_of("linear", target)}
    # Whole linears may overshoot the target: the other plan has to reach what this one does.
    plans["gemm"] = plan_of("gemm", achieved(shapes, plans["linear"]))
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


def main(words: list[str] | None = None) -> None:
    """Print what each seed found, and the mean of plan by GEMM less plan by linear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="by comma")
    parser.add_argument("--weights", default="0,1", help="--snip-weight of the objective, by comma")
    args = parser.parse_args(words)
    for weight in map(float, args.weights.split(",")):
        differences = []
        for seed in map(int, args.seeds.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(Path(folder), seed, weight)
            differences.append(found["after"]["gemm"] - found["after"]["linear"])
            new, trained, planted = found["losses"]
            print(f"weight {weight:g}, seed {seed}: loss {new:.2f}, trained {trained:.3f}, planted {planted:.3f}; then")
            for name, loss in found["after"].items():
                print(f"  {name:6} {loss:.5f} nats, {found['plans'][name]}", flush=True)
        spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else float("nan")
        print(
            f"weight {weight:g}: gemm - linear, mean {np.mean(differences):.5f}, spread {spread:.5f} nats", flush=True
        )


if __name__ == "__main__":
    main()
