"""What a precision saves: the FP4 share of the linears' FLOPs, or GEMM time.

Source: SNIP, arXiv 2602.01410 (efficiency = fraction of FLOPs in FP4).
Convention: a linear has three GEMMs (fprop, dgrad, wgrad) of 2 N K FLOPs per token each, shapes are those of
the whole model, whatever tp shards them.  A matrix [L, O] has one row per linear and one column per option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS, LinearPrecision

Floats = NDArray[np.float64]

GRANULARITIES = ("linear", "gemm", "fused")
#: Measures of ``efficiency`` by name -> what one GEMM saves, 0..1, from the bits of its format's elements.
#: "time": a GEMM takes time in proportion to its bits (BF16 1, FP8 1/2, FP4 1/4); what FP4 saves counts as 1.
MEASURES = {
    "fp4": lambda bits: float(bits <= 4),
    "time": lambda bits: (16 - bits) / 12,
}
#: Linears that kernels run as one GEMM, by the end of their names.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class LinearShape:
    """A linear of the whole model: weight [out_features, in_features], on this pipeline stage."""

    name: str
    out_features: int
    in_features: int
    stage: int = 0

    @property
    def gemm_flops(self) -> int:
        """FLOPs per token of each of its three GEMMs."""
        return 2 * self.out_features * self.in_features


def linear_options(formats: Iterable[str], granularity: str = "linear") -> list[LinearPrecision]:
    """Options of a linear.  "linear", "fused": each of ``formats`` (or triples such as "fp4/fp4/fp8") as it
    stands; "gemm": every combination over the three GEMMs.  Order kept, repeats dropped.

    Raises ValueError for unknown formats or granularities, no format, and triples in "gemm".
    """
    names = list(dict.fromkeys(formats))
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")
    if not names:
        raise ValueError("no options to plan with; name at least one format, such as fp8,fp4")
    if granularity != "gemm":
        return list(dict.fromkeys(LinearPrecision.parse(name) for name in names))
    if triples := [name for name in names if "/" in name]:
        raise ValueError(f"options {triples} already name three GEMMs; granularity gemm takes single formats")
    return [LinearPrecision(*triple) for triple in product(names, repeat=len(GEMMS))]


def fused_ties(names: Sequence[str]) -> NDArray[np.int64]:
    """``ties`` of ilp.solve for granularity "fused", [L]: q, k, v of a block share an id, gate and up too."""
    keys = []
    for name in names:
        block, _, kind = name.rpartition(".")
        group = next((g for g, kinds in enumerate(FUSED_GROUPS) if kind in kinds), None)
        keys.append(None if group is None else (block, group))
    ids = {key: number for number, key in enumerate(dict.fromkeys(k for k in keys if k is not None))}
    return np.array([-1 if key is None else ids[key] for key in keys], dtype=np.int64)


def stages(shapes: Sequence[LinearShape]) -> NDArray[np.int64]:
    """``stage`` of ilp.solve, [L]."""
    return np.array([shape.stage for shape in shapes], dtype=np.int64)


def saving(precision: LinearPrecision, measure: str = "fp4") -> float:
    """What a linear in this precision saves, 0..1: the mean over its three GEMMs, all of one size."""
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; known: {', '.join(MEASURES)}")
    bits = (get_format(getattr(precision, gemm)).element_bits for gemm in GEMMS)
    return sum(MEASURES[measure](b) for b in bits) / len(GEMMS)


def efficiency(shapes: Sequence[LinearShape], options: Sequence[LinearPrecision], measure: str = "fp4") -> Floats:
    """[L, O]: what linear l saves in option o as a share of all linears' FLOPs; everything in FP4 sums to 1.

    measure: "fp4", the share of FLOPs in FP4; "time", modelled GEMM time saved, the one to use when bf16 is
    among the options, because FP8 counts for nothing in "fp4".  Raises ValueError for other names.
    """
    flops = np.array([shape.gemm_flops for shape in shapes], dtype=np.float64)
    return flops[:, None] / flops.sum() * np.array([saving(option, measure) for option in options])[None, :]


def achieved(shapes: Sequence[LinearShape], precisions: Mapping[str, LinearPrecision], measure: str = "fp4") -> float:
    """What a whole assignment saves, 0..1.  ``precisions`` must name every linear of ``shapes``."""
    total = sum(shape.gemm_flops for shape in shapes)
    saved = sum(shape.gemm_flops * saving(precisions[shape.name], measure) for shape in shapes)
    return saved / total if total else 0.0


def block_of(name: str) -> int | None:
    """The block's index in a linear's name: 3 for layers.3.mlp.up_proj, None where there is none."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None
