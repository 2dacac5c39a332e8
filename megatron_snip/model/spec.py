"""Kinds of model: `MODELS` maps --model-name to a `ModelSpec`.

Everything that differs between models is in the spec, for training, planning, FLOPs, the dry run and conversion.  To
add a model, write a file that registers a spec; see CONTRIBUTING.md.
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

    kind: one of `quant.KINDS`.  reads: a name for its input, the same for linears that share an input.
    module: column- or row-parallel.  size: (output, input channels) of the whole weight.
    """

    kind: str
    reads: str
    module: type[ColumnParallelLinear] | type[RowParallelLinear]
    size: Callable[[ModelConfig], tuple[int, int]]


@dataclass(frozen=True)
class ModelSpec:
    """Everything specific to one kind of decoder.

    architecture: Hugging Face's class; its model_type is `name`.
    block(build, index): a block with its parallel linears; other parameters are tagged.
    linears: module name in a block -> its linear, in execution order.
    more_parameters: parameters of a block outside its linears.
    attention_flops: forward FLOPs per token of a block outside its linears.
    names: first part of our parameter names -> Hugging Face's.
    fixed: entries of config.json with only one supported value.
    defaults: Hugging Face's defaults for missing entries.
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
            # tools may not know the vocabulary; then the output layer is not counted
            output = 2 * m.padded_vocab_size * m.hidden_size if m.vocab_size and last == len(shapes) - 1 else 0
            shapes[last] = replace(shapes[last], other_flops=self.attention_flops(m) + output)
        return shapes

    def linear_of(self, name: str) -> BlockLinear:
        """A linear by its global name."""
        return self.linears[name.split(".", 2)[2]]

    def hf_name(self, name: str) -> str:
        """Hugging Face's name for our parameter."""
        first, dot, rest = name.partition(".")
        return f"{self.names[first]}{dot}{rest}"


#: --model-name -> spec; `model/__init__.py` imports the files that fill it.
MODELS: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> ModelSpec:
    """Add a kind of model to `MODELS`."""
    assert spec.name not in MODELS, f"model {spec.name} is there already"
    kinds = [linear.kind for linear in spec.linears.values()]
    # the probe tells a block's linears apart by kind, and files of statistics know only these kinds
    assert len({*kinds}) == len(kinds) and {*kinds} <= {*KINDS}, (
        f"model {spec.name}: kinds {kinds}; take each of {KINDS} once at most"
    )
    MODELS[spec.name] = spec
    return spec


def spec_of(m: ModelConfig) -> ModelSpec:
    """The spec of --model-name.  Raises UserError if it is unknown."""
    if m.model_name not in MODELS:
        raise UserError(f"--model-name {m.model_name} is unknown; known: {', '.join(MODELS)}")
    return MODELS[m.model_name]


def linear_place(name: str) -> tuple[int, str, str] | None:
    """(block, kind, input) of a quantisable linear of any of our models, by name; None for other names.

    Block numbers have at most four digits, so that no file can request a picture of 10^9 blocks.  --num-layers obeys
    this.
    """
    layers, block, module = [*name.split(".", 2), "", ""][:3]
    if layers != "layers" or not re.fullmatch(r"[0-9]{1,4}", block):
        return None
    found = next((spec.linears[module] for spec in MODELS.values() if module in spec.linears), None)
    return None if found is None else (int(block), found.kind, f"{block}: {found.reads}")
