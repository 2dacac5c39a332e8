"""A model that is not ours: the module inside its wrappers, and its linears as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from torch import nn

from megatron_snip.model.spec import linear_place
from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.block_probe import Attend

#: Names that torch's wrappers (compile, activation checkpointing, FSDP1) insert into module names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile, in any nesting."""
    ddp = nn.parallel.DistributedDataParallel
    while (within := model.module if isinstance(model, ddp) else model._modules.get("_orig_mod")) is not None:
        model = within
    return model


def plain_name(name: str) -> str:
    """A module's name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shapes_of(
    linears: Mapping[str, nn.Linear], attends: Mapping[int, Attend]
) -> tuple[list[LinearShape], dict[int, Attend]]:
    """Linears as data, and the attention of blocks whose q, k and v can be judged at the attention's output.

    attends: attention by block, for the kinds of model that we know.
    """
    shapes = [_shape(name, linear, attends) for name, linear in linears.items()]
    whole = {block: attends[block] for block in _whole_blocks(shapes) if block in attends}
    # without a kind, a linear is judged at its own output
    return [shape if shape.block in whole else dataclasses.replace(shape, kind="") for shape in shapes], whole


def _shape(name: str, linear: nn.Linear, attends: Mapping[int, Attend]) -> LinearShape:
    """A linear as data.  Its block is the first number in its name."""
    if attends and (place := linear_place(name.removeprefix("model."))) is not None:
        block, kind, reads = place
        return LinearShape(name, linear.out_features, linear.in_features, block=block, kind=kind, reads=reads)
    numbers = re.findall(r"(?:^|\.)(\d{1,4})(?=\.|$)", name)
    return LinearShape(name, linear.out_features, linear.in_features, block=int(numbers[0]) if numbers else 0)


def _whole_blocks(shapes: Sequence[LinearShape]) -> list[int]:
    """Blocks with all of q, k, v and o, which can be judged at the attention's output."""
    kinds: dict[int, set[str]] = {}
    for shape in shapes:
        kinds.setdefault(shape.block, set()).add(shape.kind)
    return [block for block, there in kinds.items() if {"q", "k", "v", "o"} <= there]
