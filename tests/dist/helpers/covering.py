"""Layouts to test, chosen so that every two values of two factors that go together meet in one of them.

A factor is a row of `FACTORS`; what does not go together, or would say the same as another, is left out by `is_valid`.
`covering` takes, again and again, the case with the most pairs that no case before it has, the first of equals: the
greedy way of AETG (Cohen et al., IEEE TSE 1997), over all valid cases and not a sample of them, so without chance.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

Case = dict[str, Any]

FACTORS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "cp": (1, 2),
    "interleaved": (False, True),
    "uneven": (False, True),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "strategy": ("optim", "no_shard", "optim_grads", "optim_grads_params"),
    "tied": (False, True),
}
MOST_PROCESSES = 8
#: Blocks of the model: uneven, the first of two processes has six of them, interleaved in two chunks.
NUM_LAYERS = 8


def is_valid(case: Case) -> bool:
    """Whether a case says something: its factors mean nothing without the axis that they are about."""
    return (
        (case["pp"] > 1 or not (case["interleaved"] or case["uneven"]))
        and (case["tp"] > 1 or not case["sequence_parallel"])
        and (case["dp"] * case["cp"] > 1 or case["strategy"] == "optim")
        and world_of(case) <= MOST_PROCESSES
    )


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two values that meet in a case."""
    return set(combinations(case.items(), 2))


def valid_cases() -> list[Case]:
    """All of them."""
    return [case for values in product(*FACTORS.values()) if is_valid(case := dict(zip(FACTORS, values)))]


def covering() -> list[Case]:
    """A few cases in which all pairs of any valid case meet."""
    left = [(case, pairs(case)) for case in valid_cases()]
    missing, chosen = set().union(*(met for _, met in left)), []
    while missing:
        case, met = max(left, key=lambda one: len(one[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen


def name_of(case: Case) -> str:
    """A case in a few words."""
    axes = " x ".join(f"{axis}{case[axis]}" for axis in ("tp", "pp", "dp", "cp") if case[axis] > 1) or "alone"
    more = [name for name in ("interleaved", "uneven", "sequence_parallel", "tied") if case[name]]
    return ", ".join([axes, *more, case["strategy"], case["recompute"]])


def world_of(case: Case) -> int:
    """Processes of a case."""
    return case["tp"] * case["pp"] * case["dp"] * case["cp"]


def length_of(case: Case) -> int:
    """Tokens of a sequence: one tile, or two pieces of a tile for each process of cp."""
    return 128 if case["cp"] == 1 else 2 * 128 * case["cp"]


def options_of(case: Case) -> dict[str, Any]:
    """Its options."""
    recompute = case["recompute"]
    return {
        "num_layers": NUM_LAYERS,
        "tensor_model_parallel_size": case["tp"],
        "pipeline_model_parallel_size": case["pp"],
        "context_parallel_size": case["cp"],
        "seq_length": length_of(case),
        "num_virtual_stages_per_pipeline_rank": 2 if case["interleaved"] else None,
        "decoder_first_pipeline_num_layers": 6 if case["uneven"] else None,
        "sequence_parallel": case["sequence_parallel"],
        "recompute_granularity": recompute,
        "recompute_modules": ("core_attn", "mlp") if recompute == "selective" else ("core_attn",),
        "data_parallel_sharding_strategy": case["strategy"],
        "untie_embeddings_and_output_weights": not case["tied"],
    }
