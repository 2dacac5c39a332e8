"""What a precision saves: the FP4 share of the linears' FLOPs, or GEMM time.

Source: SNIP, arXiv 2602.01410 (efficiency = fraction of FLOPs in FP4).
Convention: a linear has three GEMMs (fprop, dgrad, wgrad) of 2 N K FLOPs per token each, shapes are those of
the whole model, whatever tp shards them.  A matrix [L, O] has one row per linear and one column per option.
Times are those of gemm_times.py, nominal unless a table is given; what casts and memory cost is in a table only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.snip.gemm_times import NOMINAL, GemmTimes

Floats = NDArray[np.float64]

GRANULARITIES = ("linear", "gemm", "fused")
#: What ``efficiency`` may count: the share of FLOPs in FP4, or modelled GEMM time.
MEASURES = ("fp4", "time")
#: Linears that kernels run as one GEMM, by the end of their names.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


def fused_ties(shapes: Sequence[LinearShape]) -> NDArray[np.int64]:
    """``ties`` of ilp.solve for granularity "fused", [L]: linears that read the same input share an id."""
    readers = Counter(shape.reads for shape in shapes if shape.reads)
    ids = {reads: number for number, reads in enumerate(reads for reads, count in readers.items() if count > 1)}
    return np.array([ids.get(shape.reads, -1) for shape in shapes], dtype=np.int64)


def stages(shapes: Sequence[LinearShape]) -> NDArray[np.int64]:
    """``stage`` of ilp.solve, [L]."""
    return np.array([shape.stage for shape in shapes], dtype=np.int64)


def gemm_flops(shapes: Sequence[LinearShape]) -> NDArray[np.int64]:
    """[L, 3]: FLOPs per token of every GEMM of every linear, in the order of GEMMS."""
    return np.array([[shape.gemm_flops] * len(GEMMS) for shape in shapes], dtype=np.int64)


def modelled_time(
    shapes: Sequence[LinearShape], options: Sequence[LinearPrecision], times: GemmTimes = NOMINAL
) -> Floats:
    """[L, O]: GEMM time of linear l in option o as a share of all linears' in BF16 at its mean speed.

    Raises ValueError for a format that the table has not.
    """
    flops = gemm_flops(shapes)
    result = np.zeros((len(shapes), len(options)))
    for row, shape in enumerate(shapes):
        size = shape.out_features, shape.in_features
        for column, option in enumerate(options):
            taken = (times.of(getattr(option, gemm), gemm, *size) for gemm in GEMMS)
            result[row, column] = sum(int(f) * t for f, t in zip(flops[row], taken))
    return result / flops.sum()


def saving(precision: LinearPrecision, measure: str = "fp4") -> float:
    """What a linear in this precision saves, 0..1: the mean over its three GEMMs, all of one size; nominal times."""
    return float(efficiency([LinearShape("any", 1, 1)], [precision], measure)[0, 0])


def efficiency(
    shapes: Sequence[LinearShape],
    options: Sequence[LinearPrecision],
    measure: str = "fp4",
    times: GemmTimes = NOMINAL,
) -> Floats:
    """[L, O]: what linear l saves in option o, so that the most that can be saved sums to 1.

    measure: "fp4", the share of FLOPs in FP4; "time", modelled GEMM time saved against BF16, as a share of what
    the fastest format of the times saves everywhere (nominally FP4); the one to use when bf16 is among the
    options, because FP8 counts for nothing in "fp4".  Raises ValueError for other names, a format that the table
    has not, and a table in which nothing is faster than bf16.
    """
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; known: {', '.join(MEASURES)}")
    flops = gemm_flops(shapes)
    if measure == "fp4":
        bits = [[get_format(getattr(option, gemm)).element_bits for gemm in GEMMS] for option in options]
        return flops / flops.sum() @ (np.array(bits).T <= 4).astype(np.float64)
    plain = modelled_time(shapes, [LinearPrecision.uniform("bf16")], times)
    least = sum(
        int(f) * times.fastest(gemm, shape.out_features, shape.in_features)
        for shape, row in zip(shapes, flops)
        for f, gemm in zip(row, GEMMS)
    )
    most = float(plain.sum()) - least / float(flops.sum())
    if most <= 0:
        raise ValueError(
            f"by the GEMM times of {times.hardware} no format is faster than bf16, so there is no time to save; "
            "take bf16 out of --snip-options, or leave --gemm-times out for nominal times"
        )
    return (plain - modelled_time(shapes, options, times)) / most


def achieved(
    shapes: Sequence[LinearShape],
    precisions: Mapping[str, LinearPrecision],
    measure: str = "fp4",
    times: GemmTimes = NOMINAL,
) -> float:
    """What a whole assignment saves, at most 1.  ``precisions`` must name every linear of ``shapes``."""
    if not shapes:
        return 0.0
    return float(_chosen(efficiency, shapes, precisions, measure, times).sum())


def by_stage(
    shapes: Sequence[LinearShape], precisions: Mapping[str, LinearPrecision], times: GemmTimes = NOMINAL
) -> dict[int, tuple[float, float]]:
    """Stage -> (FP4's share of its linears' FLOPs, its modelled time as a share of all linears' in BF16)."""
    share = _chosen(efficiency, shapes, precisions, "fp4", NOMINAL)
    taken = _chosen(modelled_time, shapes, precisions, times)
    flops, stage = gemm_flops(shapes).sum(axis=1), stages(shapes)
    whole = flops / flops.sum()
    return {
        int(s): (float(share[stage == s].sum() / whole[stage == s].sum()), float(taken[stage == s].sum()))
        for s in np.unique(stage)
    }


def _chosen(
    matrix: Callable[..., Floats],
    shapes: Sequence[LinearShape],
    precisions: Mapping[str, LinearPrecision],
    *rest: Any,
) -> Floats:
    """[L]: each linear's entry of a matrix [L, O] of this file in its own precision."""
    options = list(dict.fromkeys(precisions[shape.name] for shape in shapes))
    columns = [options.index(precisions[shape.name]) for shape in shapes]
    return matrix(shapes, options, *rest)[np.arange(len(shapes)), columns]


def block_of(name: str) -> int | None:
    """The block's index in a linear's name: 3 for layers.3.mlp.up_proj, None where there is none."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None
