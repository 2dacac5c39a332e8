"""The device that a dry run assumes, and its choices on a machine without that device.

Fake tensors are always on "cpu", since torch without CUDA crashes at the first backward of a fake CUDA tensor.
Choices that depend on the device are still those of a GPU: GEMM backends, fused kernels, and blocks of 512 bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.config import Config
from megatron_snip.formats import get_format
from megatron_snip.model import rotary
from megatron_snip.parallel import context_parallel, loss, tensor
from megatron_snip.quant.kernels import triton_cast
from megatron_snip.quant.linears import block_scaled, matmul, scaled_mm
from megatron_snip.quant.linears.operands import Backend
from megatron_snip.quant.linears.precision import GEMMS
from megatron_snip.snip.measure import updates
from megatron_snip.snip.plan.options import device_options
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.setup import precisions_of

_BACKENDS: dict[str, tuple[type[Backend], ...]] = {
    "hopper": (scaled_mm.Hopper, scaled_mm.RowWise),
    "blackwell": (block_scaled.MX, block_scaled.NVFP4, scaled_mm.RowWise),
}


def device_of(config: Config) -> str:
    """Either "hopper", "blackwell" if only Blackwell has a format of the run, or "cpu" if no GPU is requested."""
    if config.parallel.distributed_backend == "gloo" and config.parallel.device != "cuda":
        return "cpu"
    if torch.cuda.is_available():
        config = config.replace(snip_options=device_options(config.snip.snip_options, torch.device("cuda")))
    hopper, blackwell = ([backend() for backend in _BACKENDS[name]] for name in ("hopper", "blackwell"))
    with contextlib.suppress(ValueError):  # an unknown precision; `check` refuses it
        plan = Plan.load(str(config.precision.precision_plan)) if config.precision.precision == "plan" else None
        for name in {getattr(precision, gemm) for precision in precisions_of(config, plan) for gemm in GEMMS}:
            fmt = get_format(name)
            if not fmt.quantised:
                continue
            on_hopper, on_blackwell = (any(not one.unfit_format(fmt) for one in of) for of in (hopper, blackwell))
            if on_blackwell and not on_hopper:
                return "blackwell"
    return "hopper"


@contextlib.contextmanager
def as_on(device: str) -> Iterator[None]:
    """Within the block, choices are those of the GPU that ``device_of`` names."""
    with contextlib.ExitStack() as stack:
        for backend in _BACKENDS[device]:
            stack.enter_context(mock.patch.object(backend, "unfit_device", lambda self, device: None))
        for module, kernel in ((triton_cast, "takes_product"), (rotary, "fused")):
            stack.enter_context(mock.patch.object(module, kernel, lambda x, *_: x.dtype == torch.bfloat16))
        stack.enter_context(mock.patch.object(loss, "fused", lambda logits: True))
        stack.enter_context(mock.patch.object(matmul, "_lacks_bf16", lambda: False))
        stack.enter_context(mock.patch.object(tensor, "adds_in_bf16", lambda weight: False))
        stack.enter_context(mock.patch.object(F, "rms_norm", _fused_norm))
        stack.enter_context(
            mock.patch.object(context_parallel, "lower_right", lambda *_: None)
        )  # a mask without memory
        stack.enter_context(mock.patch.dict(updates._CHUNK, clear=True))
        yield


@torch.library.custom_op("dry_run::rms_norm", mutates_args=())
def _norm(x: Tensor) -> list[Tensor]:
    raise NotImplementedError("only for fake tensors")


@_norm.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)]


@torch.library.custom_op("dry_run::rms_norm_backward", mutates_args=())
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    raise NotImplementedError("only for fake tensors")


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(weight)]


class _FusedNorm(torch.autograd.Function):
    """CUDA's fused RMSNorm: keeps its input, its weight and a float32 number per row."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        y, scale = torch.ops.dry_run.rms_norm(x)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_x, grad_weight = torch.ops.dry_run.rms_norm_backward(grads[0], x, weight)
        return grad_x, grad_weight


def _fused_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    y: Tensor = _FusedNorm.apply(x, weight)
    return y
