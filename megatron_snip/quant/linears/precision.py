"""Which format each of a linear's three GEMMs runs in."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class LinearPrecision:
    """One format name for each of fprop, dgrad and wgrad.

    ``str()`` gives the shortest option string, "fp4" or "fp4/fp4/fp8", which ``parse`` reads.
    Raises UserError for an unknown format.
    """

    fprop: str
    dgrad: str
    wgrad: str

    def __post_init__(self) -> None:
        for gemm in GEMMS:
            try:
                get_format(getattr(self, gemm))
            except ValueError as error:
                raise UserError(f"{gemm}: {error}") from None

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
