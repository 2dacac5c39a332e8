"""Linears of one input, with collectives beside their GEMMs: bits of one after another; what they send and keep."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.layers import (
    B,
    K,
    S,
    run_all_sent,
    run_copies,
    run_gathered_operands,
    run_groups,
    run_largest_magnitudes,
    run_observed,
    run_order,
)


@pytest.mark.parametrize("tp", [1, 2])
def test_bits_are_those_of_one_after_another(tp):
    for cases in zip(*run_ranks(run_groups, tp, seconds=300.0)):
        for case, same in cases:
            assert same, case


def test_operands_for_tensor_cores_are_gathered_as_the_whole_would_lie():
    for cases in zip(*run_ranks(run_gathered_operands, 2)):
        for case, same in cases:
            assert same, case


@pytest.mark.parametrize("tp", [1, 2])
def test_an_observer_sees_the_same(tp):
    assert all(all(rank) for rank in run_ranks(run_observed, tp))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_collectives_run_beside_products(sequence_parallel):
    """The gather beside dgrad and the sum beside wgrad."""
    for forward, backward in run_ranks(run_order, 2, sequence_parallel):
        assert forward == [*["all_gather begins", "all_gather is waited for"] * sequence_parallel, *["product"] * 2]
        kind = "reduce_scatter" if sequence_parallel else "all_reduce"
        assert backward == [
            *["all_gather begins"] * sequence_parallel,
            "product", "product", f"{kind} begins",
            *["all_gather is waited for"] * sequence_parallel,
            "product", "product", f"{kind} is waited for",
        ]  # fmt: skip


def test_one_collective_finds_the_largest_magnitudes_of_all_gradients():
    """Those that are transformed are found apart."""
    for ways in run_ranks(run_largest_magnitudes, 2):
        for found in ways:
            assert found == {"fp8": [0, 0], "fp8/nvfp4_plain/fp8": [0, 1], "nvfp4_plain": [1, 1], "nvfp4": [2, 6]}


def test_no_collective_of_tokens_copies():
    """However many sequences they are of."""
    for names, alone in run_ranks(run_copies, 2):
        assert names == alone


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_sent_and_kept(compiled):
    """A process's own rows, as codes with a scale every 128 where the GEMM is quantised; Megatron-LM's are bf16.

    Without sequence parallelism the input is there, in each form that a wgrad reads.
    """
    cases = ("bf16", "fp8", "fp4", "bf16/fp8/fp8", "fp8,fp4,fp8", "fp8/fp8/bf16,fp8,fp8",
             "fp8/fp8/bf16_dequantized", "fp8/mxfp8_dequantized/mxfp8_dequantized")  # fmt: skip
    code, elements = 1 + 4 / 128, B * S * K
    gathered = (2 * 2, 2 * code, 2 * code, 2 + code, 2 * 2, code + 2, 2 * code, 2 * code)
    kept = (2, code, code, code, 2, 2, code, code)
    whole = (2, code, code, code, 2 * code, 2 + code, code, code)
    for found in run_ranks(run_all_sent, 2, cases, compiled):
        for case, sent, own, alone, one in zip(cases, gathered, kept, whole, found, strict=True):
            expected = {"all_gather": elements // 2 * sent, "reduce_scatter": 2 * elements}
            assert one[True] == (expected, elements // 2 * own), case
            assert one[False] == ({"all_reduce": 2 * elements}, elements * alone), case
    assert gathered[1] < 0.6 * gathered[0]
