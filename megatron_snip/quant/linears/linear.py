"""The quantised linear, and the table of its implementations.

It takes plain tensors, because the amax of a DTensor would hide an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant.casts.rounding import RoundingKey
from megatron_snip.quant.kernels.dispatch import ReduceAmax
from megatron_snip.quant.linears.block_scaled import MX, NVFP4
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.operands import REDUCTION_DIM, Casts, LinearCall, LinearObserver
from megatron_snip.quant.linears.precision import LinearPrecision
from megatron_snip.quant.linears.scaled_mm import Hopper, RowWise
from megatron_snip.quant.linears.transformer_engine import EXACT, FORMATS

_BUILT_IN = Hopper(), MX(), NVFP4(), RowWise(), Emulated()  # every GEMM goes to the first that can run it
#: Linear implementations by the name that ``quantized_linear``'s impl and --linear-impl take.
LINEAR_IMPLS = {
    "auto": ByGemm(*_BUILT_IN, engine=EXACT),
    "emulated": ByGemm(Emulated()),
    "built_in": ByGemm(*_BUILT_IN),
    "scaled_mm": ByGemm(*_BUILT_IN[:-1]),
    "transformer_engine": ByGemm(*_BUILT_IN, engine=FORMATS, asked=True),
}


def check_linear(impl: str, precision: LinearPrecision, device: torch.device) -> None:
    """Raise UserError, which names alternatives, if an implementation cannot run a precision on a device."""
    if impl not in LINEAR_IMPLS:
        raise UserError(f"linear implementation {impl!r} is unknown; known: {', '.join(LINEAR_IMPLS)}")
    if reason := LINEAR_IMPLS[impl].refusal(precision, device):
        able = [name for name, other in LINEAR_IMPLS.items() if other.refusal(precision, device) is None]
        raise UserError(
            f"--linear-impl {impl} cannot run {precision} here: {reason}; use --linear-impl {' or '.join(able[:2])}"
        )


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

    w may be float32 if x is bfloat16 (a master weight): it is rounded to x.dtype first.  Its gradient is
    float32, which CPUs round to bfloat16 before, because they multiply bfloat16 only into bfloat16.
    key: the linear's own (stream = ``name_stream(name)``); its row0 is the global row of x's first token.  Each
    operand's key is derived from it.  It may be None if nothing rounds stochastically.
    input_col0, output_col0: the global channels of the first columns of x and y, for tensor-parallel shards.
    weight_casts: caches the weight's casts until it changes.  reduce_amax: role -> a function from the amax of a shard
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
        training = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
        for gemm, dims in REDUCTION_DIM.items():
            fmt = get_format(getattr(precision, gemm))
            drawn = sorted(role for role, dim in dims.items() if fmt.stochastic(role, dim))
            if drawn and (gemm == "fprop" or training):
                raise UserError(
                    f"{gemm} in {fmt.name} rounds {drawn[0]} stochastically, key is None; give a RoundingKey"
                )
    call = LinearCall(precision, key, input_col0, output_col0, observer, weight_casts, reduce_amax or {})
    return LINEAR_IMPLS[impl](x, w, call)


def compiled_impl(impl: str) -> str:
    """The implementation to use in compiled blocks; for auto, the one without Transformer Engine.

    Raises UserError, which names alternatives, if an implementation cannot be part of a compiled block.
    """
    if LINEAR_IMPLS[impl].compiles:
        return impl
    if impl != "auto":
        raise UserError(f"--compile does not go with --linear-impl {impl}; use --linear-impl auto or emulated")
    return "built_in"
