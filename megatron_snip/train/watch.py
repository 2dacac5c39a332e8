"""When a loss is suspicious: it is not finite, or it spikes.

A spike is a finite loss above the mean of the last good losses by more than --spike-deviations of their standard
deviations and by more than --spike-nats.  The first bound follows the noise of the run; the second keeps a quiet run
(large batches, late in training) from calling a harmless wobble a spike.  Suspicious losses are left out of the mean:
three of them would widen the deviation so far that the fourth passed.  While a loss falls, the mean stands above it
and the deviation is wide, so that the start of a run raises no alarm.  No spike is told before the window is full.

Everything is decided from values that are reduced over all processes, so all of them decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_snip.config import TrainingConfig


class LossWatch:
    """The last good losses, in nats a token, and how many suspicious iterations have come in a row."""

    def __init__(self, t: TrainingConfig) -> None:
        self.window, self.deviations, self.nats = t.spike_window, t.spike_deviations, t.spike_nats
        self.losses: list[float] = []
        self.in_a_row = 0

    def limit(self) -> float:
        """The loss above which the next one spikes; infinite while too few are known."""
        if len(self.losses) < self.window:
            return math.inf
        mean = math.fsum(self.losses) / self.window
        variance = math.fsum((loss - mean) ** 2 for loss in self.losses) / self.window
        return mean + max(self.deviations * math.sqrt(variance), self.nats)

    def suspicious(self, loss: float, grad_norm: float) -> bool:
        """Whether an iteration with this loss and gradient norm is not to be trusted."""
        return not (math.isfinite(loss) and math.isfinite(grad_norm)) or loss > self.limit()

    def add(self, loss: float, grad_norm: float) -> bool:
        """Take an iteration in; whether it is suspicious.

        As many suspicious ones in a row as the window holds are what losses are like from now on: it begins anew.
        """
        if self.suspicious(loss, grad_norm):
            self.in_a_row += 1
            if self.in_a_row >= self.window:
                self.begin_anew()
            return True
        self.in_a_row = 0
        self.losses = [*self.losses, loss][-self.window :]
        return False

    def begin_anew(self) -> None:
        """Forget all losses."""
        self.losses, self.in_a_row = [], 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"losses": self.losses, "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.losses, self.in_a_row = list(state["losses"])[-self.window :], state["in_a_row"]
