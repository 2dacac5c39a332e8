"""A setting of the study, one TOML file: a model, its text, where outliers stand, and how much is measured."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.errors import UserError
from megatron_snip.files.io import read_file


@dataclass(frozen=True)
class Setting:
    """What a TOML file says; every field has a default there or here."""

    name: str  # for people
    model: dict[str, Any]  # options of the command line with underscores, beside those of planted.OPTIONS
    text: tuple[str, str] = ("torch", "distributed")  # package, folder in it
    planted: tuple[tuple[int, int], ...] = ()  # (block, place) as in planted.PLANTED
    planted_seed: int = 0
    checkpoints: dict[str, int] = dataclasses.field(default_factory=lambda: {"early": 75, "middle": 150, "late": 300})
    thorough: str = "middle"  # the checkpoint where every arm is evaluated at the first target
    targets: tuple[float, ...] = (0.75, 0.90, 0.80, 0.50)  # the first is that of further training
    truth_batches: int = 8
    token_batches: int = 8  # that regret against probe tokens is told from
    evaluated_batches: int = 32
    further_steps: int = 100
    further_batch: int = 4  # sequences a step
    further_lr: float = 1e-4
    further_seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def iterations(self) -> int:
        """Iterations of the run that gives the checkpoints."""
        return max(self.checkpoints.values())

    @property
    def spare(self) -> int:
        """Batches after the last checkpoint's that measurements need."""
        return self.token_batches + self.truth_batches + self.evaluated_batches + 2

    def options(self) -> dict[str, Any]:
        """Of the run that gives the checkpoints: a tenth of the files is for validation."""
        end = self.iterations
        return {
            "lr_decay_iters": end, "train_iters": end + self.spare, "split": "90,10,0",
            "eval_interval": 10**6, "eval_iters": self.evaluated_batches, "precision": "snip",
            "snip_start": 10**6, **self.model,
        }  # fmt: skip

    def further_options(self, seed: int) -> dict[str, Any]:
        """Of the steps after a checkpoint: another order of data, a low and constant learning rate."""
        steps = self.further_steps
        return {
            **self.options(), "seed": seed, "lr": self.further_lr, "min_lr": self.further_lr, "lr_warmup_iters": 0,
            "lr_decay_style": "constant", "train_iters": max(steps, 1), "lr_decay_iters": max(steps, 1),
            "micro_batch_size": self.further_batch, "global_batch_size": self.further_batch,
        }  # fmt: skip


def _tuples(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_setting(path: Path) -> Setting:
    """Read a TOML file.  UserError naming the file if it is none, for names that no field has, and for missing ones."""
    data = read_file(path, "setting", "give one such as examples/study/settings/6_gqa_planted.toml")
    try:
        values = tomllib.loads(data.decode())
    except ValueError as error:
        raise UserError(f"{path}: this setting is no TOML ({error}); mend it") from None
    known = {field.name for field in dataclasses.fields(Setting)}
    if unknown := sorted(values.keys() - known):
        raise UserError(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if missing := sorted({"name", "model"} - values.keys()):
        raise UserError(f"{path}: {', '.join(missing)} missing; add it")
    return Setting(**{key: _tuples(value) for key, value in values.items()})
