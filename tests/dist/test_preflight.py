"""A run with a preflight is the same, bit for bit, as one without, on several processes."""

from __future__ import annotations

import pytest

from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, train_run

OPTIONS = {
    "train_iters": 4, "precision": "snip", "snip_start": 2, "snip_interval": 2, "snip_apply_lag": 1, "snip_target": 0.5,
    "snip_guard": True, "exit_signal_handler": False, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2,
}  # fmt: skip


#: Two pieces of a tile each; validations too.
CP2 = {
    "context_parallel_size": 2, "seq_length": 512, "num_layers": 2, "eval_interval": 2, "eval_iters": 1,
    "global_batch_size": 2, "snip_trial_tokens": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(4, LAYOUTS["tp2 x pp2 interleaved"], id="tp2 x pp2 interleaved", marks=pytest.mark.slow),
        pytest.param(2, CP2, id="cp2"),
    ],
)
def test_a_preflight_is_not_seen(world, layout, tmp_path):
    seen = []
    for preflight in (True, False):
        run_dir = tmp_path / str(preflight)
        options = {**layout, **OPTIONS, "preflight": preflight, "run_dir": str(run_dir)}
        run_ranks(train_run, world, options)
        rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["iteration"]]
        seen.append([(row["lm loss"], row["grad-norm"], row["snip/plan_hash"]) for row in rows])
    assert seen[0] == seen[1] and len(seen[0]) == 4 and seen[0][-1][2]
