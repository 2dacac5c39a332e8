"""What tests hold dry runs against: the same run on real tensors over gloo; importable, so that forked ranks find it."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_snip.config import Config
from megatron_snip.train.dry_run_counts import Tracker
from tests.dist.runs import TINY, make


def options_of(options: dict[str, Any]) -> Config:
    """The options of such a run for a dry run of it."""
    return Config().replace(**{**TINY, "distributed_backend": "gloo", **options})


def real_stretches(options: dict[str, Any]) -> list[dict[str, Any]]:
    """An iteration, and a probe if the run has them: collectives that torch saw, and the most bytes that were
    allocated at once beyond those at the beginning, by the profiler.
    """
    config, parts = make(options)
    parts.train_loader.close()
    batch = parts.train_loader.make(0)
    tracker = Tracker()
    tracker.name_axes(parts.mesh)
    run_pass = parts.stepper.pass_runner(batch, 1)

    def probe() -> None:
        assert parts.coordinator is not None
        parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, 1, updates=config.snip.snip_weight > 0)

    found = []
    for run in [lambda: parts.stepper.step(batch, 1), *([probe] if parts.coordinator else [])]:
        tracker.begin()
        with tracker:
            run()
        collectives = {what: n for what, n in tracker.counts.items() if what[0] in ("count", "bytes")}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        found.append({"collectives": collectives, "rise": highest_rise(seen)})
    return found


def highest_rise(seen: Any) -> int:
    """The most bytes at once that torch's allocator gave out during a profile, beyond what it had given out before."""
    events = seen.profiler.kineto_results.experimental_event_tree()
    changes = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most
