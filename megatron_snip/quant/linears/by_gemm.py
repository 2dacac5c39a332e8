"""Linears of which each GEMM runs on the first backend of a list that can run it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant.linears.backend import Backend, Backends, Sizes
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.group import Group, run_group
from megatron_snip.quant.linears.operands import LinearCall
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision

_PLAIN = Emulated()  # for bf16; it multiplies the tensors themselves


class ByGemm:
    """A linear implementation from a list of backends, the best first."""

    def __init__(self, *backends: Backend) -> None:
        self._list = backends
        #: Precision, device, ``Sizes`` -> the backend of each GEMM.  Cached, because every call asks.  Raises UserError
        #: as a call does.
        self.backends = cache(self._choose)

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why a precision cannot run on a device, or None."""
        for gemm in GEMMS:
            backend, why = self._first(getattr(precision, gemm), device)
            if backend is None:
                return why
        return None

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] -> y [..., N].  Raises UserError if no backend of the list can run a GEMM."""
        outputs, inputs = w.shape
        backends = self.backends(call.precision, x.device, x.numel() // inputs, inputs, outputs)
        return run_group(x, [w], Group([call], [backends]))[0]

    def runs(self, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
        """Format -> the name of the backend of its GEMMs; if they are emulated, also why."""
        told = {}
        for name in dict.fromkeys(getattr(precision, gemm) for gemm in GEMMS):
            backend, why = self._first(name, device, sizes)
            assert backend is not None, "check_linear refuses this"
            if backend is _PLAIN:
                told[name] = "torch"
                continue
            told[name] = f"{backend.name} ({why})" if why and isinstance(backend, Emulated) else backend.name
        return told

    def _choose(self, precision: LinearPrecision, device: torch.device, *sizes: int) -> Backends:
        chosen = []
        for gemm in GEMMS:
            backend, why = self._first(getattr(precision, gemm), device, Sizes(*sizes))
            if backend is None:
                raise UserError(f"this --linear-impl has no backend: {why}; use --linear-impl auto or emulated")
            chosen.append(backend)
        return Backends(*chosen)

    def _first(self, name: str, device: torch.device, sizes: Sizes | None = None) -> tuple[Backend | None, str]:
        """The first backend that runs a format here, and why earlier ones do not.

        If some backends take the format, only their reasons count.
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
            why = backend.unfit_device(device) or (backend.unfit_sizes(sizes) if sizes is not None else None)
            if why is None:
                return backend, "; ".join(here or strange)
            here.append(why)
        return None, "; ".join(here or strange)
