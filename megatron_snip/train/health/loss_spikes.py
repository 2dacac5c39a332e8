"""When a loss is suspicious: it is not finite, or it spikes.

A spike is a finite loss that exceeds the mean of the last good losses by more than --spike-deviations of their standard
deviations and by more than --spike-nats.  The first bound adapts to the run's noise; the second keeps quiet runs (large
batches, late in training) from reporting harmless fluctuations.  The mean excludes suspicious losses: three of them
would widen the deviation enough to let the fourth pass.  While the loss falls quickly, the mean is above it and the
deviation is large, so the start of a run raises no alarm.  There are no spikes before the window is full.

Decisions use only reduced values, so all ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_snip.config import TrainingConfig


class LossWatch:
    """The last good losses, in nats per token, and the number of consecutive suspicious iterations."""

    def __init__(self, t: TrainingConfig) -> None:
        self.window, self.deviations, self.nats = t.spike_window, t.spike_deviations, t.spike_nats
        self.losses: list[float] = []
        self.in_a_row = 0

    def limit(self) -> float:
        """The loss above which the next one is a spike; infinite until the window is full."""
        if len(self.losses) < self.window:
            return math.inf
        mean = math.fsum(self.losses) / self.window
        variance = math.fsum((loss - mean) ** 2 for loss in self.losses) / self.window
        return mean + max(self.deviations * math.sqrt(variance), self.nats)

    def suspicious(self, loss: float, grad_norm: float) -> bool:
        """Whether an iteration with this loss and gradient norm is suspicious."""
        return not (math.isfinite(loss) and math.isfinite(grad_norm)) or loss > self.limit()

    def add(self, loss: float, grad_norm: float) -> bool:
        """Add an iteration; returns whether it is suspicious.

        A whole window of consecutive suspicious losses is the new normal: the window starts over.
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
        """State for a checkpoint."""
        return {"losses": self.losses, "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.losses, self.in_a_row = list(state["losses"])[-self.window :], state["in_a_row"]
