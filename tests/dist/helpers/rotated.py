"""Formats with transforms of every GEMM, and with operands that are cast again, for the ranks of a test."""

from __future__ import annotations

from dataclasses import replace

from megatron_snip.formats import ROLES, Hadamard, get_format, register


def register_rotated() -> None:
    """Register "rotated" in this process: along tokens and channels, which tp cuts, under the whole tensor's amax."""
    everywhere = Hadamard("+--+" * 4, frozenset({"fprop", "dgrad", "wgrad"}))
    register(replace(get_format("nvfp4_plain"), name="rotated", hadamard=everywhere))


def register_again() -> None:
    """Register "again" in this process: every second operand is cast from the first, under the whole one's amax."""
    register(replace(get_format("nvfp4_plain"), name="again", recast=frozenset(ROLES)))
