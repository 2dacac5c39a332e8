"""Number formats as data: elements, blocks and scales.  ``python -m megatron_snip.formats`` lists them."""

from __future__ import annotations

from megatron_snip.formats.element import NAN_CODE, Element
from megatron_snip.formats.format import (
    E4M3_SCALES,
    ROLES,
    ROW,
    SCALES,
    Format,
    Hadamard,
    format_names,
    get_format,
    register,
)
from megatron_snip.formats.known import BF16, FP4, FP8, FP8_E5M2

__all__ = [
    "BF16",
    "E4M3_SCALES",
    "FP4",
    "FP8",
    "FP8_E5M2",
    "NAN_CODE",
    "ROLES",
    "ROW",
    "SCALES",
    "Element",
    "Format",
    "Hadamard",
    "format_names",
    "get_format",
    "register",
]
