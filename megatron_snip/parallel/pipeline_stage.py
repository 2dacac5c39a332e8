"""torch's pipeline stage with our changes.  Imported only with several stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from megatron_snip.parallel.data import before_backward


class Stage(PipelineStage):
    """torch's stage, but with the sharding strategy's data-parallel collectives and short-lived buffers.

    torch reduces all gradients after the last backward.  Here, the reduction overlaps with it.  torch keeps receive
    buffers for the activation and the gradient of every microbatch for the whole run.  Here, a buffer lives from its
    receive to the end of its microbatch.
    """

    def __init__(self, sharding: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sharding = sharding

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        """Forward of one microbatch with its sample numbers.  Overrides torch's, which cuts only tensors."""
        assert kwargs is not None
        kwargs = {**kwargs, "sample_index": kwargs["sample_index"][fwd_chunk_id].tolist()}
        result = super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **more)
        _free(self.args_recv_info[fwd_chunk_id])  # autograd keeps what backward needs
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *rest: Any, **more: Any) -> None:
        """Backward of one microbatch, on the last stage from its loss [].  Overrides torch's."""
        super().backward_one_chunk(bwd_chunk_id, loss, *rest, **more)
        if not self.has_backward:  # torch calls it in evaluation too
            return
        _free(self.grad_recv_info[bwd_chunk_id])
        if loss is not None:
            loss.detach_()  # torch keeps it until the end of the batch, and its graph holds the stage's input

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **options)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Let torch create its buffers for the whole batch without memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        for info in recv_infos:
            _move(info, self.device)
        return super()._get_recv_ops(recv_infos)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Backward of one microbatch.  Overrides torch's."""
        if backward_type != "full" or not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        before_backward(self.submod, self._sharding, last=last_backward)
        values = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*values), None


def _free(recv_infos: Sequence[Any]) -> None:
    for info in recv_infos:
        _move(info, torch.device("meta"))


def _move(info: Any, device: torch.device) -> None:
    """Replace the buffer by one on another device.  The ends of a pipeline have no buffer on one side."""
    if isinstance(buffer := getattr(info, "buffer", None), Tensor):
        info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)
