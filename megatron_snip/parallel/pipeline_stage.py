"""A stage as torch.distributed.pipelining runs it, and torch's schedules; imported where there are several stages."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward

from megatron_snip.parallel.data import before_backward

__all__ = ["Schedule1F1B", "ScheduleInterleaved1F1B", "Stage"]


class Stage(PipelineStage):
    """torch's stage, but data parallel collectives follow the sharding strategy.

    torch's own reduces all gradients after the last backward; here they are reduced beside it.
    """

    def __init__(self, sharding: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sharding = sharding

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        """One microbatch's forward, given the numbers of its samples; overrides torch's, which cuts tensors alone.

        FSDP takes a tensor to the device, and reading it there would wait for all that runs.
        """
        assert kwargs is not None
        kwargs = {**kwargs, "sample_index": kwargs["sample_index"].tolist()}
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **more)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """One microbatch's backward; overrides torch's."""
        if backward_type != "full" or not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        before_backward(self.submod, self._sharding, last=last_backward)
        values = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*values), None
