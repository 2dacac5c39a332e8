"""A whole run to be killed, slow where the kill is to fall; importable, so that forked ranks find it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_snip.checkpoint import saver
from megatron_snip.snip.measure.probe import Pass, PassRunner, Probe
from tests.dist.helpers.runs import train_run
from tests.dist.helpers.solves import Held, record_precisions


def slow_save() -> None:
    """The last part of each save takes its time."""
    write = saver.write_atomic
    saver.write_atomic = lambda *args: (time.sleep(1.0), write(*args))  # type: ignore[assignment]


def slow_probe(marker: Path) -> None:
    """Rank 0 stands still inside a probe, `marker` telling the iteration, while others go on to wait."""
    run = Probe.run

    def slow_run(self: Probe, run_pass: PassRunner, zero: Any, iteration: int, *args: Any, **how: Any) -> Any:
        def slow_pass(*which: Any, **how: Any) -> Pass:
            result = run_pass(*which, **how)
            if dist.get_rank() == 0:
                marker.with_suffix(".part").write_text(str(iteration))
                marker.with_suffix(".part").replace(marker)
                time.sleep(3.0)
            return result

        return run(self, slow_pass, zero, iteration, *args, **how)

    Probe.run = slow_run  # type: ignore[method-assign]


def run_to_kill(options: dict[str, Any], slow: str, marker: Path) -> Held:
    """The program; slow: "save", "probe" or "".  Returns what this rank's linears ran in."""
    if slow == "save":
        slow_save()
    elif slow == "probe":
        slow_probe(marker)
    seen = record_precisions()
    train_run(options)
    return seen
