"""Backends: who holds and multiplies the operands of a linear's GEMMs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quant.cast import Operand, Output


class Sizes(NamedTuple):
    """What a linear multiplies: x [tokens, inputs], w [outputs, inputs], of this process."""

    tokens: int
    inputs: int
    outputs: int


class Backend(ABC):
    """One way to hold and to multiply quantised operands; where it cannot, it says why."""

    name: str  # as the start of a run tells it
    takes_values = False  # for ``codes`` too, which a cast that makes codes to keep gives besides

    def unfit_format(self, fmt: Format) -> str | None:
        """Why it cannot run GEMMs of a quantised format anywhere, or None if it can."""
        return None

    def unfit_device(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, or None if it can."""
        return None

    def unfit_sizes(self, sizes: Sizes) -> str | None:
        """Why it cannot run the GEMMs of a linear of these sizes, or None if it can."""
        return None

    @abstractmethod
    def output(self, role: str, *, kept: bool) -> Output:
        """How an operand of a role is held; ``kept`` until backward or longer, so memory counts."""

    @abstractmethod
    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """The product of a GEMM in dtype ``out``, operands dequantised to ``dtype`` where that is needed; a and b as
        the table in operands.py: fprop (X [T,K], W [N,K]), dgrad (G [T,N], W [N,K]), wgrad (G [T,N], X [T,K]).
        """


class Backends(NamedTuple):
    """Who multiplies each GEMM of a linear."""

    fprop: Backend
    dgrad: Backend
    wgrad: Backend
