"""Backends: how the operands of a linear's GEMMs are held, and what multiplies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quant.casts.cast import Operand, Output


class Sizes(NamedTuple):
    """Sizes of what this process multiplies in a linear: x [tokens, inputs], w [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int


class Backend(ABC):
    """One way to hold and multiply quantised operands.  If it cannot, it says why."""

    name: str  # printed at the start of a run
    takes_values = False  # whether it also takes values where it wants codes: a cast can make both from one read

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
        """How an operand of a role is held.  kept: until backward or longer, so that memory matters."""

    @abstractmethod
    def multiply(self, gemm: str, a: Operand, b: Operand, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """The product of a GEMM in dtype ``out``; operands that must be dequantised become ``dtype`` first.

        a and b are as in operands.py: fprop (X [T,K], W [N,K]), dgrad (G [T,N], W [N,K]), wgrad (G [T,N], X [T,K]).
        """


#: The backend of each GEMM of a linear, by the GEMM's name.
Backends = Mapping[str, Backend]
