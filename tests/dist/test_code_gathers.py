"""--fp8-param-gather: codes are gathered in place of weights, in fewer bytes, and no bit of training changes."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_snip.train.dry_run.measure import measure_all
from tests.dist.helpers.code_gathers import after_a_preflight, resumed, with_and_without
from tests.dist.helpers.dry_runs import collectives, options_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS
from tests.dist.helpers.sharding import an_iteration, sent_over_dp

#: Formats of linears in turn; seven, as many as kinds of linears, so that the second plan differs everywhere.
MIX = ("fp4", "fp8", "fp8/fp4/fp8", "bf16", "nvfp4", "fp8/bf16_dequantized/fp8", "mxfp4")
PARAMS = {"data_parallel_sharding_strategy": "optim_grads_params"}
CUT = {"ffn_hidden_size": 480}  # two ranks have 240 rows of gate and up each, which cut blocks of 128 and 32
#: (ranks, options, linears of rank 0 that gather codes under the first plan and the second)
CASES = {
    # 122, 64 and 16 rows a rank, which cut blocks of 128, 32 and 16
    "dp4, optim_grads_params": (4, {**PARAMS, "ffn_hidden_size": 488, "num_query_groups": 1}, 12, 12),
    "tp2 x dp2, optim_grads_params, recompute": (
        4, {**LAYOUTS["tp2"], **PARAMS, "recompute_granularity": "full"}, 12, 12
    ),
    "pp2 x dp2, optim": (4, LAYOUTS["pp2"], 6, 6),
    "dp2, optim_grads, weights in bf16": (
        2, {"data_parallel_sharding_strategy": "optim_grads", "optimizer_precision": "collage-plus"}, 12, 12
    ),
    "dp2, optim_grads_params, compiled": (2, {**PARAMS, **CUT, "compile": True}, 12, 12),
    "dp2 x 2, optim_grads_params, tied": (
        4,
        {**PARAMS, **CUT, "num_distributed_optimizer_instances": 2, "untie_embeddings_and_output_weights": False},
        12, 12,
    ),
    "pp2 interleaved x dp2, optim_grads_params": (4, {**LAYOUTS["pp2 interleaved"], **PARAMS, "num_layers": 4}, 12, 12),
    "cp2 x dp2, optim": (4, {"context_parallel_size": 2, "seq_length": 512}, 12, 12),
}  # fmt: skip
FIRST = tuple(CASES)[:3]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FIRST else pytest.mark.slow) for c in CASES])
def test_no_bit_changes(case):
    world, options, first, second = CASES[case]
    probed = case not in FIRST[1:]  # a probe takes half of the time
    results = run_ranks(with_and_without, world, options, MIX, probed, seconds=300.0)
    # a step, a validation, a probe, a step, BF16's loss, a trial's pass under the second plan, a step
    assert results[0][0]["coded"] == [first, first, *[0] * probed, first, 0, second, second]
    lines = results[0][0]["lines"]
    (told,) = (line for line in lines if line.startswith("weights gathered as codes: "))
    assert "nvfp4" in told and "mxfp4" in told
    assert any("not gathered as codes, because a GEMM needs the weight itself" in line for line in lines)
    if case == FIRST[0]:
        assert any("488 rows on 4 ranks cut blocks whose scales depend on all elements: " in line for line in lines)
        assert any("488 rows on 4 ranks cut scales of whole columns: " in line for line in lines)
        assert "down_proj, k_proj, o_proj, q_proj, v_proj in nvfp4_4over6" in told
    for codes, plain in results:
        assert codes["told"] == plain["told"] and not any(plain["coded"])
        assert codes["tensors"].keys() == plain["tensors"].keys()
        assert all(torch.equal(tensor, plain["tensors"][name]) for name, tensor in codes["tensors"].items())


def test_a_checkpoint_of_a_run_without_is_continued(tmp_path):
    for plain, codes in run_ranks(resumed, 2, {**PARAMS, **CUT}, MIX, tmp_path, seconds=300.0):
        assert plain["loss"] == codes["loss"]
        assert all(torch.equal(tensor, codes[name]) for name, tensor in plain.items() if name != "loss")


def test_a_preflight_leaves_gathers_as_the_run_knows_them():
    """An objective without a probe leaves those of the last option behind."""
    for plain, codes in run_ranks(after_a_preflight, 2, {**PARAMS, "vocab_size": 256, "global_batch_size": 2}, seconds=300.0):
        assert codes == plain


@functools.cache
def sent(precision: str, **more: object):
    options = {"num_layers": 2, "bf16": True, **PARAMS, "precision": precision, **more}
    return run_ranks(an_iteration, 2, options, seconds=240.0)[0]["collectives"]


BLOCK = (4 * 256 * 256, 3 * 256 * 512)  # weights of attention and MLP


@pytest.mark.parametrize(("precision", "each"), [("fp8", 1), pytest.param("fp4", 0.5, marks=pytest.mark.slow)])
def test_bytes_of_gathers(precision, each):
    """Two microbatches gather two blocks in forward and in backward; a scale of four bytes serves 128 x 128 weights."""
    (count, plain), (count_of_codes, codes) = (
        sent_over_dp(sent(precision, **more))["all-gather"] for more in ({}, {"fp8_param_gather": True})
    )
    weights = 2 * sum(BLOCK) / 2  # of a rank
    assert count == count_of_codes
    assert plain - codes == 2 * 2 * weights * (2 - each - 4 / 128**2)


def test_bytes_of_blocks_that_ranks_cut():
    plain, codes = (sent_over_dp(sent("fp8", **CUT, **more)) for more in ({}, {"fp8_param_gather": True}))
    # gate and up send three rows of scales: those of blocks 0 and 1 from the first rank, of 1 to 3 from the second
    weights, scales = 4 * 256 * 128 + 3 * 480 * 128, 4 * 2 + 4 + 2 * 3 * 2  # of a rank, in each block
    assert plain["all-gather"][1] - codes["all-gather"][1] == 2 * 2 * 2 * (weights - 4 * scales)
    # once for both microbatches: block 1, and block 3, in which the weight ends
    assert codes["all-reduce"][0] == plain["all-reduce"][0] + 1
    assert codes["all-reduce"][1] == plain["all-reduce"][1] + 2 * 2 * 2 * 256 * 2


def test_the_dry_run_counts_them_and_less_memory():
    options = {"num_layers": 2, "bf16": True, **PARAMS, **CUT, "precision": "fp8"}
    (plain,), (codes,) = (
        measure_all(options_of({**options, **more}), 2, [0]) for more in ({}, {"fp8_param_gather": True})
    )
    assert collectives(codes.stretches[0].counts) == sent("fp8", **CUT, fp8_param_gather=True)
    assert codes.stretches[0].total < plain.stretches[0].total
