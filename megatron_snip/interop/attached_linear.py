"""Replaces the forward of an ``nn.Linear`` in a model that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_snip.errors import UserError
from megatron_snip.interop.any_model import plain_name
from megatron_snip.quant import LINEAR_IMPLS, Casts, LinearCall, LinearPrecision, RoundingKey, StepContext, name_stream

PLAIN_PRECISION = LinearPrecision.uniform("bf16")
#: Modules with this name produce logits, and stay unquantised unless requested.
_OUTPUT = "lm_head"


class Attached(Protocol):
    """The owner of attached linears: settings of the current pass, shared by all of them."""

    seed: int
    iteration: int
    impl: str
    context: StepContext
    lengths: dict[int, int]

    def detach(self) -> None:
        """Restore the model's original linears."""


class AttachedLinear:
    """Runs in place of an ``nn.Linear``'s forward.

    keeps: whether the weight keeps its memory between uses, so that its casts can be kept too.
    """

    split_dim = 0

    def __init__(self, snip: Attached, name: str, module: nn.Linear, *, keeps: bool) -> None:
        self.snip, self.name, self.module = snip, name, module
        self.precision = PLAIN_PRECISION
        self.rows_seen = 0  # tokens since the last update, a part of the rounding key
        self.casts = Casts() if keeps else None
        self._stream = name_stream(name)
        module.forward = self  # type: ignore[method-assign,assignment]

    def __reduce__(self) -> Any:
        """A copied or pickled model's linear computes as it did before ``attach``."""
        return getattr, (self.module, "forward")  # the class's own: a copy has no override yet

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        module, device, context = self.module, x.device.type, self.snip.context
        precision, observer = context.precision or self.precision, context.observers.get(self.name)
        if observer is None and precision == PLAIN_PRECISION:
            return F.linear(x, module.weight, module.bias)
        weight = module.weight  # if parametrised, every access computes it again
        if isinstance(weight, DTensor):
            raise UserError(
                f"{self.name}: the weight is a DTensor in forward, as under tensor parallelism, which attach does not "
                "support; leave it out of linears"
            )
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if dtype not in (torch.bfloat16, torch.float32):
            raise UserError(
                f"{self.name}: x is {dtype}; quantised linears compute in bfloat16 or float32; convert the model, or "
                "choose another dtype of torch.autocast"
            )
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        if observer is not None:
            self.snip.lengths[self.rows_seen] = x.shape[-2] if x.ndim > 2 else len(rows)
        key = RoundingKey(self.snip.seed, self.snip.iteration, self._stream, row0=self.rows_seen)
        call = LinearCall(precision, key, observer=observer, weight_casts=self.casts)
        if torch.is_grad_enabled():
            self.rows_seen += len(rows)
        y = LINEAR_IMPLS[self.snip.impl](rows, weight, call)
        y = y if module.bias is None else y + module.bias.to(dtype)
        return y.reshape(*x.shape[:-1], module.out_features)


def chosen_linears(
    model: nn.Module, linears: Sequence[str] | Callable[[str, nn.Linear], bool] | None
) -> dict[str, nn.Linear]:
    """The linears of a model by name: those that ``attach`` is asked for, or by default all but the output layer.

    UserError if a pattern matches none, if one has a forward of its own, or if none is left.
    """
    found = {plain_name(name): module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if linears is None:
        output = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        taken = {n: m for n, m in found.items() if m is not output and n.rpartition(".")[2] != _OUTPUT}
    elif not isinstance(linears, Sequence):
        taken = {name: module for name, module in found.items() if linears(name, module)}
    else:
        linears = [linears] if isinstance(linears, str) else linears
        unmatched = [pattern for pattern in linears if not any(fnmatchcase(name, pattern) for name in found)]
        if unmatched:
            raise UserError(f"linears: {unmatched[0]!r} matches no nn.Linear; names are such as {_some(found)}")
        taken = {name: m for name, m in found.items() if any(fnmatchcase(name, pattern) for pattern in linears)}
    for name, linear in taken.items():
        again = isinstance(linear.forward, AttachedLinear)
        if not again and getattr(linear.forward, "__func__", None) is not nn.Linear.forward:
            raise UserError(
                f"attach: {name} ({type(linear).__name__}) has a forward of its own; leave it out of linears"
            )
    if not taken:
        raise UserError(f"attach: no nn.Linear was selected; the model has {_some(found)}")
    return taken


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:3]) or "none"
