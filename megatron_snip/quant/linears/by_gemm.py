"""A linear implementation: Transformer Engine for whole linears where it can, else a backend for each GEMM."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache, lru_cache

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.group import Group, run_group
from megatron_snip.quant.linears.operands import Backend, Backends, Casts, LinearCall, Sizes
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision
from megatron_snip.quant.linears.transformer_engine import TransformerEngine, missing

_PLAIN = Emulated()  # for bf16; it multiplies the tensors themselves
_MOST = 4096  # cached choices


class ByGemm:
    """Runs each GEMM of a linear on the first of some backends that can run it.

    engine: formats to try with Transformer Engine first.  It runs the three GEMMs of a linear together, so the choice
    is made per linear, from its formats, the device and its sizes.  Linears with an observer never run there, because
    the observer sees the operands of their GEMMs.  asked: whether the user named Transformer Engine; ``runs`` then says
    why it does not run a linear, even if it is not installed.
    """

    def __init__(self, *backends: Backend, engine: Collection[str] = (), asked: bool = False) -> None:
        self._list, self._asked = backends, asked
        self._engine, self._engine_formats = TransformerEngine() if engine else None, {*engine, "bf16"}
        #: Whether a compiled block may contain its linears.
        self.compiles = not engine
        # cached, because every call of a linear asks; only so many, because other people's batches vary in length
        self._chosen = lru_cache(_MOST)(self._choose)
        #: Precision, device -> why it cannot run there, or None.
        self.refusal = cache(self._refuse)
        #: Why Transformer Engine does not run a precision on a device at ``Sizes``, or None.
        self._unfit = lru_cache(_MOST)(self._why_not_whole)

    def _refuse(self, precision: LinearPrecision, device: torch.device) -> str | None:
        found = (self._first(getattr(precision, gemm), device) for gemm in GEMMS)
        return next((why for backend, why in found if backend is None), None)

    def backends(self, call: LinearCall, device: torch.device, *sizes: int) -> Backends:
        """The backend for each GEMM of a linear of these ``Sizes``, or none if Transformer Engine runs this call.

        If it does not, its copy of the weight is dropped, because the weight may change before it runs again.
        Raises UserError if no backend can run a GEMM.
        """
        if self._engine is not None:
            if call.observer is None and self.runs_whole(call.precision, device, Sizes(*sizes)):
                return {}
            self._engine.forget(call.weight_casts)
        return self._chosen(call.precision, device, *sizes)

    def runs_whole(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> bool:
        """Whether Transformer Engine runs a linear without an observer, and therefore reads the weight itself."""
        return self._engine is not None and self._unfit(precision, device, sizes) is None

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] of x.dtype or float32 -> y [..., N] of x.dtype, differentiable."""
        outputs, inputs = w.shape
        backends = self.backends(call, x.device, x.numel() // inputs, inputs, outputs)
        if backends:
            return run_group([x], [w], Group([call.on(backends)]))[0]
        assert self._engine is not None
        return self._engine(x, w, call)

    def kept_of_weight(self, casts: Casts) -> list[Tensor]:
        """Tensors made of the weight of these ``Casts`` that live for a whole step."""
        return [*casts.tensors(), *(() if self._engine is None else self._engine.kept_of_weight(casts))]

    def runs(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
        """Map each format to the name of what multiplies its GEMMs.

        If they are emulated, it also says why, and if that may surprise, why Transformer Engine does not run them.
        """
        names, told = dict.fromkeys(getattr(precision, gemm) for gemm in GEMMS), dict[str, str]()
        if self.runs_whole(precision, device, sizes):
            return dict.fromkeys(names, "Transformer Engine")
        for name in names:
            backend, why = self._first(name, device, sizes)
            assert backend is not None, "check_linear refuses this"
            reason = f" ({why})" if why and isinstance(backend, Emulated) else ""
            told[name] = "torch" if backend is _PLAIN else f"{backend.name}{reason}"
        if self._engine is None or [*names] == ["bf16"]:
            return told
        if not (self._asked or (missing(device) is None and self._engine_formats >= names.keys())):
            return told
        unfit = self._unfit(precision, device, sizes)
        return {name: f"{who}; not Transformer Engine: {unfit}" for name, who in told.items()}

    def _why_not_whole(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> str | None:
        assert self._engine is not None
        if strange := {getattr(precision, gemm) for gemm in GEMMS} - self._engine_formats:
            return f"it does not have {min(strange)} exactly"
        return self._engine.unfit(precision, device, sizes)

    def _choose(self, precision: LinearPrecision, device: torch.device, *sizes: int) -> Backends:
        chosen = {}
        for gemm in GEMMS:
            backend, why = self._first(getattr(precision, gemm), device, Sizes(*sizes))
            if backend is None:
                raise UserError(f"this --linear-impl has no backend: {why}; use --linear-impl auto or emulated")
            chosen[gemm] = backend
        return chosen

    def _first(self, name: str, device: torch.device, sizes: Sizes | None = None) -> tuple[Backend | None, str]:
        """The first backend that runs a format here, and why earlier ones do not.

        Reasons from backends that never take the format count only if there are no others.
        """
        fmt = get_format(name)
        if not fmt.quantised:
            return _PLAIN, ""
        strange: list[str] = []
        here: list[str] = []
        for backend in self._list:
            if why := backend.unfit_format(fmt):
                strange.append(why)
                continue
            why = backend.unfit_device(device) or (backend.unfit_sizes(fmt, sizes) if sizes is not None else None)
            if why is None:
                return backend, "; ".join(here or strange)
            here.append(why)
        return None, "; ".join(here or strange)
