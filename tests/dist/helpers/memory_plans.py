"""What tests of memory plans run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.runtime import start
from megatron_snip.train import loop
from megatron_snip.train.dry_run.counts import Tracker
from megatron_snip.train.memory_plan import auto
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from tests.dist.helpers.runs import TINY, make

ITERATIONS = 2


def write_plan(
    path: Path, blocks: tuple[str, ...], options: dict[str, Any], world: int, **more: tuple[Any, ...]
) -> dict[str, Any]:
    """The options of a run with a plan of these choices, whose file this writes."""
    MemoryPlan.by_hand(blocks, Config().replace(**{**TINY, **options}), world, **more).save(path)
    return {**options, "memory_plan": str(path)}


def losses_of_each(variants: list[dict[str, Any]]) -> list[tuple[list[float], list[float], list[str]]]:
    """Losses and gradient norms of two iterations, and what becomes of each block, of each variant of a run."""
    return [_trained(options) for options in variants]


def _trained(options: dict[str, Any]) -> tuple[list[float], list[float], list[str]]:
    config, parts = make(options)
    size, results = config.training.global_batch_size, []
    for i in range(1, ITERATIONS + 1):
        results.append(parts.stepper.step(parts.train_loader.batch((i - 1) * size), i))
    parts.train_loader.close()
    done = []
    for stage in parts.stages.values():
        whole = [again for _, again in stage.build.recompute.runs(stage.held)]
        for again, (index, block) in zip(whole, stage.blocks().items(), strict=True):
            part = block._recompute_mlp and block.self_attn.recompute
            sent = stage.build.recompute.offloads(index)
            done.append("full" if again else "selective" if part else "offload" if sent else "keep")
    return [one.loss for one in results], [one.grad_norm for one in results], done


def trained(options: dict[str, Any]) -> None:
    """The program.  The harness starts ranks as daemons, which may have no children; torchrun does not."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loop.train(Config().replace(**{**TINY, **options}))


def real_peaks(variants: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The most bytes that a rank holds at once in an iteration of each variant of a run, on real tensors: beside the
    copies that stand for the host's, and of these.
    """
    gc.freeze()  # else each look for garbage goes through all of torch's objects
    found = []
    for options in variants:
        with Tracker() as tracker:
            _, parts = make(options)
            parts.train_loader.close()
            batch = parts.train_loader.make(0)
            tracker.begin()
            parts.stepper.step(batch, 1)
            found.append((sum(tracker.memory.peak().values()), tracker.memory.host_peak()))
            del parts, batch
        gc.collect()
    return found


def planned_slowly(options: dict[str, Any]) -> str:
    """The hash of the plan of --memory-plan auto, which takes three times as long as a collective may."""
    config = Config().replace(**{**TINY, **options, "memory_plan": "auto"})

    def slow(*_: object) -> MemoryPlan:
        time.sleep(3.0)
        plan = MemoryPlan.by_hand(["keep"] * config.model.num_layers, config, dist.get_world_size())
        return dataclasses.replace(plan, memory_gib=1.0)

    auto._checked_plan = slow
    here = start("gloo", 1.0)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=1))
    plan = auto.plan_of_run(config, here)
    assert plan is not None
    return plan.hash


def refused(options: dict[str, Any]) -> str:
    """What --memory-plan auto says on this rank where rank 0 finds that no plan fits."""

    def fails(*_: object) -> MemoryPlan:
        raise UserError("no plan fits")

    auto._checked_plan = fails
    try:
        auto.plan_of_run(Config().replace(**{**TINY, **options, "memory_plan": "auto"}), start("gloo", 1.0))
    except UserError as error:
        return str(error)
    return ""
