"""What another program runs each of its modules in for a plan, and notes on what it cannot express."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_snip.config import ParallelConfig
from megatron_snip.errors import UserError
from megatron_snip.formats import format_names, get_format
from megatron_snip.model.spec import linear_place
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.plan.cost import achieved, saving
from megatron_snip.snip.plan.plan_file import Plan

#: Format -> the format that another program has for it, and what differs; "" for nothing.
Known = Mapping[str, tuple[str, str]]
_BLOCKS = "its blocks are 1x16 with E4M3 scales"
_E4M3 = "its gradients are E4M3"
_AGAIN = "nothing is cast again"
_ROWS = "its scales are of whole rows"
_SIX = "a block's largest value becomes 6"
#: Transformer Engine, by GEMM.
ENGINE: Known = {
    **{name: (name, "") for name in ("bf16", "fp8", "fp8_hybrid", "fp8_pow2", "mxfp8", "nvfp4_plain", "nvfp4")},
    **{name: (name, "") for name in ("mxfp8_dequantized", "bf16_dequantized")},
    "mxfp4_tetrajet": ("nvfp4", f"{_BLOCKS}, and {_AGAIN}"),
    **dict.fromkeys(("fp4", "fp4_pow2", "mxfp4", "mxfp4_floor"), ("nvfp4", _BLOCKS)),
    "nvfp4_4over6": ("nvfp4", _SIX),
    "fp8_rowwise": ("fp8_pow2", "its scales are of 1x128 and 128x128 blocks"),
}
#: The same by one recipe for a linear.
RECIPES: Known = {
    **ENGINE,
    "fp8": ("fp8_pow2", "its scales are powers of two"),
    "mxfp8_dequantized": ("mxfp8", _AGAIN),
    "bf16_dequantized": ("bf16", _AGAIN),
    "fp8_hybrid": ("fp8_pow2", f"its scales are powers of two, and {_E4M3}"),
    "nvfp4_plain": ("nvfp4", "it transforms wgrad's operands and has 16x16 blocks of weights"),
}
#: Transformer Engine by GEMM, with this package's quantizer for the formats that it lacks.
OWN: Known = {**{name: (name, "") for name in format_names()}, "mxfp4_tetrajet": ("mxfp4", _AGAIN)}
TITAN: Known = {
    **RECIPES,
    **dict.fromkeys(("fp8", "fp8_pow2"), ("fp8_rowwise", _ROWS)),
    "fp8_hybrid": ("fp8_rowwise", f"{_ROWS}, and {_E4M3}"),
    "fp8_rowwise": ("fp8_rowwise", ""),
}
MODELOPT: Known = {
    "bf16": ("bf16", ""),
    **dict.fromkeys(("fp8", "fp8_hybrid", "fp8_pow2", "fp8_rowwise"), ("fp8", "its scales are of whole tensors")),
    **dict.fromkeys(("mxfp8", "mxfp8_dequantized"), ("mxfp8", "")),
    "bf16_dequantized": ("bf16", ""),
    **dict.fromkeys(("mxfp4", "mxfp4_tetrajet"), ("mxfp4", "")),
    "mxfp4_floor": ("mxfp4", "its scales are rounded up"),
    **dict.fromkeys(("fp4", "fp4_pow2"), ("nvfp4_plain", _BLOCKS)),
    "nvfp4_plain": ("nvfp4_plain", ""),
    "nvfp4": ("nvfp4_plain", "it transforms nothing"),
    "nvfp4_4over6": ("nvfp4_plain", f"it transforms nothing, and {_SIX}"),
}
TORCHAO: Known = {name: (name, "") for name in ENGINE}
_FUSED = "modules of several linears in different formats take the most precise"

Version = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """A plan to write.  shapes: of its linears, if the model is known.  version: of the program that reads it.

    own_casts: our quantizer runs what Transformer Engine lacks.
    """

    plan: Plan
    parallel: ParallelConfig
    version: Version
    shapes: Sequence[LinearShape] | None = None
    own_casts: bool = False


class Chosen:
    """The precision of each module of the other program, and notes on what differs.

    by_gemm: its GEMMs may differ.  forward_only: it knows fprop alone, and gradients stay in BF16.
    """

    def __init__(
        self,
        request: Request,
        module: Callable[[int, str], str],
        known: Known,
        *,
        by_gemm: bool = False,
        forward_only: bool = False,
    ) -> None:
        self.modules: dict[str, LinearPrecision] = {}  # in the plan's order
        self._request, told = request, Counter[str]()
        left: dict[str, LinearPrecision] = {}
        members: dict[str, list[str]] = {}
        for name in request.plan.linears:
            place = linear_place(name)
            assert place is not None, "plans are of linears of blocks"
            members.setdefault(module(place[0], place[1]), []).append(name)
        for name, linears in members.items():
            precisions = [request.plan.linears[linear] for linear in linears]
            if forward_only:
                precisions = [LinearPrecision.uniform(p.fprop) for p in precisions]
            elif not by_gemm:
                told["linears whose GEMMs differ take their most precise format"] += sum(
                    len({p.fprop, p.dgrad, p.wgrad}) > 1 for p in precisions
                )
                precisions = [LinearPrecision.uniform(_most_precise([p])) for p in precisions]
            told[_FUSED] += len({*precisions}) > 1
            most = [_most_precise(precisions, gemm) for gemm in GEMMS]
            for fmt in dict.fromkeys(most):
                if fmt not in known:
                    raise UserError(f"{fmt} has no counterpart there; make a plan of {', '.join(known)}")
                told[f"modules in {fmt} become {known[fmt][0]}: {known[fmt][1]}"] += known[fmt][1] != ""
            precision = LinearPrecision(*(known[fmt][0] for fmt in most))
            if forward_only:
                precision = replace(precision, dgrad="bf16", wgrad="bf16")
            self.modules[name] = precision
            left |= dict.fromkeys(linears, precision)
        self.notes = [f"{count} {note}" for note, count in told.items() if count]
        self.share = self._left(left)
        if self.share:
            way_out = "; make the plan with --snip-granularity fused first, which gives such linears one precision"
            self.notes.insert(0, self.share + (way_out if told[_FUSED] else ""))

    def _left(self, left: Mapping[str, LinearPrecision]) -> str:
        """What is left of the plan's FP4, in words; "" for all of it."""
        plan, shapes = self._request.plan, self._request.shapes
        before, now = (sum(map(saving, linears.values())) for linears in (plan.linears, left))
        if now == before:
            return ""
        if shapes is not None:
            return f"{achieved(shapes, left):.2%} of the linears' FLOPs stay in FP4, of {plan.fp4_share(shapes):.2%}"
        return f"{now / before:.2%} of the FP4 GEMMs stay in FP4 (by number; name the model for FLOPs)"

    def header(self, mark: str = "# ") -> str:
        """The first lines of a file."""
        plan = self._request.plan
        text = f"{mark}megatron_snip's plan {plan.hash} of iteration {plan.iteration}: {plan.achieved:.2%} in FP4.\n"
        return f"{text}{mark}As written here, {self.share}.\n" if self.share else text

    def uniform(self) -> dict[str, str]:
        """Module -> the format of its fprop: of all its GEMMs, unless they may differ."""
        return {name: precision.fprop for name, precision in self.modules.items()}


def _most_precise(precisions: Iterable[LinearPrecision], gemm: str | None = None) -> str:
    found = {getattr(precision, each) for precision in precisions for each in ([gemm] if gemm else GEMMS)}
    return max(sorted(found), key=lambda name: get_format(name).bits_per_element)
