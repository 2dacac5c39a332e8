"""What test_offline.py runs on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_snip import runtime
from megatron_snip.snip.measure.statistics import Statistics
from tests.dist.helpers.runs import make


def collect(words: list[str], output: Path) -> Statistics:
    """tools/collect_stats.py on the ranks that are here."""
    from megatron_snip.cli import collect_stats

    runtime.stop = dist.barrier  # the harness leaves the group
    collect_stats.main([*words, "--output", str(output)])
    return Statistics.load(output)


def losses_with_bf16(options: dict[str, Any], every: int, iterations: int = 4) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some iterations, then the BF16 losses of every so many (0: none)."""
    config, parts = make(options)
    size, seen, plain = config.training.global_batch_size, [], []
    for i in range(1, iterations + 1):
        batch = parts.train_loader.batch((i - 1) * size)
        if every and i % every == 0:
            plain.append(parts.stepper.bf16_loss(batch, i))
        result = parts.stepper.step(batch, i)
        seen += [result.loss, result.grad_norm]
    parts.train_loader.close()
    return seen, plain
