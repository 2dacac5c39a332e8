"""A kind of model as one object: `MODELS` has a `ModelSpec` by each --model-name.

Whatever differs between kinds of model is asked here, by training, planning, the FLOPs, the dry run and conversion.  A
model of one's own is a file that registers one; docs/architecture.md tells how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megatron_snip.quant import KINDS, LinearShape


@dataclass(frozen=True)
class BlockLinear:
    """A quantisable linear of every block.

    kind: one of `quant.KINDS`; reads: what its input is, the same word for linears that read the same tensor; module:
    how tp cuts it; size: (output, input channels) of the whole weight.
    """

    kind: str
    reads: str
    module: type[ColumnParallelLinear] | type[RowParallelLinear]
    size: Callable[[ModelConfig], tuple[int, int]]


@dataclass(frozen=True)
class ModelSpec:
    """All that sets one kind of decoder apart from another.

    architecture: Hugging Face's class of it, whose model_type is `name`.
    block(build, index): a block with its parallel linears, whatever else it holds being tagged.
    linears: module of a linear in its block -> what it is, in the order in which a block runs them.
    more_parameters: of a block, beside its linears.
    attention_flops: of a block's forward a token, beside its linears'.
    names: first word of our parameters' names -> Hugging Face's words for it.
    fixed: entries of config.json that can have this value alone.
    defaults: what Hugging Face takes entries to be that are missing.
    """

    name: str
    architecture: str
    block: Callable[[Any, int], nn.Module]
    linears: Mapping[str, BlockLinear]
    more_parameters: Callable[[ModelConfig], int]
    attention_flops: Callable[[ModelConfig], int]
    names: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def linear_names(self, num_layers: int) -> list[str]:
        """Names of all quantisable linears, in order."""
        return [f"layers.{block}.{module}" for block in range(num_layers) for module in self.linears]

    def linear_shapes(self, m: ModelConfig) -> list[LinearShape]:
        """Every quantisable linear of the whole model, in order, all on stage 0."""
        shapes = [
            LinearShape(f"layers.{block}.{module}", *linear.size(m), block, linear.kind, f"{block}: {linear.reads}")
            for block in range(m.num_layers)
            for module, linear in self.linears.items()
        ]
        for last in range(len(self.linears) - 1, len(shapes), len(self.linears)):
            # tools may not know the vocabulary, and then count no output layer
            output = 2 * m.padded_vocab_size * m.hidden_size if m.vocab_size and last == len(shapes) - 1 else 0
            shapes[last] = replace(shapes[last], other_flops=self.attention_flops(m) + output)
        return shapes

    def linear_of(self, name: str) -> BlockLinear:
        """A linear by its name in the whole model."""
        return self.linears[name.split(".", 2)[2]]

    def hf_name(self, name: str) -> str:
        """Hugging Face's name of our parameter."""
        first, dot, rest = name.partition(".")
        return f"{self.names[first]}{dot}{rest}"


#: --model-name -> model; `model/__init__.py` imports the files that fill it.
MODELS: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> ModelSpec:
    """Make a kind of model known by its name."""
    assert spec.name not in MODELS, f"model {spec.name} is there already"
    kinds = [linear.kind for linear in spec.linears.values()]
    # a probe tells a block's linears apart by their kinds, and files of statistics know these alone
    assert len({*kinds}) == len(kinds) and {*kinds} <= {*KINDS}, (
        f"model {spec.name}: kinds {kinds}; take each of {KINDS} once at most"
    )
    MODELS[spec.name] = spec
    return spec


def spec_of(m: ModelConfig) -> ModelSpec:
    """What --model-name stands for; UserError if it is unknown."""
    if m.model_name not in MODELS:
        raise UserError(f"--model-name {m.model_name} is unknown; known: {', '.join(MODELS)}")
    return MODELS[m.model_name]


def linear_shapes(m: ModelConfig) -> list[LinearShape]:
    """Every quantisable linear of the whole model that options tell of, in order, all on stage 0."""
    return spec_of(m).linear_shapes(m)


def linear_place(name: str) -> tuple[int, str, str] | None:
    """(block, kind, what it reads) of a quantisable linear of any of our models by its name; None for other names.

    A block has at most four digits, so that no file can ask for a picture of 10^9 blocks; --num-layers keeps to it.
    """
    layers, block, module = [*name.split(".", 2), "", ""][:3]
    if layers != "layers" or not re.fullmatch(r"[0-9]{1,4}", block):
        return None
    found = next((spec.linears[module] for spec in MODELS.values() if module in spec.linears), None)
    return None if found is None else (int(block), found.kind, f"{block}: {found.reads}")
