"""What trials are worth: the measured loss of the applied plan, beside the solver's own, rules, and an oracle.

    python -m examples.study.trials examples/study/settings/NAME.toml --checkpoints late,middle,early

For each checkpoint, granularity and target it writes DIR/NAME/CHECKPOINT/trials/GRANULARITY-TARGET.json: the mean
increase of the loss over BF16 in nats a token and its standard error over held-out batches, of

    plain       the solver's plan of the probe
    applied     what a run applies: `Trials` with --snip-trials passes over the tokens after the probe's
    lowest      FP4 everywhere
    layer_id, layer_type, random_0 ... random_2
    oracle      a local search by measured loss, from the better of plain and applied, in at most ROUNDS rounds: each
                flips the linears nearest to changing (by predicted cost per FLOP) one at a time, and then runs the
                swaps that promise most until one lowers the loss

The oracle searches on text of its own, half as much as a trial's, and a third text judges all arms, so it can end above
the plan that it started from.  Without an update, only fprop changes the loss: in plans by GEMM, dgrad and wgrad take
their share first, and the oracle chooses among fprops.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from examples.study.plans import Precisions, plan_by, probe, shapes_of
from examples.study.planted import linears_of
from examples.study.setting import read_setting
from examples.study.study import Study
from examples.study.truth import BF16, Sequences, batches, losses_of, precisions
from megatron_snip.config import Config
from megatron_snip.files.json import write_json
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.options import check_choices
from megatron_snip.snip.plan.pending import Pending
from megatron_snip.snip.planner import ask, pending_of
from megatron_snip.snip.predict.divergence import Predictions, loss_divergence
from megatron_snip.snip.trial import Proposals, Trials, first_plans, try_plan
from megatron_snip.train.setup import Parts

TARGETS = (0.75, 0.90, 0.80, 0.50)
RANDOM = 3
PROBED, TRIED, SEARCHED, JUDGED = 8, 8, 4, 32  # batches of 8 x 128 tokens
NEAREST, PAIRS, ROUNDS = 10, 12, 3  # rows that the oracle flips each way; pairs that it tries; rounds


class Losses:
    """Losses of plans over some batches.  Plans with the same formats in fprop are measured once."""

    def __init__(self, parts: Parts, over: Sequence[Any]) -> None:
        self.parts, self.over, self.known = parts, over, {}
        self.bf16 = self._of(dict.fromkeys(linears_of(parts), BF16))

    def _of(self, plan: Mapping[str, LinearPrecision]) -> np.ndarray:
        with precisions(self.parts, plan):
            return losses_of(self.parts, self.over)

    def of(self, plan: Mapping[str, LinearPrecision]) -> np.ndarray:
        """The increase above BF16 by batch [B], in nats per token."""
        key = tuple(precision.fprop for precision in plan.values())
        if key not in self.known:
            self.known[key] = self._of(plan) - self.bf16
        return self.known[key]

    def mean(self, plan: Mapping[str, LinearPrecision]) -> float:
        """The mean increase above BF16."""
        return float(self.of(plan).mean())

    def judged(self, plan: Mapping[str, LinearPrecision]) -> dict[str, float]:
        """The mean increase, and its standard error over batches."""
        values = self.of(plan)
        return {"increase": float(values.mean()), "error": float(values.std(ddof=1) / len(values) ** 0.5)}


def searched(start: Precisions, cost: np.ndarray, weight: np.ndarray, need: float, losses: Losses) -> Precisions:
    """Search from a plan by swapping linears whose fprop is in FP4, while FP4 keeps the share ``need`` of the FLOPs.

    weight [L]: each linear's share of the FLOPs.  cost [L]: predicted cost of FP4 beyond FP8's; it selects the linears
    that are flipped.
    """
    names = list(start)

    def as_plan(x: np.ndarray) -> Precisions:
        found = {}
        for name, low in zip(names, x, strict=True):
            found[name] = dataclasses.replace(start[name], fprop="fp4" if low else "fp8")
        return found

    x = np.array([start[name].fprop == "fp4" for name in names])
    best = losses.mean(as_plan(x))
    for _ in range(ROUNDS):
        order = np.argsort(cost / weight)
        outs = [int(row) for row in order[::-1] if x[row]][:NEAREST]
        ins = [int(row) for row in order if not x[row]][:NEAREST]
        change = {}
        for row in (*outs, *ins):
            y = x.copy()
            y[row] ^= True
            change[row] = losses.mean(as_plan(y)) - best
        swaps: list[tuple[float, list[int]]] = []
        for out in outs:
            for rows in ([out], *([out, i] for i in ins), *([out, i, j] for i in ins for j in ins if i < j)):
                y = x.copy()
                y[rows] ^= True
                if float(weight @ y) >= need - 1e-9:
                    swaps.append((sum(change[row] for row in rows), rows))
        for pair in ([a, b] for a in outs for b in outs if a < b):
            for i in ins:
                y = x.copy()
                y[[*pair, i]] ^= True
                if float(weight @ y) >= need - 1e-9:
                    swaps.append((sum(change[row] for row in (*pair, i)), [*pair, i]))
        for _, rows in sorted(swaps, key=lambda swap: swap[0])[:PAIRS]:
            y = x.copy()
            y[rows] ^= True
            if (found := losses.mean(as_plan(y))) < best - 1e-6:
                x, best = y, found
                break
        else:
            break
    return as_plan(x)


class Cell:
    """A checkpoint, which is probed once and then planned for each granularity and target."""

    def __init__(self, study: Study, checkpoint: str) -> None:
        self.config, self.parts = study.at(checkpoint)
        self.iteration = study.setting.checkpoints[checkpoint]
        self.shapes = shapes_of(self.parts)
        self.stats = probe(self.parts, self.iteration, batches=PROBED, updates=False)
        size = self.config.training.global_batch_size
        first = (self.iteration - 1 + PROBED) * size
        self.tried = self._together(batches(self.parts, first, TRIED, size))
        take = partial(batches, self.parts, each=size)
        self.search = Losses(self.parts, take(first + TRIED * size, SEARCHED))
        self.judge = Losses(self.parts, take(first + 2 * TRIED * size, JUDGED))
        each = loss_divergence(self.stats, [LinearPrecision.uniform("fp8"), LinearPrecision.uniform("fp4")])
        self.cost = each[:, 1] - each[:, 0]

    @staticmethod
    def _together(found: Sequence[Sequences]) -> Sequences:
        """The batches as microbatches of one batch."""
        return Sequences(
            *(torch.cat([getattr(one, name) for one in found]) for name in ("tokens", "labels", "sample_index"))
        )

    def plan(self, config: Config, objective: str, seed: int = 0) -> tuple[Precisions, Pending, Any]:
        """The plan of an objective."""
        choices = check_choices(config.snip, self.shapes)
        request, _ = ask(config.snip, self.shapes, choices, self.stats, objective=objective, seed=seed)
        pending = pending_of(config.snip, choices, request, self.iteration)
        plan = pending.plan_of(request.solve(), self.shapes, "nominal")
        return plan.linears, pending, plan

    def applied(self, pending: Pending, plan: Any) -> dict[str, Any]:
        """What a run applies, and what it tried."""
        plan_of = partial(pending.plan_of, shapes=self.shapes, hardware="nominal")
        arguments = plan, pending.request, self.shapes, pending.precisions, plan_of, None
        trials = Trials(
            self.parts.stepper.trial_runner(self.tried, self.iteration), linears_of(self.parts), self.parts.mesh,
            torch.device("cpu"),
        )  # fmt: skip
        propose = Proposals(lambda: first_plans(*arguments), pending.request, self.shapes, pending.precisions, plan_of)
        tried, best = try_plan(trials, propose, self.config.snip.snip_trials, plan, Predictions.of(self.stats))
        assert best is not None and best.trial is not None
        return {"plan": best.linears, "name": best.trial.name, "passes": trials.passes, "predicted": tried[0].predicted,
                "tried": [msgspec.to_builtins(one.record) for one in tried]}  # fmt: skip

    def measure(self, granularity: str, target: float, path: Path) -> None:
        """Measure all arms of a granularity and target, and write them."""
        config = self.config.replace(snip_granularity=granularity, snip_target=target)
        plain, pending, plan = self.plan(config, "snip")
        applied = self.applied(pending, plan)
        arms = {"plain": plain, "applied": applied.pop("plan")}
        arms["lowest"] = dict.fromkeys(plain, LinearPrecision.uniform("fp4"))
        for rule in ("layer_id", "layer_type", *(f"random_{seed}" for seed in range(RANDOM))):
            name, _, seed = rule.partition("_") if rule.startswith("random") else (rule, "", "0")
            arms[rule] = self.plan(config, name, int(seed))[0]
        weight = np.array([shape.out_features * shape.in_features for shape in self.shapes], float)
        weight /= weight.sum()
        need = min(weight @ np.array([p.fprop == "fp4" for p in arms[arm].values()]) for arm in ("plain", "applied"))
        need = min(need, target if granularity == "linear" else max(0.0, 3 * target - 2))
        starts = sorted(("plain", "applied"), key=lambda arm: self.search.mean(arms[arm]))
        arms["oracle"] = searched(arms[starts[0]], self.cost, weight, need, self.search)
        if granularity == "gemm":  # whether one search or the other found better is decided on the search's text
            by_fprop = plan_by(np.stack([np.zeros_like(self.cost), self.cost], 1), self.shapes, max(need, 0.0))
            arms["oracle"] = min(
                arms["oracle"], searched(by_fprop, self.cost, weight, need, self.search), key=self.search.mean
            )
        judged = {arm: self.judge.judged(plan) for arm, plan in arms.items()}
        differences = self.judge.of(arms["applied"]) - self.judge.of(arms["oracle"])
        write_json(path, {
            **applied, "arms": judged, "applied - oracle": [
                float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)
            ],
            "passes of the oracle": len(self.search.known),
        })  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder of all settings")
    parser.add_argument("--checkpoints", default="late,middle,early")
    parser.add_argument("--granularities", default="linear,gemm")
    own = parser.parse_args(words)
    torch.set_num_threads(1)
    folder = own.output / own.setting.stem
    study = Study(read_setting(own.setting), folder)
    for checkpoint in own.checkpoints.split(","):
        cell = None
        for target, granularity in product(TARGETS, own.granularities.split(",")):
            path = folder / checkpoint / "trials" / f"{granularity}-{target:g}.json"
            if path.is_file():  # measured by an earlier run of this command
                continue
            cell = cell or Cell(study, checkpoint)
            cell.measure(granularity, target, path)
            print(path, flush=True)
    study.close()


if __name__ == "__main__":
    main()
