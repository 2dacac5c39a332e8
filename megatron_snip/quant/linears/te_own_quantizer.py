"""Wraps our casts as a Transformer Engine quantizer, so that its modules run formats that it does not have.

One GEMM reads a linear's tensor rowwise and another reads it columnwise.  `Directions` has a quantizer for each:
Transformer Engine's own, or `OwnQuantizer` for one of our formats.  Transformer Engine dequantises a tensor that its
kernels do not know and multiplies it in the compute dtype, as it does for IdentityQuantizer.  So operands and products
are those of ``quantized_linear(impl="emulated")``, with Transformer Engine's bias, gradient accumulation and
collectives around them.  This shows on any GPU what a format does to the loss, but saves no time.

- ``qgemm`` of its reference quantizers is not used: ``custom_gemm`` passes on neither the main gradient nor a bias.
- Random bits come from torch's CPU generator, one number per cast, so a CUDA graph would repeat them.
- Under tensor parallelism, a format with a scale for the whole tensor uses the shard's.
Source: Transformer Engine 2.19 and 2.20, pytorch/tensor/hybrid_tensor.py and identity_tensor.py.

NOT YET RUN ON A GPU: tests run Transformer Engine's Python files over a stand-in for its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformer_engine.pytorch import HybridQuantizer
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer

from megatron_snip.formats import get_format
from megatron_snip.quant.casts.cast import Operand
from megatron_snip.quant.casts.rounding import RoundingKey, name_stream
from megatron_snip.quant.kernels.dispatch import cast, values
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.operands import REDUCTION_DIM, LinearCall
from megatron_snip.quant.linears.precision import LinearPrecision

_BACKEND = Emulated()


class OwnTensor(QuantizedTensorStorage):
    """A tensor [..., C] as the operand of one GEMM; ``operand`` is None after its memory is freed."""

    requires_grad = False

    def __init__(self, quantizer: OwnQuantizer, shape: Iterable[int], dtype: torch.dtype, device: Any) -> None:
        self._quantizer, self._dtype = quantizer, dtype
        self._shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.operand: Operand | None = None

    @classmethod
    def make_like(cls, other: OwnTensor) -> OwnTensor:
        """Another tensor with the same operand."""
        made = cls(other._quantizer, other._shape, other.dtype, other.device)
        made.operand = other.operand
        return made

    def size(self, *dim: int) -> Any:
        """The tensor's sizes."""
        return self._shape[dim[0]] if dim else self._shape

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """What the GEMM multiplies [..., C]."""
        if self.operand is None:
            raise RuntimeError("this operand was freed, or never made")
        return values(self.operand, dtype or self._dtype).view(self._shape)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Do nothing: `Directions` drops a whole direction."""

    def get_usages(self) -> dict[str, bool]:
        """The direction of this operand."""
        usages: dict[str, bool] = self._quantizer.get_usages()
        return usages

    def get_data_tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the operand."""
        return tuple(part for part in self.operand or () if isinstance(part, Tensor))

    def prepare_for_saving(self) -> tuple[list[Tensor | None], OwnTensor]:
        """What autograd saves.  The operand stays here too, to tell ``restore_from_saved`` which parts it has."""
        return [*self.get_data_tensors()], self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take what autograd saved from the front of a list, and return the rest."""
        rest = iter(tensors)
        if self.operand is not None:
            parts: list[Any] = [next(rest) if isinstance(part, Tensor) else part for part in self.operand]
            self.operand = Operand(*parts)
        return [*rest]

    def clear(self) -> None:
        """Free the operand."""
        self.operand = None


class OwnQuantizer(Quantizer):
    """Casts one tensor of a linear, "input", "weight" or "grad_output", for one of its GEMMs in one of our formats.

    name: the linear's, for its random bits.
    """

    custom = True  # its tensors are not custom: they are dequantised

    def __init__(self, tensor: str, gemm: str, fmt: str, name: str = "") -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.internal = True
        self.tensor, self.gemm, self.fmt, self.name = tensor, gemm, fmt, name
        self.draws = get_format(fmt).stochastic(tensor, REDUCTION_DIM[gemm][tensor])

    def copy(self) -> OwnQuantizer:
        """Another quantizer for the same tensor and GEMM."""
        made = OwnQuantizer(self.tensor, self.gemm, self.fmt, self.name)
        made.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return made

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> OwnTensor:
        """A tensor whose operand ``update_quantized`` makes."""
        return OwnTensor(self, shape, dtype, "cuda" if device is None else device)

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> OwnTensor:
        """The operand of a tensor [..., C].  dtype: what it is rounded to first."""
        made = out if out is not None else OwnTensor(self, tensor.shape, dtype or tensor.dtype, tensor.device)
        return self.update_quantized(tensor, made)

    def update_quantized(self, src: Tensor, dst: OwnTensor, *, noop_flag: Tensor | None = None) -> OwnTensor:
        """Cast src [..., C] into ``dst``, unless the flag is 1."""
        if noop_flag is not None and noop_flag.item():
            return dst
        call = LinearCall(LinearPrecision.uniform(self.fmt), self._key()).on({self.gemm: _BACKEND})
        # kept until backward or longer: a weight, and the input of wgrad
        kept = self.tensor == "weight" or (self.tensor, self.gemm) == ("input", "wgrad")
        form = call.wanted(self.gemm, self.tensor, kept=kept)
        x, dtype = src.detach().reshape(-1, src.shape[-1]), dst.dtype
        (dst.operand,) = cast(x, [form], dtype=None if dtype == x.dtype else dtype)
        dst.device, dst._shape = src.device, src.shape
        return dst

    def _key(self) -> RoundingKey | None:
        """New random bits for this rank only; None if nothing rounds stochastically."""
        if not self.draws:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        return RoundingKey(torch.initial_seed(), draw(), name_stream(self.name), rank << 32)

    def is_requantization_safe(self) -> bool:
        """Whether the same tensor gives the same operand."""
        return not self.draws

    def _get_compatible_recipe(self) -> Any:
        from transformer_engine.common.recipe import CustomRecipe

        return CustomRecipe


class Directions(HybridQuantizer):
    """A rowwise and a columnwise quantizer, one of them ours.

    Under sequence parallelism a tensor is gathered before it is cast, not cast, gathered and cast again.
    """

    custom = True


def draw() -> int:
    """32 random bits from torch's CPU generator, which trainers seed and keep in their checkpoints."""
    return int(torch.randint(2**32, ()))
