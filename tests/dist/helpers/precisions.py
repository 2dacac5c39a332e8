"""What the tests of --optimizer-precision run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.parallel.data import local_of
from megatron_snip.train.lost_updates import LostUpdates
from tests.dist.helpers.runs import make


def stepped(options: dict[str, Any], folder: Path, steps: int) -> None:
    """Make updates with gradients that every layout has the same of, the weights themselves, and save the end."""
    config, parts = make(options)
    parts.train_loader.close()
    for _ in range(steps):
        for p in parts.optimizer.parameters.values():
            p.grad = p.detach().clone()
        parts.optimizer.step(1e-4, 0.7)
        parts.optimizer.zero_grad()
    _save(config, parts, folder, steps)


def moved(options: dict[str, Any], source: Path, folder: Path, iteration: int) -> None:
    """Load a checkpoint that any layout has written, and save it."""
    config, parts = make(options)
    parts.train_loader.close()
    for tensor in parts.tensors().values():
        local_of(tensor).fill_(7.0)
    load_tensors(source, iteration, parts.tensors())
    _save(config, parts, folder, iteration)


def _save(config: Any, parts: Any, folder: Path, iteration: int) -> None:
    assert all(tensor.dtype == torch.bfloat16 for tensor in parts.tensors().values())
    saver = Saver(folder, config.checkpoint, parts.mesh, "0123456789abcdef", 0)
    saver.save(iteration, parts.tensors(), {"steps": iteration}, finite=True, last=True)
    saver.close()


def lost(options: dict[str, Any]) -> dict[str, float]:
    """Metrics of an update with gradients that every layout has the same of."""
    _, parts = make(options)
    parts.train_loader.close()
    seen = LostUpdates(parts.optimizer.tags, parts.mesh)
    for p in parts.optimizer.parameters.values():
        p.grad = p.detach().clone()
    parts.optimizer.step(2e-5, 0.7, lost=seen)
    return seen.metrics()
