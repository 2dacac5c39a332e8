"""A whole run that plans over recipes, by published times."""

from __future__ import annotations

import pytest

from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.recipes import RECIPES
from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import train_run


@pytest.mark.dist
def test_a_run_plans_over_recipes(tmp_path):
    options = {
        "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "precision": "snip", "snip_options": "recipes:blackwell", "gemm_times": "published:b300", "snip_target": 0.9,
        "snip_start": 2, "snip_interval": 3, "snip_trials": 2, "snip_trial_tokens": 256, "train_iters": 4,
        "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    run_ranks(train_run, 1, options)
    plan = Plan.load(tmp_path / "run/plans/iter_0000003.json")
    assert plan.gemm_times == "published:b300" and plan.target_unit == "modelled time"
    for gemm in GEMMS:
        allowed = set(RECIPES["blackwell"][gemm])
        assert {getattr(precision, gemm) for precision in plan.linears.values()} <= allowed, gemm
    (row,) = (row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "snip/saved" in row)
    assert row["snip/saved"] >= 0.9 - 1e-6 and row["snip/gemm_times"] == "published:b300"
