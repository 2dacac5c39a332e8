"""Probes change nothing of a run whose plan stays, on any layout, whether they end well or not."""

from __future__ import annotations

import pytest
import torch

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import DATA_PARALLEL, LAYOUTS, counted_probe, trace, world_of

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2}
ITERATIONS, PROBED = 2, {1, 2}
#: NVFP4 has a scale of the whole tensor, for which tp's processes talk inside a cast.
FOUR = {
    **SMALL, "num_layers": 2, "global_batch_size": 2, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "sequence_parallel": True, "snip_options": "fp8,nvfp4_plain,nvfp4",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_of_four():
    return run_ranks(trace, 4, FOUR, ITERATIONS, set())


@pytest.mark.parametrize(
    ("layout", "bf16"),
    [
        pytest.param("tp2", False, marks=pytest.mark.slow),
        pytest.param("pp2 x dp2", False, marks=pytest.mark.slow),
        ("tp2 x pp2 interleaved", True),
    ],
)
def test_probes_change_no_bit_of_a_run(layout, bf16):
    options, world = {**SMALL, **LAYOUTS[layout], "bf16": bf16}, world_of(layout)
    options["global_batch_size"] = 2 * DATA_PARALLEL.get(layout, 1)
    plain, probed = (run_ranks(trace, world, options, ITERATIONS, when) for when in (set(), PROBED))
    of_loss = run_ranks(trace, world, options, ITERATIONS, PROBED, "", 0, False)
    for one, other in [*zip(plain, probed, strict=True), *zip(plain, of_loss, strict=True)]:
        assert len({loss for loss, _, skipped in one["told"] if not skipped}) == ITERATIONS
        assert other["told"] == one["told"]
        assert other["tensors"].keys() == one["tensors"].keys() != set()
        for name, tensor in one["tensors"].items():
            assert torch.equal(other["tensors"][name], tensor), name


@pytest.mark.parametrize(
    ("failing", "updates", "rank"),
    [
        ("measure", True, 3), ("__init__", True, 3), ("_cast", True, 1), ("add_updates", True, 0), ("_cast", False, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("_cast", True, 2), ("measure", False, 2),
            ("measure", True, 0), ("measure", True, 1), ("measure", True, 2), ("__init__", True, 0), ("add_updates", True, 3),
            ("measure", False, 1), ("_cast", False, 0),
        )),
    ],
)  # fmt: skip
def test_a_probe_that_fails_on_one_rank_ends_on_all_and_changes_nothing(failing, updates, rank, plain_of_four):
    """Out of memory while it makes its tensors, in the pass of the model, between two of a linear's casts, after it."""
    got = run_ranks(trace, 4, FOUR, ITERATIONS, PROBED, failing, rank, updates)
    for one, other in zip(plain_of_four, got, strict=True):
        assert other["errors"] == [f"the probe failed on rank {rank}: OutOfMemoryError: no memory left"] * len(PROBED)
        assert other["told"] == one["told"] and not one["errors"]
        for name, tensor in one["tensors"].items():
            assert torch.equal(other["tensors"][name], tensor), name


def test_a_process_that_holds_the_embedding_alone_takes_part():
    options = {
        **SMALL, "num_layers": 1, "pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True,
    }  # fmt: skip
    for updates in (True, False):
        for found in run_ranks(trace, 2, options, 1, {1}, "", 0, updates):
            assert not found["errors"] and found["tensors"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2 x pp2 interleaved", marks=pytest.mark.slow),
        "tp2 x dp2",
        pytest.param("tp2 x pp2 x dp2", marks=pytest.mark.slow),
    ],
)
def test_a_probe_holds_and_sends_what_its_footprint_says(layout):
    """Eight microbatches a process; a weight of 2048 output channels is measured by every second of them."""
    dp = 2 if "dp2" in layout else 1
    stages = (2 if "pp2" in layout else 1) * (2 if "interleaved" in layout else 1)  # of a block each
    options = {**SMALL, **LAYOUTS[layout], "num_layers": stages}
    options |= {"ffn_hidden_size": 2048, "global_batch_size": 8 * dp, "bf16": True}
    for found in run_ranks(counted_probe, world_of(layout), options):
        expected = found["expected"]
        assert found["held"] == expected.weight_errors > 0
        assert found["sent"] == {"tp": expected.sent_over_tp, "dp": expected.sent_over_dp, "pp": 0}
        assert expected.sent_over_tp > 0 and (expected.sent_over_dp > 0) == (dp > 1)
