"""What the tests of tied embeddings run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.parallel.data import gradient_square_sum, local_of
from megatron_snip.train.health.rerun import Rerun
from megatron_snip.train.health.loss_spikes import LossWatch
from tests.dist.helpers.runs import make


def train_between(options: dict[str, Any], folder: Path, first: int, last: int) -> dict[str, Any]:
    """Train from a checkpoint after iteration `first`, 0 for none, to `last`, and save one: losses and local tensors."""
    config, parts = make(options)
    if first:
        load_tensors(folder, first, parts.tensors())
        parts.optimizer.set_steps(first)
    size = config.training.global_batch_size
    steps = [parts.stepper.step(parts.train_loader.batch(i * size), i + 1) for i in range(first, last)]
    parts.train_loader.close()
    saver = Saver(folder, config.checkpoint, parts.mesh, "0123456789abcdef", first)
    saver.save(last, parts.tensors(), {"steps": last}, finite=True, last=True)
    saver.close()
    tensors = {name: local_of(tensor).clone() for name, tensor in parts.tensors().items()}
    return {"told": [(step.loss, step.grad_norm) for step in steps], "tensors": tensors}


def of_a_pass(options: dict[str, Any]) -> dict[str, Any]:
    """What one pass leaves: the place among the embedding's holders, what a rerun compares, and squared norms."""
    config, parts = make(options)
    batch = parts.train_loader.batch(0)
    parts.train_loader.close()
    parts.stepper.gradients(batch, 1)
    ends = parts.mesh.embedding
    grads = {name: local_of(p.grad) for name, p in parts.optimizer.parameters.items() if p.grad is not None}
    return {
        "place": (ends.rank, ends.size) if ends is not None else None,
        "compared": Rerun(parts.stepper, LossWatch(config.training), 1)._local_result().gradients,
        "share": gradient_square_sum(parts.stages.values(), parts.mesh),
        "squares": {name: float(grad.double().square().sum()) for name, grad in grads.items()},
    }
