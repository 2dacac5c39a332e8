"""One model of the study: its checkpoints, and every piece of work at one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.study import quality
from examples.study.pieces import Piece, Worker, read_json, write_json
from examples.study.plans import (
    FP4,
    FP8,
    Precisions,
    key_of,
    options_of,
    oracle_quality,
    plan_as_run,
    plan_by,
    probe,
    shapes_of,
)
from examples.study.planted import State, linears_of, make_parts, plant, train
from examples.study.setting import Setting
from examples.study.truth import BF16, batches, even_truth, loss_of, losses_of, precisions
from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.cost import achieved
from megatron_snip.snip.predict.divergence import loss_divergence
from megatron_snip.train.setup import Parts

COMPUTES = {"float32": False, "bf16": True}
#: Plans that train on, at the setting's first target: with every seed, and beside them with the first alone.
EVERY_SEED = (
    ("uniform", "bf16"), ("linear", "dL"), ("linear", "dL+own"), ("gemm", "dL"), ("gemm", "dL+own"),
)  # fmt: skip
FIRST_SEED = (
    ("uniform", "all fp8"), ("uniform", "all fp4"), ("linear", "oracle"), ("linear", "random_0"),
    ("linear", "abs_err"), ("linear", "random_1"),
)  # fmt: skip


class Study:
    """The models of a setting in a folder; ``at`` brings one to a checkpoint, with outliers planted."""

    def __init__(self, setting: Setting, folder: Path, worker: Worker) -> None:
        self.setting, self.folder, self.worker = setting, folder, worker
        self._made: dict[str, tuple[Config, Parts]] = {}
        self._stand: dict[str, str] = {}  # run -> the checkpoint where it stands, before it was changed

    def run_of(self, name: str, **options: Any) -> tuple[Config, Parts]:
        """The run of that name, made when first asked for."""
        if name not in self._made:
            self.folder.mkdir(parents=True, exist_ok=True)
            every = {**self.setting.options(), **options}
            self._made[name] = make_parts(self.folder, self.setting.text, **every)
        return self._made[name]

    @property
    def config(self) -> Config:
        """Of the run that gives the checkpoints."""
        return self.run_of("float32")[0]

    def close(self) -> None:
        """End all read-ahead."""
        for _, parts in self._made.values():
            parts.train_loader.close()

    def checkpoint_path(self, checkpoint: str) -> Path:
        """Weights and moments before the checkpoint's iteration, nothing planted."""
        return self.folder / f"{checkpoint}.pt"

    def train_to(self, checkpoint: str) -> None:
        """Make the file of a checkpoint, and of those before it, where they are missing."""
        iterations = sorted(self.setting.checkpoints.items(), key=lambda item: item[1])
        config, parts = self.run_of("float32")
        self._stand.pop("float32", None)  # nothing is planted in what comes
        done = 0
        for name, iteration in iterations:
            if (path := self.checkpoint_path(name)).is_file():
                if iteration <= self.setting.checkpoints[checkpoint]:
                    self._load(name, parts)
                    done = iteration - 1
            elif iteration <= self.setting.checkpoints[checkpoint]:
                loss = train(config, parts, done + 1, iteration - 1)
                done = iteration - 1
                kept = {"tensors": State(parts).tensors, "steps": parts.optimizer.steps, "loss": loss}
                torch.save(kept, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
                self.worker.say(f"trained to iteration {done}: loss {loss:.3f}")

    @torch.no_grad()
    def _load(self, checkpoint: str, parts: Parts) -> None:
        kept = torch.load(self.checkpoint_path(checkpoint))
        for name, tensor in parts.tensors().items():
            tensor.copy_(kept["tensors"][name])
        parts.optimizer.set_steps(kept["steps"])

    def at(self, checkpoint: str, name: str = "float32", **options: Any) -> tuple[Config, Parts]:
        """A run at a checkpoint, outliers planted."""
        config, parts = self.run_of(name, **options)
        if self._stand.get(name) != checkpoint:
            self._load(checkpoint, parts)
            plant(parts, self.setting.planted_seed, self.setting.planted)
            self._stand[name] = checkpoint
        return config, parts

    def held_out(self, checkpoint: str, parts: Parts, skip: int, count: int) -> list[Any]:
        """``count`` batches of the run's own text, ``skip`` batches after the probe's: no step has seen them."""
        size = self.config.training.global_batch_size
        return batches(parts, (self.setting.checkpoints[checkpoint] + skip) * size, count, size)

    def compute(self, checkpoint: str, compute: str) -> Parts:
        """A run in float32 or BF16 compute at the checkpoint."""
        return self.at(checkpoint, compute, bf16=COMPUTES[compute])[1]

    # ---- measurements ------------------------------------------------------------------------------------------

    def measurements(self, checkpoint: str) -> list[Piece]:
        """Probes, loss statistics of more batches, and the truth."""
        folder = self.folder / checkpoint
        pieces = []
        for compute in COMPUTES:
            pieces += [
                Piece("probe", folder / f"probe-{compute}.json", partial(self._probe, checkpoint, compute)),
                Piece("tokens", folder / f"tokens-{compute}.json", partial(self._tokens, checkpoint, compute)),
            ]
        return [*pieces, Piece("truth", folder / "truth.json", partial(self._truth, checkpoint))]

    def _probe(self, checkpoint: str, compute: str, path: Path) -> None:
        probe(self.compute(checkpoint, compute), self.setting.checkpoints[checkpoint]).save(path)

    def _tokens(self, checkpoint: str, compute: str, path: Path) -> None:
        parts, first = self.compute(checkpoint, compute), self.setting.checkpoints[checkpoint] + 1
        found = []
        for iteration in range(first, first + self.setting.token_batches):
            stats = probe(parts, iteration, updates=False)
            divergence = loss_divergence(stats, [FP8, FP4])
            found.append(((divergence[:, 1] - divergence[:, 0]) / stats.loss).tolist())
        write_json(path, {"tokens": stats.tokens, "dL": found})

    def _truth(self, checkpoint: str, path: Path) -> None:
        parts, s = self.compute(checkpoint, "float32"), self.setting
        over = self.held_out(checkpoint, parts, s.token_batches, s.truth_batches)
        names = list(linears_of(parts))
        write_json(path, dict(zip(names, even_truth(parts, over, "fp4", names).tolist(), strict=True)))

    # ---- plans -------------------------------------------------------------------------------------------------

    def plans_piece(self, checkpoint: str) -> Piece:
        """All arms' plans at all targets, from what was measured."""
        return Piece("plans", self.folder / checkpoint / "plans.json", partial(self._plans, checkpoint))

    def stats_of(self, checkpoint: str, compute: str) -> Statistics:
        """What the probe measured."""
        return Statistics.load(self.folder / checkpoint / f"probe-{compute}.json")

    def truth_of(self, checkpoint: str) -> np.ndarray:
        """True costs [L] of FP4 in nats, in the linears' order."""
        return np.array(list(read_json(self.folder / checkpoint / "truth.json").values()))

    def _arms(self, checkpoint: str, granularity: str) -> Iterator[tuple[str, np.ndarray]]:
        """Every arm of a granularity with its quality loss [L, O]."""
        config, parts = self.run_of("float32")
        shapes, options = shapes_of(parts), options_of(config, granularity, shapes_of(parts))
        names = {"linear": quality.arms(), "gemm": list(quality.BY_GEMM)}[granularity]
        stats = {compute: self.stats_of(checkpoint, compute) for compute in COMPUTES}
        for arm in names:
            yield arm, quality.quality_of(arm, stats["float32"], shapes, options)
            if arm in quality.IN_BF16:
                yield f"{arm} (BF16 probe)", quality.quality_of(arm, stats["bf16"], shapes, options)
        if granularity == "linear":
            assert options == (FP8, FP4)
            yield quality.ORACLE, oracle_quality(self.truth_of(checkpoint))

    def _plans(self, checkpoint: str, path: Path) -> None:
        config, parts = self.run_of("float32")
        shapes = shapes_of(parts)
        uniform = {name: dict.fromkeys(linears_of(parts), p) for name, p in
                   {"bf16": BF16, "all fp8": FP8, "all fp4": FP4}.items()}  # fmt: skip
        plans: dict[str, Precisions] = {key_of(plan): plan for plan in uniform.values()}
        chosen: dict[str, dict[str, str]] = {"uniform": {name: key_of(plan) for name, plan in uniform.items()}}
        for granularity in ("linear", "gemm"):
            for arm, values in self._arms(checkpoint, granularity):
                for target in self.setting.targets:
                    if granularity == "linear":
                        plan = plan_by(values, shapes, target)
                    else:
                        plan = plan_as_run(config, values, shapes, granularity, target)
                    plans[key_of(plan)] = plan
                    chosen.setdefault(f"{granularity} {target}", {})[arm] = key_of(plan)
        known = {
            key: {"share": achieved(shapes, plan), "switch": key_of(plan, fprop=True),
                  "linears": {name: str(precision) for name, precision in plan.items()}}
            for key, plan in plans.items()
        }  # fmt: skip
        write_json(path, {"chosen": chosen, "plans": known})

    def read_plans(self, checkpoint: str) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
        """(granularity and target -> arm -> plan's key, key -> plan)."""
        found = read_json(self.folder / checkpoint / "plans.json")
        return found["chosen"], found["plans"]

    # ---- what plans do -----------------------------------------------------------------------------------------

    def evaluations(self, checkpoint: str, targets: tuple[float, ...]) -> list[Piece]:
        """The loss of every distinct plan at the switch; dgrad and wgrad do not matter for it.

        At other targets than the setting's first, and at other checkpoints than its thorough one, the arms of
        ``quality.LEFT_OUT`` are left out.
        """
        chosen, plans = self.read_plans(checkpoint)
        groups = ["uniform", *(f"{g} {t}" for t in targets for g in ("linear", "gemm"))]
        few = targets != self.setting.targets[:1] or checkpoint != self.setting.thorough
        keys = dict.fromkeys(
            key for group in groups for arm, key in chosen[group].items() if not (few and arm in quality.LEFT_OUT)
        )
        distinct = {plans[key]["switch"]: plans[key]["linears"] for key in keys}
        return [
            Piece("plan", self.folder / checkpoint / "switch" / f"{switch}.json",
                  partial(self._evaluate, checkpoint, linears))
            for switch, linears in distinct.items()
        ]  # fmt: skip

    def _evaluate(self, checkpoint: str, linears: Mapping[str, str], path: Path) -> None:
        parts, s = self.compute(checkpoint, "float32"), self.setting
        over = self.held_out(checkpoint, parts, s.token_batches + s.truth_batches, s.evaluated_batches)
        with precisions(parts, {name: LinearPrecision.parse(text) for name, text in linears.items()}):
            write_json(path, {"losses": losses_of(parts, over).tolist()})

    def further(self, checkpoint: str, seeds: int) -> list[Piece]:
        """Steps with a plan in force: every plan of ``EVERY_SEED`` and ``FIRST_SEED`` that is another one."""
        chosen, plans = self.read_plans(checkpoint)
        target, pieces = self.setting.targets[0], []
        for seed in self.setting.further_seeds[:seeds]:
            arms = EVERY_SEED + (FIRST_SEED if seed == self.setting.further_seeds[0] else ())
            keys = [chosen[group if group == "uniform" else f"{group} {target}"][arm] for group, arm in arms]
            pieces += [
                Piece("further", self.folder / checkpoint / "further" / f"{key}-{seed}.json",
                      partial(self._train_on, checkpoint, plans[key]["linears"], seed))
                for key in dict.fromkeys(keys)
            ]  # fmt: skip
        return pieces

    def _train_on(self, checkpoint: str, linears: Mapping[str, str], seed: int, path: Path) -> None:
        name, s = f"further {seed}", self.setting
        config, parts = self.at(checkpoint, name, **s.further_options(seed))
        start = State(parts)
        _, whole = self.run_of("float32")
        assert whole.valid_loader is not None
        size = self.config.training.global_batch_size
        over = [whole.valid_loader.make(i * size) for i in range(s.evaluated_batches)]
        try:
            with precisions(parts, {n: LinearPrecision.parse(text) for n, text in linears.items()}):
                train(config, parts, 1, s.further_steps)
                losses = [loss_of(parts, [batch]) for batch in over]
        finally:
            start.restore(parts)
        write_json(path, {"loss": float(np.mean(losses)), "losses": losses})
