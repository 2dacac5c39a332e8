"""A linear implementation that runs Transformer Engine where it can, and backends where it cannot.

Transformer Engine runs the three GEMMs of a linear together, so the choice is made per linear, from its formats, the
device and its sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.operands import Backend, Backends, Casts, LinearCall, Sizes
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision
from megatron_snip.quant.linears.transformer_engine import TransformerEngine, missing


class EngineFirst(ByGemm):
    """Runs linears with Transformer Engine first.

    formats: the ones to try with Transformer Engine.  backends: run the rest.  asked: whether the user named
    Transformer Engine; ``runs`` then says why it does not run a linear, even if it is not installed.
    """

    compiles = False

    def __init__(self, formats: Collection[str], *backends: Backend, asked: bool = False) -> None:
        super().__init__(*backends)
        self._formats, self._engine, self._asked = {*formats, "bf16"}, TransformerEngine(), asked
        #: Why Transformer Engine does not run a precision on a device at ``Sizes``, or None; cached for every call.
        self._unfit = cache(self._why)

    def backends(self, call: LinearCall, device: torch.device, *sizes: int) -> Backends:
        """The backend for each GEMM, or none if Transformer Engine runs this call of a linear.

        If it does not, its copy of the weight is dropped, because the weight may change before it runs again.
        """
        if call.observer is None and self.runs_whole(call.precision, device, Sizes(*sizes)):
            return {}
        self._engine.forget(call.weight_casts)
        return super().backends(call, device, *sizes)

    def runs_whole(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> bool:
        """Whether Transformer Engine runs a linear without an observer."""
        return self._unfit(precision, device, sizes) is None

    def run_whole(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] -> y [..., N] by Transformer Engine."""
        return self._engine(x, w, call)

    def kept_of_weight(self, casts: Casts) -> list[Tensor]:
        """The same, with those of Transformer Engine."""
        return [*super().kept_of_weight(casts), *self._engine.kept_of_weight(casts)]

    def runs(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
        """What multiplies the GEMMs of each format and, if that may surprise, why not Transformer Engine."""
        names = dict.fromkeys(getattr(precision, gemm) for gemm in GEMMS)
        if (why := self._unfit(precision, device, sizes)) is None:
            return dict.fromkeys(names, "Transformer Engine")
        told = super().runs(precision, device, sizes)
        news = missing(device) is None and self._formats >= names.keys()
        if [*names] == ["bf16"] or not (self._asked or news):
            return told
        return {name: f"{who}; not Transformer Engine: {why}" for name, who in told.items()}

    def _why(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> str | None:
        if strange := {getattr(precision, gemm) for gemm in GEMMS} - self._formats:
            return f"it does not have {min(strange)} exactly"
        return self._engine.unfit(precision, device, sizes)
