"""A setting of the study, one TOML file: a model, its text, and where outliers are planted."""

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
    """The content of a TOML file."""

    name: str  # for people
    model: dict[str, Any]  # options of the command line with underscores, beside those of planted.OPTIONS
    text: tuple[str, str] = ("torch", "distributed")  # package, folder in it
    planted: tuple[tuple[int, int], ...] = ()  # (block, place) as in planted.PLANTED
    planted_seed: int = 0
    checkpoints: dict[str, int] = dataclasses.field(default_factory=lambda: {"early": 75, "middle": 150, "late": 300})
    spare: int = 50  # batches after the last checkpoint's, for measurements; they are a part of the order of samples

    def options(self) -> dict[str, Any]:
        """Of the run that gives the checkpoints; a tenth of the files is left out."""
        end = max(self.checkpoints.values())
        return {
            "lr_decay_iters": end, "train_iters": end + self.spare, "split": "90,10,0", "precision": "snip",
            "snip_start": 10**6, **self.model,
        }  # fmt: skip


def _tuples(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_values(path: Path, what: str, example: str) -> dict[str, Any]:
    """The content of a TOML file.  Raises UserError if it is not one."""
    data = read_file(path, what, f"give one such as examples/study/{example}")
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:
        raise UserError(f"{path}: this {what} is not TOML ({error}); correct it") from None


def check_fields(path: Path, values: dict[str, Any], kind: type) -> None:
    """Raise UserError for names that are not fields of a dataclass, and for fields without a value."""
    fields = dataclasses.fields(kind)
    needed = {each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING}
    if unknown := sorted(values.keys() - {each.name for each in fields}):
        raise UserError(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(each.name for each in fields)}")
    if missing := sorted(needed - values.keys()):
        raise UserError(f"{path}: {', '.join(missing)} missing; add it")


def read_setting(path: Path) -> Setting:
    """Read a TOML file.  Raises UserError if it is not one, and for unknown and missing names."""
    values = read_values(path, "setting", "settings/6_gqa_planted.toml")
    check_fields(path, values, Setting)
    return Setting(**{key: _tuples(value) for key, value in values.items()})
