"""A format with transforms of every GEMM, for the ranks of a test."""

from __future__ import annotations

from dataclasses import replace

from megatron_snip.formats import Hadamard, get_format, register


def register_rotated() -> None:
    """Register "rotated" in this process: along tokens and channels, which tp cuts, under the whole tensor's amax."""
    everywhere = Hadamard("+--+" * 4, frozenset({"fprop", "dgrad", "wgrad"}))
    register(replace(get_format("nvfp4_plain"), name="rotated", hadamard=everywhere))
