"""A linear implementation that runs each GEMM on the first backend of a list that can run it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.group import Group, run_group
from megatron_snip.quant.linears.operands import Backend, Backends, Casts, LinearCall, Sizes
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision

_PLAIN = Emulated()  # for bf16; it multiplies the tensors themselves


class ByGemm:
    """Runs linears with a list of backends, best first.

    A subclass may run some linears whole: `backends` returns none for them, and `run_whole` runs them.  Linears with an
    observer must have backends, because the observer sees the operands of their GEMMs.
    """

    compiles = True  # whether a compiled block may contain its linears

    def __init__(self, *backends: Backend) -> None:
        self._list = backends
        # cached, because every call of a linear asks
        self._chosen = cache(self._choose)
        #: Precision, device -> why it cannot run there, or None.
        self.refusal = cache(self._refuse)

    def _refuse(self, precision: LinearPrecision, device: torch.device) -> str | None:
        found = (self._first(getattr(precision, gemm), device) for gemm in GEMMS)
        return next((why for backend, why in found if backend is None), None)

    def backends(self, call: LinearCall, device: torch.device, *sizes: int) -> Backends:
        """The backend for each GEMM of a linear of these ``Sizes``, or none if `run_whole` runs it.

        Raises UserError if no backend of the list can run a GEMM.
        """
        return self._chosen(call.precision, device, *sizes)

    def runs_whole(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> bool:
        """Whether `run_whole` runs a linear without an observer, and therefore reads the weight itself."""
        return False

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] of x.dtype or float32 -> y [..., N] of x.dtype, differentiable."""
        outputs, inputs = w.shape
        backends = self.backends(call, x.device, x.numel() // inputs, inputs, outputs)
        if not backends:
            return self.run_whole(x, w, call)
        return run_group([x], [w], Group([call.on(backends)]))[0]

    def run_whole(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] -> y [..., N], for linears that have no backends."""
        raise NotImplementedError

    def kept_of_weight(self, casts: Casts) -> list[Tensor]:
        """Tensors made of the weight of these ``Casts`` that live for a whole step."""
        return casts.tensors()

    def runs(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
        """Map each format to the name of what multiplies its GEMMs; if they are emulated, also say why."""
        told = {}
        for name in dict.fromkeys(getattr(precision, gemm) for gemm in GEMMS):
            backend, why = self._first(name, device, sizes)
            assert backend is not None, "check_linear refuses this"
            reason = f" ({why})" if why and isinstance(backend, Emulated) else ""
            told[name] = "torch" if backend is _PLAIN else f"{backend.name}{reason}"
        return told

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
