"""A late solver costs no wait within the lag; one that goes wrong leaves the old plan on all ranks alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.metrics import metrics_file, read_metrics
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.solves import SOLVES, late_solves, solves_gone_wrong

LAG, BEHIND = 10, 5


def rows_of(run_dir: Path) -> list[dict[int, dict]]:
    """Both ranks' metrics by iteration."""
    return [{row["iteration"]: row for row in read_metrics(metrics_file(run_dir, rank))} for rank in range(2)]


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Probes before iterations 1 and 12; the first answer is five iterations behind, the second twelve."""
    folder = tmp_path_factory.mktemp("late")
    options = {
        "pipeline_model_parallel_size": 2, "run_dir": str(folder / "run"), "train_iters": 23,
        "snip_start": 1, "snip_interval": 11, "snip_apply_lag": LAG,
    }  # fmt: skip
    results = run_ranks(late_solves, 2, options, folder, 1 + BEHIND)
    return folder / "run", results


def test_an_answer_within_the_lag_is_not_waited_for(late):
    run_dir, results = late
    at_work, _ = results[0]
    due = 1 + LAG
    assert at_work[: BEHIND - 1] == [2, 3, 4, 5] and due not in at_work
    for rows in rows_of(run_dir):
        assert rows[due]["snip/wait_seconds"] == 0.0 and rows[due]["snip/solve_failed"] == 0
        assert {i for i in range(1, 22) if "snip/wait_seconds" in rows[i]} == {due}, "nor is there a wait before"
        assert [rows[i]["snip/plan_hash"] for i in range(1, due)] == [""] * LAG and rows[due]["snip/plan_hash"]


def test_a_solver_later_than_the_lag_is_waited_for_and_its_plan_holds_when_it_is_due(late):
    run_dir, results = late
    probed, due = 12, 12 + LAG
    assert results[0][0][BEHIND - 1 :] == list(range(probed + 1, due + 1)), "at work until it is asked"
    plans = [Plan.load(run_dir / f"plans/iter_{i:07d}.json") for i in (1 + LAG, due)]
    assert [plan.iteration for plan in plans] == [1 + LAG, due]
    for rows, (_, seen) in zip(rows_of(run_dir), results, strict=True):
        assert rows[due]["snip/wait_seconds"] > 0.0 and rows[due]["snip/solve_failed"] == 0
        assert rows[due]["snip/apply_seconds"] > 0.0
        hashes = [rows[i]["snip/plan_hash"] for i in range(1 + LAG, due + 2)]
        assert hashes == [plans[0].hash] * (due - LAG - 1) + [plans[1].hash] * 2
        assert set(seen[LAG].values()) == {"bf16"} and seen[1 + LAG] == {n: str(plans[0].linears[n]) for n in seen[1]}
        assert seen[due] == {n: str(plans[1].linears[n]) for n in seen[1]}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A solve before every second iteration, each gone another way; the ranks hold different linears."""
    run_dir = tmp_path_factory.mktemp("wrong") / "run"
    options = {
        "pipeline_model_parallel_size": 2, "run_dir": str(run_dir), "train_iters": 2 * len(SOLVES),
        "snip_start": 1, "snip_interval": 2,
    }  # fmt: skip
    return run_dir, run_ranks(solves_gone_wrong, 2, options)


def due(case: str) -> int:
    """The iteration from which a case's plan is to hold."""
    return 2 * list(SOLVES).index(case) + 2


def test_solves_that_go_wrong_keep_the_plan_on_all_ranks(wrong):
    run_dir, results = wrong
    (_, told, _), _ = results
    old = Plan.load(run_dir / f"plans/iter_{due('good'):07d}.json")
    for case, (_, reason) in SOLVES.items():
        if not reason:
            continue
        errors = set()
        for rows, (_, _, seen) in zip(rows_of(run_dir), results, strict=True):
            row = rows[due(case)]
            assert row["snip/solve_failed"] == 1 and reason in row["snip/solve_error"], case
            assert row["snip/plan_hash"] == old.hash, case
            assert seen[due(case)] == {name: str(old.linears[name]) for name in seen[1]}, case
            errors.add((row["snip/solve_error"], row["snip/wait_seconds"]))
        assert len(errors) == 1, f"{case}: the ranks tell different things"
        kept = [line for line in told if line.startswith(f"iteration {due(case)}: no new plan")]
        assert len(kept) == 1 and reason in kept[0]
    assert [int(path.stem[-7:]) for path in sorted((run_dir / "plans").iterdir())] == [
        due(case) for case, (_, reason) in SOLVES.items() if not reason
    ]


def test_a_nan_in_one_linears_statistics_on_one_rank_holds_it_at_the_base_on_all(wrong):
    run_dir, results = wrong
    (name, told, _), _ = results
    first, plan = (Plan.load(run_dir / f"plans/iter_{due(case):07d}.json") for case in ("good", "nan"))
    assert str(first.linears[name]) == "fp4" and str(plan.linears[name]) == "fp8"
    assert any(line.endswith(f"statistics are not finite: {name}") for line in told)
    for rows, (other, _, seen) in zip(rows_of(run_dir), results, strict=True):
        assert rows[due("nan") - 1]["snip/non_finite_linears"] == 1 and other == name
        assert rows[due("nan")]["snip/solve_failed"] == 0 and rows[due("nan")]["snip/plan_hash"] == plan.hash
        assert seen[due("nan")] == {n: str(plan.linears[n]) for n in seen[1]}
        assert rows[due("good again")]["snip/solve_failed"] == 0
        assert rows[due("good again") - 1]["snip/non_finite_linears"] == 0
