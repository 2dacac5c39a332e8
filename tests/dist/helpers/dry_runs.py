"""What tests hold dry runs against: the same run on real tensors over gloo; importable, so that forked ranks find it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_snip.config import Config
from megatron_snip.train.dry_run import measure
from megatron_snip.train.dry_run.counts import Stretch, Tracker
from megatron_snip.train.setup import Parts
from tests.dist.helpers.runs import TINY, make


def options_of(options: dict[str, Any]) -> Config:
    """The options of such a run for a dry run of it."""
    return Config().replace(**{**TINY, "distributed_backend": "gloo", **options})


def real_counts(options: dict[str, Any]) -> list[tuple[Counter[Any], int]]:
    """What torch was asked to send in an iteration and in a probe, and the most bytes that a process held at once.

    Neither leaves tensors in circles.
    """
    gc.freeze()  # else each look for garbage goes through all of torch's objects
    tracker, found = Tracker(), []
    with tracker:
        parts, runs = _runs(options)
        tracker.name_axes(parts.mesh)
        for run in runs:
            tracker.begin()
            with _all_freed():
                run()
            found.append((collectives(tracker.counts), sum(tracker.memory.peak().values())))
    return found


@contextmanager
def _all_freed() -> Iterator[None]:
    """AssertionError if tensors from inside stay until Python looks for garbage, which --manual-gc puts off."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.disable()
    try:
        yield
        gc.collect()
        held = [tuple(left.shape) for left in gc.garbage if isinstance(left, Tensor)]
        assert not held, f"{len(held)} tensors are in circles, such as {held[:3]}"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def collectives(counts: Counter[Any]) -> Counter[Any]:
    """Those of what was counted."""
    return Counter({what: n for what, n in counts.items() if what[0] in ("count", "bytes")})


def few_and_whole(options: dict[str, Any], world_size: int, rank: int) -> tuple[Stretch, Stretch, int]:
    """A dry run's iteration of few microbatches and of all, and how many the first leaves out."""
    config = options_of(options)
    (few,) = measure.measure(config, world_size, rank).stretches
    dp = config.data_parallel_size(world_size)
    left_out = config.num_microbatches(dp) - measure._few_microbatches(config, dp)[0].num_microbatches(dp)
    with mock.patch.object(measure, "_few_microbatches", lambda config, dp: (config, 0, 1)):
        (whole,) = measure.measure(config, world_size, rank).stretches
    return few, whole, left_out


def few_and_whole_trials(options: dict[str, Any], world_size: int, rank: int) -> tuple[Stretch, Stretch]:
    """A dry run's pass of a trial, of few microbatches and of all."""
    config = options_of(options)
    few = measure.measure(config, world_size, rank).stretches[-1]
    with mock.patch.object(measure, "_few_microbatches", lambda config, dp: (config, 0, 1)):
        return few, measure.measure(config, world_size, rank).stretches[-1]


def real_rises(options: dict[str, Any]) -> list[int]:
    """The most bytes at once that an iteration and a probe allocate beside what is there, by torch's profiler."""
    _, runs = _runs(options)
    found = []
    for run in runs:
        run()  # what is made at first use and kept is there
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        found.append(_highest(seen))
    return found


def _runs(options: dict[str, Any]) -> tuple[Parts, list[Callable[[], Any]]]:
    config, parts = make(options)
    parts.train_loader.close()
    batch = parts.train_loader.make(0)
    runs: list[Callable[[], Any]] = [partial(parts.stepper.step, batch, 1)]
    if (coordinator := parts.coordinator) is not None:
        run_pass, updates = parts.stepper.pass_runner(batch, 1), config.snip.snip_weight > 0
        runs.append(partial(coordinator.probe.run, run_pass, parts.optimizer.zero_grad, 1, updates=updates))
    return parts, runs


def _highest(seen: Any) -> int:
    """The most bytes at once that torch's allocator gave out during a profile."""
    events, changes = seen.profiler.kineto_results.experimental_event_tree(), []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    return max(accumulate(change for _, change in sorted(changes, key=lambda pair: pair[0])))
