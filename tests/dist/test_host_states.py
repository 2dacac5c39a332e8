"""AdamW on the host changes no bit of a run on CPUs, and no checkpoint."""

from __future__ import annotations

import pytest
import torch

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.host_states import SAVED, trained
from tests.dist.helpers.runs import LAYOUTS

SMALL = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "bf16": True, "precision": "fp8", "clip_grad": 0.5,
    "lr_warmup_iters": 0, "log_edq_interval": 2, "global_batch_size": 2,
}  # fmt: skip
CASES = {
    "all sharded, fp32": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "alone, collage-plus": (1, {"optimizer_precision": "collage-plus"}),
    "tp2, bf16-stochastic": (2, {**LAYOUTS["tp2"], "optimizer_precision": "bf16-stochastic"}),
    "pp2, tied, no_shard": (2, {**LAYOUTS["pp2"], "data_parallel_sharding_strategy": "no_shard",
                                "untie_embeddings_and_output_weights": False}),
}  # fmt: skip
WHOLE = {"optimizer_cpu_offload": True}
PART = {**WHOLE, "optimizer_offload_fraction": 0.4}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit(case, tmp_path):
    """Of losses, norms, weights, moments, lost updates and what a probe reads of them, also after going on from a
    checkpoint that was written with the option, or without it."""
    world, options = CASES[case]
    options = {**SMALL, **options}
    for part, plain, whole in run_ranks(trained, world, [{**options, **PART}, options, {**options, **WHOLE}], tmp_path):
        for one in (part, plain, whole):
            assert one["results"] == plain["results"] and one["again"] == plain["results"][SAVED:]
            assert same(one["end"], plain["end"]) and same(one["end again"], plain["end"])
            assert all(map(torch.equal, one["updates"], plain["updates"]))
        assert 0 == plain["host"] < part["host"] < whole["host"]
