"""Which format each of a linear's three GEMMs runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format

GEMMS = ("fprop", "dgrad", "wgrad")

#: Operands along dim 0, and the GEMM that multiplies the same tensor along dim 1.
_ALONG_ROWS = {("dgrad", "weight"): "fprop", ("wgrad", "input"): "fprop", ("wgrad", "grad_output"): "dgrad"}


@dataclass(frozen=True)
class LinearPrecision:
    """One format name for each of fprop, dgrad and wgrad.

    ``str()`` gives the shortest option string, "fp4" or "fp4/fp4/fp8", which ``parse`` reads.
    Raises UserError for an unknown format.
    """

    fprop: str
    dgrad: str
    wgrad: str

    #: (GEMM, role) of operands that are cast from what another GEMM multiplies (``Format.recast``) -> that GEMM.
    sources: Mapping[tuple[str, str], str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for gemm in GEMMS:
            try:
                get_format(getattr(self, gemm))
            except ValueError as error:
                raise UserError(f"{gemm}: {error}") from None
        sources = {operand: first for operand, first in _ALONG_ROWS.items() if self._recasts(*operand, first)}
        object.__setattr__(self, "sources", sources)

    def _recasts(self, gemm: str, role: str, first: str) -> bool:
        fmt, source = get_format(getattr(self, gemm)), get_format(getattr(self, first))
        same = role == "weight" and fmt == source and fmt.shares_weight  # fprop's operand is also dgrad's
        return role in fmt.recast and source.quantised and not same

    @classmethod
    def uniform(cls, name: str) -> LinearPrecision:
        """The same format in all three GEMMs."""
        return cls(name, name, name)

    @classmethod
    def parse(cls, text: str) -> LinearPrecision:
        """Read "FORMAT" or "FPROP/DGRAD/WGRAD".  Raises UserError for anything else."""
        names = text.split("/")
        if len(names) not in (1, len(GEMMS)):
            raise UserError(f"precision {text!r}: write one format, or three as fprop/dgrad/wgrad")
        return cls.uniform(text) if len(names) == 1 else cls(*names)

    def __str__(self) -> str:
        names = [getattr(self, gemm) for gemm in GEMMS]
        return names[0] if len(set(names)) == 1 else "/".join(names)
