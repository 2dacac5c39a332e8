"""Number formats as data: elements, blocks and scales.  ``python -m megatron_snip.formats`` lists them."""

from __future__ import annotations

from megatron_snip.formats import known as known  # registers its formats
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

__all__ = [
    "E4M3_SCALES",
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
