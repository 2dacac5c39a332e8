"""What tests of --optimizer-cpu-offload run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.config import Config
from megatron_snip.parallel.data import local_of
from megatron_snip.snip.measure.updates import AdamSettings, Updates
from megatron_snip.train.setup import Parts
from tests.dist.helpers.runs import make

STEPS, SAVED = 3, 1


def _steps(config: Config, parts: Parts, first: int, last: int) -> list[tuple[Any, ...]]:
    """Loss, gradient norm and lost updates of each iteration from ``first`` to ``last``."""
    size, found = config.training.global_batch_size, []
    for i in range(first, last + 1):
        result = parts.stepper.step(parts.train_loader.batch((i - 1) * size), i)
        found.append((result.loss, result.grad_norm, result.lost))
    return found


def _end(parts: Parts) -> dict[str, Tensor]:
    return {name: local_of(tensor).clone() for name, tensor in parts.tensors().items()}


def _updates(config: Config, parts: Parts) -> list[Tensor]:
    """What a probe reads of the optimiser: how a weight's next update changes with its gradient."""
    t, generator = config.training, torch.Generator().manual_seed(0)
    parts.stepper.gradients(parts.train_loader.batch(0), STEPS + 1)
    block = next(iter(next(iter(parts.stages.values())).blocks()))
    adam = AdamSettings(t.adam_beta1, t.adam_beta2, t.adam_eps, t.clip_grad)
    name = f"layers.{block}.mlp.up_proj"
    gradient = parts.optimizer.gradient(f"{name}.weight")
    error = torch.randn(gradient.shape, generator=generator) * gradient.abs().float().mean()
    found = Updates(parts.optimizer, adam).changes(name, [error], 1.0)
    parts.optimizer.zero_grad()
    return found


def trained(variants: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Train each variant; save on the way, in the background; and go on from what the variant before has saved."""
    found = []
    for number, options in enumerate(variants):
        config, parts = make({**options, "async_save": True})
        saver = Saver(folder / str(number), config.checkpoint, parts.mesh, "0123456789abcdef", 0)
        parts.stepper.before_update = saver.wait_copied
        results = _steps(config, parts, 1, SAVED)
        saver.save(SAVED, parts.tensors(), {"steps": SAVED}, finite=True, last=False)
        results += _steps(config, parts, SAVED + 1, STEPS)
        saver.close()
        row = {"results": results, "host": sum(one.numel() for one in parts.optimizer.pinned())}
        row |= {"updates": _updates(config, parts), "end": _end(parts)}
        load_tensors(folder / str(max(0, number - 1)), SAVED, parts.tensors())
        parts.optimizer.set_steps(SAVED)
        found.append({**row, "again": _steps(config, parts, SAVED + 1, STEPS), "end again": _end(parts)})
        parts.train_loader.close()
    return found
