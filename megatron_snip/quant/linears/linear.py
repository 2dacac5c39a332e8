"""The quantised linear, and the table of its implementations.

An implementation is a callable ``(x [..., K], w [N,K], call) -> y [..., N]``, differentiable, with ``refusal(precision,
device)``, which says why it cannot run a precision on a device.  Tensors are plain: the amax of a DTensor would hide an
all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.kernels.dispatch import ReduceAmax
from megatron_snip.quant.linears.backend import Backends, Sizes
from megatron_snip.quant.linears.block_scaled import MX, NVFP4
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.engine_first import EngineFirst
from megatron_snip.quant.linears.operands import REDUCTION_DIM, Casts, LinearCall, LinearObserver
from megatron_snip.quant.linears.precision import GEMMS, LinearPrecision
from megatron_snip.quant.linears.scaled_mm import Hopper
from megatron_snip.quant.linears.transformer_engine import EXACT, FORMATS


class LinearImplementation(Protocol):
    """One way to run a linear.

    A probe runs linears in bf16 and observes what they multiply, so an implementation must show its bf16 operands to
    ``call.observer``.  The simplest way is to run bf16 by ``ByGemm()``, as engine_first.py does.
    """

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why it cannot run a precision on a device, or None if it can."""
        ...

    def __call__(self, x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
        """x [..., K], w [N,K] of x.dtype or float32 -> y [..., N] of x.dtype, differentiable."""
        ...


_IMPLEMENTATIONS: dict[str, LinearImplementation] = {}


def register_linear(name: str, implementation: LinearImplementation) -> None:
    """Add a linear implementation to the table.  Raises UserError if the name is taken."""
    if name in _IMPLEMENTATIONS:
        raise UserError(f"linear implementation {name!r} is taken; choose another name")
    _IMPLEMENTATIONS[name] = implementation


def linear_implementations() -> list[str]:
    """Names that ``quantized_linear``'s impl and --linear-impl take."""
    return list(_IMPLEMENTATIONS)


def check_linear(impl: str, precision: LinearPrecision, device: torch.device) -> None:
    """Raise UserError, naming the way out, if an implementation cannot run a precision on a device."""
    if impl not in _IMPLEMENTATIONS:
        raise UserError(f"linear implementation {impl!r} is unknown; known: {', '.join(_IMPLEMENTATIONS)}")
    if reason := _refusal(impl, precision, device):
        able = [name for name, other in _IMPLEMENTATIONS.items() if other.refusal(precision, device) is None]
        raise UserError(
            f"--linear-impl {impl} cannot run {precision} here: {reason}; use --linear-impl {' or '.join(able[:2])}"
        )


@cache
def _refusal(impl: str, precision: LinearPrecision, device: torch.device) -> str | None:
    """Cached, because every call of a linear asks."""
    return _IMPLEMENTATIONS[impl].refusal(precision, device)


def quantized_linear(
    x: Tensor,
    w: Tensor,
    precision: LinearPrecision,
    *,
    key: RoundingKey | None,
    impl: str = "emulated",
    input_col0: int = 0,
    output_col0: int = 0,
    observer: LinearObserver | None = None,
    weight_casts: Casts | None = None,
    reduce_amax: Mapping[str, ReduceAmax] | None = None,
) -> Tensor:
    """``x @ w.T`` with every GEMM in its format: x [T,K], w [N,K] -> y [T,N] of x.dtype, differentiable.

    w may be float32 if x is bfloat16 (a master weight): it is rounded to x.dtype first, and so is its gradient before
    it becomes float32.
    key: the linear's own (stream = ``name_stream(name)``); its row0 is the global row of x's first token.  The key of
    each operand is derived from it.  It may be None if nothing rounds stochastically.
    input_col0, output_col0: the global channels of the first columns of x and y, for tensor-parallel shards.
    weight_casts: keeps the weight's casts until it changes.  reduce_amax: role -> a function from the amax of a shard
    to that of the whole tensor, for formats that need it.
    Raises UserError for an unknown impl, one that cannot run the precision, shapes or dtypes that do not match, and a
    missing key.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise UserError(f"x {list(x.shape)} and w {list(w.shape)} do not match; give x [T,K] and w [N,K]")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"x is {x.dtype}; convert it to bfloat16 or float32")
    if w.dtype not in (x.dtype, torch.float32):
        raise UserError(f"x is {x.dtype}, w is {w.dtype}; convert one of them")
    check_linear(impl, precision, x.device)
    if key is None:
        _refuse_stochastic(precision, torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
    call = LinearCall(precision, key, input_col0, output_col0, observer, weight_casts, reduce_amax or {})
    return run_linear(x, w, call, impl)


def run_linear(x: Tensor, w: Tensor, call: LinearCall, impl: str) -> Tensor:
    """``quantized_linear`` without its checks, which the caller has made: x [..., K], w [N,K] -> y [..., N]."""
    return _IMPLEMENTATIONS[impl](x, w, call)


def _refuse_stochastic(precision: LinearPrecision, training: bool) -> None:
    """Raise UserError for a GEMM that would round stochastically, since there is no key."""
    for gemm, dims in REDUCTION_DIM.items():
        fmt = get_format(getattr(precision, gemm))
        stochastic = sorted(role for role, dim in dims.items() if fmt.stochastic(role, dim))
        if stochastic and (gemm == "fprop" or training):
            raise UserError(
                f"{gemm} in {fmt.name} rounds {stochastic[0]} stochastically, key is None; give a RoundingKey"
            )


def compiled_impl(impl: str) -> str:
    """The implementation that linears have where blocks are compiled: auto's is without Transformer Engine.

    Raises UserError, naming the way out, if an implementation cannot be part of a compiled block.
    """
    if impl == "auto":
        return "built_in"
    if not isinstance(_IMPLEMENTATIONS[impl], ByGemm):
        able = ["auto", *(name for name, other in _IMPLEMENTATIONS.items() if isinstance(other, ByGemm))]
        raise UserError(f"--compile does not go with --linear-impl {impl}; use --linear-impl {' or '.join(able[:2])}")
    return impl


def gemm_by_gemm(impl: str, device: torch.device) -> bool:
    """Whether each GEMM of any linear goes to a backend of its own on a device, which ``backends_of`` tells."""
    found = _IMPLEMENTATIONS[impl]
    return isinstance(found, ByGemm) or (isinstance(found, EngineFirst) and not found.usable(device))


def runs_alone(impl: str, call: LinearCall, device: torch.device, sizes: Sizes) -> bool:
    """Whether an implementation runs all of a linear itself; to be asked before calls that pass ``run_linear`` by."""
    found = _IMPLEMENTATIONS[impl]
    return found.takes(call, device, sizes) if isinstance(found, EngineFirst) else not isinstance(found, ByGemm)


def backends_of(
    impl: str, precision: LinearPrecision, device: torch.device, tokens: int, inputs: int, outputs: int
) -> Backends:
    """The backend of each GEMM of a linear of these ``Sizes`` that does not run alone."""
    return _IMPLEMENTATIONS[impl].backends(precision, device, tokens, inputs, outputs)  # type: ignore[attr-defined]


def linear_runs(impl: str, precision: LinearPrecision, device: torch.device, sizes: Sizes) -> dict[str, str]:
    """Format -> the name of what multiplies its GEMMs in a linear; ``check_linear`` has passed."""
    implementation = _IMPLEMENTATIONS[impl]
    if isinstance(implementation, ByGemm | EngineFirst):
        return implementation.runs(precision, device, sizes)
    return {getattr(precision, gemm): impl for gemm in GEMMS}


# every GEMM goes to the first backend that can run it
_BUILT_IN = ByGemm(Hopper(), MX(), NVFP4(), Emulated())
register_linear("auto", EngineFirst(EXACT, _BUILT_IN))
register_linear("emulated", ByGemm(Emulated()))
register_linear("built_in", _BUILT_IN)
register_linear("scaled_mm", ByGemm(Hopper(), MX(), NVFP4()))
register_linear("transformer_engine", EngineFirst(FORMATS, _BUILT_IN, asked=True))
