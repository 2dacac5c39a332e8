"""Parallel layers given equal X, W and G are the whole layer: rule 2(a) of docs/architecture.md.

Codes, scales and random bits of each shard equal the slice of the whole bit for bit; outputs and gradients agree
to 1e-6 of the largest value, in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.layers import (
    KINDS,
    PRECISIONS,
    B,
    K,
    S,
    V,
    draw,
    run_all,
    run_local_parts,
    run_partial_gradients,
    run_vocabulary,
)

TP = 2


@functools.cache
def results(kind: str, precision: str, sequence_parallel: bool, world: int) -> list[dict[str, Any]]:
    return all_linears(world)[kind, precision, sequence_parallel]


@functools.cache
def all_linears(world: int) -> dict[tuple, list[dict[str, Any]]]:
    ranks = run_ranks(run_all, world)
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert expected.abs().max() > 0 and (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def joined(parts: list[Tensor]) -> Tensor:
    """[B, S/tp, C] of each process -> [B, S, C]."""
    return torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (len(parts[0]), -1))


CASES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])


@CASES
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_one_processs(kind, precision, sequence_parallel):
    (whole,) = results(kind, precision, sequence_parallel, 1)
    ranks = results(kind, precision, sequence_parallel, TP)
    split = {"column": {"y": 2, "dw": 0}, "row": {"dx": 2, "dw": 1}}[kind]
    shared = {"column": "dx", "row": "y"}[kind]  # outside the region: cut along the tokens, or the same on all
    for name, dim in split.items():
        assert_close(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    if sequence_parallel:
        assert_close(joined([rank[shared] for rank in ranks]), whole[shared])
    else:
        for rank in ranks:
            assert_close(rank[shared], whole[shared])


#: kind -> role -> dim of the operand [rows, columns] that tp cuts; None where every rank holds the whole.
CUT = {
    "column": {"input": None, "weight": 0, "grad_output": 1},
    "row": {"input": 1, "weight": 1, "grad_output": None},
}


@CASES
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_operands_are_slices_bit_for_bit(kind, precision, sequence_parallel):
    (whole,) = results(kind, precision, sequence_parallel, 1)
    formats = precision.split("/") * (3 if "/" not in precision else 1)
    # fprop and dgrad share the weight's square blocks where their formats agree
    shared = formats[0] == formats[1] and formats[0] in ("fp8", "fp4")
    assert len(whole["operands"]) == 2 * sum(not fmt.startswith("bf16") for fmt in formats) - shared
    stochastic = 0
    for rank in results(kind, precision, sequence_parallel, TP):
        assert len(rank["operands"]) == len(whole["operands"])
    for i, expected in enumerate(whole["operands"]):
        shards = [rank["operands"][i] for rank in results(kind, precision, sequence_parallel, TP)]
        dim = CUT[kind][expected["role"]]
        for name in ("codes", "scales", "bits"):
            if expected[name] is None:
                assert name == "bits" and all(shard[name] is None for shard in shards)
                continue
            stochastic += name == "bits"
            for shard in shards if dim is None else [{name: torch.cat([shard[name] for shard in shards], dim)}]:
                assert torch.equal(shard[name], expected[name]), (i, expected["role"], name)
    backward = formats[1:]
    drawn = sum(backward.count(fmt) for fmt in ("fp4", "nvfp4_plain", "rotated", "again"))
    drawn += 2 * backward.count("mxfp4_tetrajet")  # and the operand that is cast again
    assert stochastic == drawn, "output gradients in FP4 round stochastically"


@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (TP, False), (TP, True), (3, False)])
def test_vocabulary_is_torchs(world, sequence_parallel):
    ranks = run_ranks(run_vocabulary, world, sequence_parallel)
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(4))
    table, logits = draw(V, K, seed=5).requires_grad_(), (4 * draw(B * S, V, seed=8)).requires_grad_()
    x = F.embedding(tokens, table)
    x.backward(draw(B, S, K, seed=6))
    losses = F.cross_entropy(logits, tokens.flatten(), reduction="none")
    losses.backward(draw(B * S, seed=9))
    got = joined([rank["x"] for rank in ranks]) if sequence_parallel else ranks[0]["x"]
    assert torch.equal(got, x.detach())
    assert_close(torch.cat([rank["table"] for rank in ranks]), table.grad)
    assert_close(torch.cat([rank["logits"] for rank in ranks], 1), logits.grad)
    for rank in ranks:
        assert_close(rank["loss"], losses.detach())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_summed_over_tp_as_tags_say(sequence_parallel):
    """A norm of heads always, of tokens under sequence parallelism, others never."""
    ranks = run_ranks(run_partial_gradients, TP, sequence_parallel)
    for seed, (name, summed) in enumerate([("q_norm", True), ("norm", sequence_parallel)]):
        each = [draw(6, seed=10 * seed + rank) for rank in range(TP)]
        for rank, gradient in zip(ranks, each, strict=True):
            assert torch.equal(rank[f"{name}.weight"], sum(each) if summed else gradient)
    for rank in range(TP):
        assert torch.equal(ranks[rank]["up_proj.weight"], draw(2, 2, seed=20 + rank)), "a split weight is left alone"
        assert torch.equal(ranks[rank]["none.weight"], draw(6, seed=30 + rank))


def test_local_parts_and_their_gradients_are_those_of_to_local():
    for rank in run_ranks(run_local_parts, TP):
        for ours, torchs in rank:
            assert ours == torchs
