"""Linears that Transformer Engine runs where it can, and backends where it cannot.

Transformer Engine runs the three GEMMs of a linear together, so this is decided for each linear: by its formats, the
device, and its sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from megatron_snip.quant.linears.backend import Backends, Sizes
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.operands import LinearCall
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision
from megatron_snip.quant.linears.transformer_engine import TransformerEngine, missing


class EngineFirst:
    """Linear implementation.

    formats: those that Transformer Engine is asked for.  others: who runs the rest.  asked: the user named Transformer
    Engine, and is told why it does not run a linear, even if it is not installed.
    """

    def __init__(self, formats: Collection[str], others: ByGemm, *, asked: bool = False) -> None:
        self._formats, self._others, self._engine = {*formats, "bf16"}, others, TransformerEngine()
        self._asked = asked
        #: Why Transformer Engine does not run a precision on a device at ``Sizes``, or None: asked at every call.
        self._unfit = cache(self._why)
        #: Whether Transformer Engine could run anything on a device: also asked at every call.
        self.usable = cache(lambda device: missing(device) is None)

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why a precision cannot run on a device, or None."""
        return self._others.refusal(precision, device)

    def takes(self, call: LinearCall, device: torch.device, sizes: Sizes) -> bool:
        """Whether Transformer Engine runs this call of a linear.

        If it does not, its copy of the weight is dropped, because the weight may change before it runs again.
        """
        if call.observer is None and self._unfit(call.precision, device, sizes) is None:
            return True
        self._engine.forget(call.weight_casts)
        return False

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] -> y [..., N]."""
        outputs, inputs = w.shape
        if self.takes(call, x.device, Sizes(x.numel() // inputs, inputs, outputs)):
            return self._engine(x, w, call)
        return self._others(x, w, call)

    def backends(
        self, precision: LinearPrecision, device: torch.device, tokens: int, inputs: int, outputs: int
    ) -> Backends:
        """Who multiplies each GEMM where Transformer Engine does not."""
        return self._others.backends(precision, device, tokens, inputs, outputs)

    def runs(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
        """Who multiplies the GEMMs of each format, in words, and where that is news, why not Transformer Engine."""
        names = dict.fromkeys(getattr(precision, gemm) for gemm in GEMMS)
        if (why := self._unfit(precision, device, sizes)) is None:
            return dict.fromkeys(names, "Transformer Engine")
        told = self._others.runs(precision, device, sizes)
        news = self.usable(device) and self._formats >= names.keys()
        if [*names] == ["bf16"] or not (self._asked or news):
            return told
        return {name: f"{who}; not Transformer Engine: {why}" for name, who in told.items()}

    def _why(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> str | None:
        if strange := {getattr(precision, gemm) for gemm in GEMMS} - self._formats:
            return f"it does not have {min(strange)} exactly"
        return self._engine.unfit(precision, device, sizes)
