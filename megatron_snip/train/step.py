"""One iteration: gradients of a batch over the whole mesh, and the update if they are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.config import Config
from megatron_snip.mesh import Mesh
from megatron_snip.parallel.data import (
    clip_coefficient,
    gradient_square_sum,
    sum_gradients_over_tp,
    sum_tied_gradients,
)
from megatron_snip.parallel.pipeline import Batch, Pipeline
from megatron_snip.quant import PLAIN, LinearPrecision, StepContext
from megatron_snip.snip.measure.probe import Pass, PassRunner
from megatron_snip.snip.trial import TrialRunner
from megatron_snip.train.lost_updates import LostUpdates
from megatron_snip.train.optim import Optimizer
from megatron_snip.train.schedule import learning_rate, weight_decay


@dataclass(frozen=True)
class StepResult:
    """Result of one iteration, the same on every rank."""

    loss: float  # nats per token, over the global batch
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # a non-finite loss or gradient, so no update
    stop: bool  # some rank was asked to stop
    lost: Mapping[str, float] = field(default_factory=dict)  # `LostUpdates.metrics`, if they were due


class Stepper:
    """Runs batches through the pipeline and updates the weights.  Every rank must make the same calls."""

    def __init__(self, config: Config, mesh: Mesh, pipeline: Pipeline, optimizer: Optimizer) -> None:
        self.config, self.mesh, self.pipeline, self.optimizer = config, mesh, pipeline, optimizer
        self.before_update: Callable[[], None] = lambda: None  # waits for readers of weights or moments
        self.local = (0.0, 0.0)  # of the last gradients: this rank's shares of the loss and the squared norm
        #: Applied to a step's first gradients before they count; `Rerun.validated` if reruns are on.
        self.validate: Callable[[Pass, Batch, int], Pass] | None = None

    def _sum(self, *shares: float) -> list[float]:
        """Sums over all ranks, in double precision."""
        vector = torch.tensor(shares, dtype=torch.float64, device=self.pipeline.device)
        dist.all_reduce(vector, group=self.mesh.world)
        summed: list[float] = vector.tolist()  # one read
        return summed

    def _loss_share(self, share: float) -> float:
        """Count the loss once, since all tp ranks of the last stage hold the same one."""
        return share if self.mesh.tp.is_first else 0.0

    def gradients(
        self, batch: Batch, iteration: int, context: StepContext = PLAIN, *, stop: bool = False
    ) -> tuple[Pass, bool]:
        """Compute the batch's gradients in place; returns the pass and whether any rank has `stop`."""
        stages = self.pipeline.stages.values()
        read_share = self.pipeline.forward_backward(batch, iteration, context)
        sum_gradients_over_tp(stages, self.mesh, sequence_parallel=self.config.parallel.sequence_parallel)
        sum_tied_gradients(stages, self.mesh)
        square = gradient_square_sum(stages, self.mesh)  # before the share, so that the device is not idle meanwhile
        self.local = (self._loss_share(read_share()), square)
        loss, square, stops = self._sum(*self.local, float(stop))
        # in float32, so that the order in which the ranks' squares are added has no effect
        norm = torch.tensor(square).sqrt().item()
        clip = clip_coefficient(norm, self.config.training.clip_grad)
        return Pass(loss=loss, grad_norm=norm, clip=clip), stops > 0.0

    def pass_runner(self, batch: Batch, iteration: int, later: Callable[[int], Batch] | None = None) -> PassRunner:
        """Runs the passes of a probe before this iteration; ``later(n)`` is the n-th batch after this one."""

        def run_pass(ahead: int = 0, context: StepContext = PLAIN) -> Pass:
            assert ahead == 0 or later is not None, "only this batch is known"
            return self.gradients(later(ahead) if ahead and later else batch, iteration, context)[0]

        return run_pass

    def step(self, batch: Batch, iteration: int, *, stop: bool = False) -> StepResult:
        """Compute gradients, and update unless the loss or the gradient is not finite on any rank."""
        result, stop = self.gradients(batch, iteration, stop=stop)
        if self.validate is not None:
            result = self.validate(result, batch, iteration)
        skipped = not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
        t, behind = self.config.training, self.optimizer.samples
        lr, lost = learning_rate(t, behind), None
        if not skipped:
            self.before_update()
            samples = batch.sample_index.numel() * self.mesh.dp.size
            lost = LostUpdates(self.optimizer.tags, self.mesh) if self._measures_lost(iteration) else None
            self.optimizer.step(lr, result.clip, weight_decay(t, behind), samples, lost)
        self.optimizer.zero_grad()
        rows = lost.metrics() if lost is not None else {}
        return StepResult(result.loss, result.grad_norm, lr, skipped, stop, rows)

    def _measures_lost(self, iteration: int) -> bool:
        interval = self.config.logging.log_edq_interval
        return interval > 0 and iteration % interval == 0

    def evaluate(self, batch: Batch, iteration: int, context: StepContext = PLAIN) -> float:
        """Loss of a batch in nats per token, without gradients."""
        return self._sum(self._loss_share(self.pipeline.evaluate(batch, iteration, context)))[0]

    def trial_runner(self, batch: Batch, iteration: int) -> TrialRunner:
        """Runs these sequences in a trial."""

        def run(context: StepContext = PLAIN) -> Tensor:
            losses: list[Tensor] = []
            self.pipeline.evaluate(batch, iteration, replace(context, token_losses=losses))
            counted = losses if self.mesh.tp.is_first else []  # equal on all tp ranks
            return torch.cat([torch.zeros(0, device=self.pipeline.device), *counted])

        return run

    def bf16_loss(self, batch: Batch, iteration: int) -> float:
        """`evaluate` with all linears in BF16."""
        return self.evaluate(batch, iteration, StepContext(precision=LinearPrecision.uniform("bf16")))
