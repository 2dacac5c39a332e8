"""Tags that describe each parameter, set at its creation and looked up by its full name.

The module that owns the parameter holds the tags, since FSDP2 replaces the parameter and loses its attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Tags:
    """What initialisation, the optimiser and reductions need to know about a parameter.

    split_dim: the dim that tp splits, or None if each tp rank holds the whole parameter.
    summed_over_tp: when each tp rank has only a part of such a parameter's gradient.  "sequence_parallel": only under
    sequence parallelism, because a rank then sees a part of the tokens.  "always": because a rank sees only its heads.
    """

    kind: Literal["linear", "norm", "bias", "embedding", "output"]
    split_dim: int | None = None
    summed_over_tp: Literal["never", "sequence_parallel", "always"] = "never"
    weight_decay: bool = True

    @property
    def replicated(self) -> bool:
        """Whether every tp rank holds the whole parameter."""
        return self.split_dim is None

    def is_summed(self, sequence_parallel: bool) -> bool:
        """Whether to sum the gradient over tp."""
        return self.summed_over_tp == "always" or (sequence_parallel and self.summed_over_tp == "sequence_parallel")


def add_parameter(module: nn.Module, name: str, parameter: nn.Parameter, tags: Tags) -> None:
    """Register a parameter of a module, with its tags."""
    module.register_parameter(name, parameter)
    module.__dict__["tags"] = {**module.__dict__.get("tags", {}), name: tags}


def tags_of(*modules: nn.Module) -> dict[str, Tags]:
    """The tags of all parameters of the modules, by full name, in order."""
    found = {}
    for prefix, owner in (each for module in modules for each in module.named_modules()):
        for name, _ in owner.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            assert name in owner.__dict__.get("tags", {}), f"{full} has no tags; make it by add_parameter"
            found[full] = owner.__dict__["tags"][name]
    return found
