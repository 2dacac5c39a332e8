"""The late switch in whole runs: exact across a resume, under each --precision, and counted by a dry run."""

from __future__ import annotations

import pytest

from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.dry_run.measure import measure_all
from megatron_snip.train.dry_run.output import as_text
from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.dry_runs import options_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, train_run, world_of
from tests.dist.test_resume import TIMES

FINAL = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "train_iters": 8, "preflight": False, "global_batch_size": 2,
    "snip_final_precision": "bf16/plan/plan", "snip_final_iters": 3,
}  # fmt: skip
SNIP = {"precision": "snip", "snip_start": 2, "snip_interval": 3, "snip_trials": 0}


def rows(folder, options, world=1, **more) -> list[dict]:
    """The metrics of a run, without times."""
    run_ranks(train_run, world, {**FINAL, **options, "run_dir": str(folder), **more})
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "layout", "ends"),
    [
        ("fp4", "", [5]),
        ("snip", "", [6]),
        ("snip", "pp2", [5]),
        pytest.param("fp4", "", [4, 6], marks=pytest.mark.slow),
        pytest.param("snip", "", [4, 5], marks=pytest.mark.slow),
        pytest.param("snip", "pp2", [4, 6], marks=pytest.mark.slow),
    ],
)
def test_a_resume_across_the_switch_is_exact(kind, layout, ends, tmp_path):
    options, world = {"precision": kind}, 1
    if layout:
        options, world = {**options, **LAYOUTS[layout]}, world_of(layout)
    options |= SNIP if kind == "snip" else {}
    whole = rows(tmp_path / "whole", options, world)
    at = {row["iteration"]: row for row in whole}
    assert [i for i, row in at.items() if "snip/final_precision" in row] == [6, 7, 8]
    assert at[6]["snip/final_precision"] == "bf16/plan/plan"
    assert at[8]["snip/plan_hash"] == at[6]["snip/plan_hash"] != at[5].get("snip/plan_hash")
    for end in ends:  # of the first part; the second begins with iteration 5, 6 or 7
        folder = tmp_path / f"run{end}"
        rows(folder, options, world, exit_interval=end)
        assert rows(folder, options, world, load=str(folder / "checkpoints")) == whole
    if kind == "snip":
        plan = Plan.load(tmp_path / "whole/plans/iter_0000006.json")
        assert {precision.fprop for precision in plan.linears.values()} == {"bf16"}
    other = rows(tmp_path / "other", options, world, snip_final_iters=2, exit_interval=6)
    assert [row["lm loss"] for row in other[:5]] == [row["lm loss"] for row in whole[:5]]
    assert other[5]["lm loss"] != whole[5]["lm loss"], "another precision, another loss"


def test_the_dry_run_counts_it():
    options = {"global_batch_size": 1, "bf16": True, "precision": "snip", **FINAL}
    config = options_of(options)
    (one,) = measure_all(config, 1, [0])
    assert one.stretches[-1].name == "iteration, bf16/plan/plan"
    gemms = {what[4] for what in one.stretches[-1].counts if what[0] == "gemm"}
    assert "bf16" in gemms and any("fp" in name for name in gemms)
    assert "the last 3 of 8 iterations, 37.5%, run in bf16/plan/plan" in as_text(config, 1, [one])
