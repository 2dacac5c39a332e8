"""Runs all microbatches of a batch through the pipeline: forward and backward, or only forward.

With one stage this is a plain loop.  With several it is torch.distributed.pipelining's 1F1B, interleaved if a rank
holds several stages.  A probe is one more `forward_backward` without an optimiser step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_snip.mesh import Axis, Mesh
from megatron_snip.parallel.code_gather import CodeGathers
from megatron_snip.parallel.context_parallel import own_tokens
from megatron_snip.parallel.data import before_backward
from megatron_snip.parallel.tensor import drop_weight_casts
from megatron_snip.quant import PLAIN, StepContext


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch: M microbatches of B whole sequences of S tokens.

    The pipeline takes this rank's shard of the sequences under context parallelism.
    """

    tokens: Tensor  # int64 [M, B, S]
    labels: Tensor  # int64 [M, B, S]: the token after each
    sample_index: Tensor  # int64 [M, B], on the CPU: the global number of each sample


def _sum_of(losses: Tensor, _labels: Tensor) -> Tensor:
    return losses.sum()


class Pipeline:
    """This rank's stages and their schedule.  Every rank must make the same calls.

    begin: called before each pass with its tokens [M, B, S], sample_index [M, B] and dp; returns the loss's divisor.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        *,
        num_stages: int,
        mesh: Mesh,
        sharding: str,
        activation: tuple[int, ...],
        tokens: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        begin: Callable[[Tensor, Tensor, Axis], int | Tensor] | None = None,
        gathers: CodeGathers | None = None,
    ) -> None:
        self._begin, self.gathers = begin, gathers
        self.stages, self.mesh, self.sharding, self.device = stages, mesh, sharding, device
        self.losses: list[float] = []  # share of each microbatch of the last pass; only on the last stage
        self._has_first, self._has_last = 0 in stages, num_stages - 1 in stages
        self._schedules: dict[str, tuple[int, Any]] = {}
        self._num_stages = num_stages
        self._activation = torch.empty(activation, dtype=dtype, device="meta")
        self._tokens = torch.empty(tokens, dtype=torch.int64, device="meta")

    def _schedule(self, use: str, microbatches: int, *, training: bool) -> Any:
        """One schedule each for training, evaluation and trials, because torch sets a schedule up again at each switch.

        A new one is made when the batch grows.
        """
        if self._schedules.get(use, (0, None))[0] != microbatches:
            # imported here, because it loads torch's compiler, which --help and most commands do not need
            from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

            from megatron_snip.parallel.pipeline_stage import Stage

            n = self._num_stages
            activation = self._activation.clone().requires_grad_(training)
            loss = torch.empty(1, device="meta").requires_grad_(training)
            stages = [
                Stage(
                    self.sharding,
                    module,
                    s,
                    n,
                    self.device,
                    # static shapes; otherwise the first step adds a pass over uninitialised memory
                    input_args=self._tokens if s == 0 else activation,
                    output_args=loss if s == n - 1 else activation,
                    group=self.mesh.pp.group,
                )
                for s, module in self.stages.items()
            ]
            options: dict[str, Any] = {"loss_fn": _sum_of, "scale_grads": False}
            if len(stages) == 1:
                schedule: Any = Schedule1F1B(stages[0], microbatches, **options)
            else:
                schedule = ScheduleInterleaved1F1B(cast(Any, stages), microbatches, **options)
            self._schedules[use] = (microbatches, schedule)
        return self._schedules[use][1]

    def forward_backward(self, batch: Batch, iteration: int, context: StepContext = PLAIN) -> Callable[[], float]:
        """Run the batch and accumulate its gradients in `.grad`.

        context: settings of the pass, except iteration and tokens, which are set here.
        Returns a function that waits for the device and returns this rank's share of the loss: the sum over all ranks
        is tp times the loss in nats.  Queue the device's other work before you call it.
        """
        return self._run(batch, iteration, context, training=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch, iteration: int, context: StepContext = PLAIN) -> float:
        """The same share of the loss, without gradients."""
        return self._run(batch, iteration, context, training=False)()

    def _run(self, batch: Batch, iteration: int, context: StepContext, *, training: bool) -> Callable[[], float]:
        """Set up the context of the pass, and drop the weight casts that linears keep afterwards."""
        tokens: int | Tensor = batch.tokens.numel() * self.mesh.dp.size
        if self._begin is not None:
            tokens = self._begin(batch.tokens.to(self.device), batch.sample_index, self.mesh.dp)
        context = dataclasses.replace(context, iteration=iteration, loss_tokens=tokens)
        if self.gathers is not None:
            self.gathers.before_pass(context)
        run = self._plain if self.mesh.pp.size == 1 else self._pipelined
        try:
            return run(batch, context, training=training)
        finally:
            # An update or other precisions may follow, and FSDP has freed the gathered weights.  Its next buffer may
            # have the same address on some ranks only, but all must agree on what to cast and reduce over tp.
            drop_weight_casts(self.stages.values())

    def _plain(self, batch: Batch, context: StepContext, *, training: bool) -> Callable[[], float]:
        (stage,) = self.stages.values()
        tokens, labels = self._own(batch.tokens).to(self.device), self._own(batch.labels).to(self.device)
        samples, losses = batch.sample_index.tolist(), []
        for m in range(len(tokens)):
            if training:
                before_backward(stage, self.sharding, last=m == len(tokens) - 1)
            loss = stage(tokens[m], sample_index=samples[m], labels=labels[m], context=context)
            if training:
                loss.sum().backward()
            losses.append(loss.detach())
        return self._share(losses)

    def _pipelined(self, batch: Batch, context: StepContext, *, training: bool) -> Callable[[], float]:
        use = "training" if training else "evaluation" if context.token_losses is None else "trial"
        schedule = self._schedule(use, len(batch.tokens), training=training)
        tokens, labels = self._own(batch.tokens).flatten(0, 1), self._own(batch.labels).flatten(0, 1).to(self.device)
        args = (tokens.to(self.device),) if self._has_first else ()
        # torch cuts tensors into microbatches and passes anything else to every stage unchanged; FSDP would move
        # a tensor to the device, and reading it there would block
        options: dict[str, Any] = {"sample_index": batch.sample_index.numpy(), "context": context}
        if self._has_last:
            options |= {"labels": labels, "target": labels}
        losses: list[Tensor] = []
        run = schedule.step if training else schedule.eval
        run(*args, losses=losses, **options)
        return self._share(losses)

    def _own(self, x: Tensor) -> Tensor:
        """This rank's shard [M, B, S/cp] of whole sequences [M, B, S]."""
        return own_tokens(x, self.mesh.cp)

    def _share(self, losses: Sequence[Tensor]) -> Callable[[], float]:
        # one read, so that the host waits for the device once instead of at every microbatch
        together = torch.stack([loss.detach() for loss in losses]).flatten() if losses else None

        def read() -> float:
            self.losses = [] if together is None else together.cpu().numpy().tolist()
            return sum(self.losses)

        return read
