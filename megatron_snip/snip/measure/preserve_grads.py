"""State that a pass outside training must preserve: gradients, buffers, and weights that hooks would update.

This covers gradients of the model and of anything else behind a loss, such as a head outside the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


class Untouched:
    """Saves gradients, and removes them during the pass.

    Also disables hooks that run after gradient accumulation: an optimiser in backward would update weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[Tensor, tuple[Tensor | None, Tensor | None, dict[Any, Any]]] = {}
        for p in model.parameters():
            if p.requires_grad:
                self._keep(p)

    def note(self, loss: Tensor) -> None:
        """Also save tensors outside the model that get a gradient from this loss.  Call it before backward."""
        for leaf in _leaves(loss):
            if leaf not in self._before:
                self._keep(leaf)

    def _keep(self, p: Tensor) -> None:
        hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        values = None if p.grad is None else p.grad.clone()  # DDP's gradients are views that backward may overwrite
        self._before[p] = p.grad, values, dict(hooks)
        hooks.clear()
        p.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients of the pass."""
        for p in self._before:
            p.grad = None

    def restore(self) -> None:
        """Restore gradients and hooks."""
        for p, (grad, values, hooks) in self._before.items():
            p.grad = grad
            if grad is not None and values is not None:
                grad.detach().copy_(values)
            if hooks:
                cast(Any, p)._post_accumulate_grad_hooks.update(hooks)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Untouched]:
    """Context for passes that restores the model's gradients and buffers afterwards, such as BatchNorm's averages."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    kept = Untouched(model)
    try:
        yield kept
    finally:
        kept.restore()
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
                module._buffers[name] = buffer


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Tensors that get a gradient from a loss, except those inside a reentrant recomputation, not yet known."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [before for before, _ in node.next_functions]
