"""What each parameter is, said where it is made and asked for by its full name.

Tags lie on the module that owns the parameter: FSDP2 replaces the parameter itself, and what was written on it is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Tags:
    """What whoever initialises, updates or reduces a parameter has to know of it.

    split_dim: the dim that tp cuts; None where each tp process holds the whole parameter.
    summed_over_tp: when a tp process has only a part of a whole parameter's gradient.  "sequence_parallel": it sees a
    part of the tokens under sequence parallelism, and else all of them.  "always": it sees its own heads.
    """

    kind: Literal["linear", "norm", "bias", "embedding", "output"]
    split_dim: int | None = None
    summed_over_tp: Literal["never", "sequence_parallel", "always"] = "never"
    weight_decay: bool = True

    @property
    def replicated(self) -> bool:
        """Whether every tp process holds the whole parameter."""
        return self.split_dim is None

    def is_summed(self, sequence_parallel: bool) -> bool:
        """Whether the gradient is to be summed over tp."""
        return self.summed_over_tp == "always" or (sequence_parallel and self.summed_over_tp == "sequence_parallel")


def add_parameter(module: nn.Module, name: str, parameter: nn.Parameter, tags: Tags) -> None:
    """Give a module a parameter with its tags."""
    module.register_parameter(name, parameter)
    module.__dict__["tags"] = {**module.__dict__.get("tags", {}), name: tags}


def tags_of(*modules: nn.Module) -> dict[str, Tags]:
    """The tags of all parameters in the modules, by their full names there and in their order."""
    return {name: tags for module in modules for name, tags in _tags_of(module)}


def _tags_of(module: nn.Module) -> Iterable[tuple[str, Tags]]:
    for prefix, owner in module.named_modules():
        for name, _ in owner.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            tags = owner.__dict__.get("tags", {}).get(name)
            assert tags is not None, f"{full} has no tags; make it by add_parameter"
            yield full, tags
