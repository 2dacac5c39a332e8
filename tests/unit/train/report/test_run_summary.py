"""What a run folder tells: its numbers by hand, and every kind of partial or damaged run."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_snip.train.report.run_summary import format_summary, read_run, rows_of
from megatron_snip.train.report.sections import write_report
from tests.unit.train.recorded import full_run, line, two_plans, write_run


def test_summary_by_hand(tmp_path):
    assert rows_of(read_run(full_run(tmp_path))) == [
        ("validation loss", "6.0000 -> 4.5000"),
        ("training loss", "4.9000 -> 4.5000"),
        ("in FP4", "80.00% of the linears' FLOPs (target 75.00%)"),
        ("plans", "2 (the last changed 14.3% of the linears)"),
        ("iterations", "5 (1 skipped)"),
        ("time in probes", "1.0 s (10.00% of the run)"),
        ("time in the solver", "0.5 s (5.00% of the run)"),
        ("time in all iterations", "10.0 s"),
    ]


def test_a_run_without_probes_says_nothing_of_their_time(tmp_path):
    names = [name for name, _ in rows_of(read_run(write_run(tmp_path, [line(1)])))]
    assert names == ["validation loss", "training loss", "in FP4", "plans", "iterations", "time in all iterations"]


def test_trials_in_words(tmp_path):
    """One took the solver's plan, one another, and one kept the plan in force."""
    rows = [
        line(i, **{
            "snip/trial_passes": 2, "snip/trial_name": name, "snip/trial_seconds": 0.5, "snip/top_token": share,
            "snip/trial_increase": 0.01 * i, "snip/trial_increase_standard_error": 0.001, "snip/trial_predicted": 0.02,
        })
        for i, name, share in ((1, "solver", 0.5), (2, "hold layers.0.mlp.up_proj", 0.4), (3, "in_force", 0.305))
    ]  # fmt: skip
    text = format_summary(write_run(tmp_path, rows))
    assert "3 (2 took another plan than the solver's); the last plan costs 0.03 ± 0.001 nats above BF16" in text
    assert "nats above BF16, predicted 0.02\n" in text and "time in trials          1.5 s (25.00% of the run)" in text
    assert "top token               30.5% of a linear's loss divergence, in the last probe" in text
    assert "trials" not in format_summary(full_run(tmp_path / "without"))


def test_a_target_of_modelled_time_is_told_as_such(tmp_path):
    plan = dataclasses.replace(two_plans()[0], target_unit="modelled time")
    folder = write_run(tmp_path, [line(1)], (plan,))
    assert "100.00% of the linears' FLOPs (target 75.00% in modelled time)" in format_summary(folder)
    assert "<td>75.00% in modelled time</td>" in write_report(folder).read_text()


@pytest.mark.parametrize(
    ("precision", "told"),
    [
        ("bf16", "0.00% of the linears' FLOPs (--precision bf16)"),
        ("fp8/fp4/fp4", "66.67% of the linears' FLOPs (--precision fp8/fp4/fp4)"),
        ("nvfp4_plain", "100.00% of the linears' FLOPs (--precision nvfp4_plain)"),
        ("plan", "as plans/best.json says"),
        ("snip", "no plan"),
        ("later", "? of the linears' FLOPs (--precision later)"),
    ],
)
def test_what_a_run_without_plans_of_its_own_has_in_fp4(precision, told, tmp_path):
    folder = write_run(tmp_path, [line(1)], precision=precision, precision_plan="plans/best.json")
    assert f"in FP4                  {told}\n" in format_summary(folder)
    two_plans()[0].save(folder / "plans/iter_0000002.json")  # of before it turned to another --precision
    assert (f"in FP4                  {told}\n" in format_summary(folder)) == (precision != "snip")


def test_a_plan_that_is_not_in_force_any_more_has_no_share(tmp_path):
    """As where --precision was bf16 for a while, and no probe has come since."""
    rows = [line(1, **{"snip/plan_hash": two_plans()[0].hash}), line(2, **{"snip/plan_hash": ""})]
    folder = write_run(tmp_path, rows, two_plans(), precision="snip")
    assert "in FP4                  no plan\nplans                   2" in format_summary(folder)


def test_the_share_of_a_plan_file_is_told_only_if_it_is_the_plan_that_ran(tmp_path):
    ran, other = two_plans()
    file, rows = tmp_path / "plan.json", [line(1), line(2, **{"snip/plan_hash": ran.hash})]
    folder = write_run(tmp_path / "run", rows, precision="plan", precision_plan=str(file))
    told = []
    for plan in (ran, other):
        plan.save(file)
        told.append(format_summary(folder).splitlines()[2].removeprefix("in FP4").strip())
    assert told == [f"100.00% of the linears' FLOPs ({file})", f"as {file} says"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line(1)],
        [line(1), '{"iteration": 2, "lm lo'],
        ['{"iteration": 1'],
        [line(1, **{"lm loss": None})],
        [line(i) for i in range(1, 101)],
        [line(1, **{"snip/loss_divergence/block_00": 0.0, "snip/loss_divergence/q": 1e-3})],
    ],
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_partial_runs(tmp_path, lines, count):
    folder = write_run(tmp_path, lines, two_plans()[:count])
    assert write_report(folder).stat().st_size > 500
    assert not read_run(folder).notes  # a cut last line is no news
    assert "validation loss" in format_summary(folder)


def test_damaged_files_are_named_not_fatal(tmp_path):
    folder = write_run(tmp_path, [line(1), "garbage\n", '{"no": "iteration"}\n', line(2)], two_plans())
    (folder / "plans" / "iter_0000003.json").write_text("{")
    notes = read_run(folder).notes
    assert "damaged lines are left out: 2 of 5, by number 2, 3" in notes[0] and "iter_0000003.json" in notes[1]
    rows = dict(rows_of(read_run(folder)))
    assert rows["plans"].startswith("2 ") and rows["iterations"] == "2"
    assert "iter_0000003.json" in write_report(folder).read_text()


@pytest.mark.parametrize(
    "row",
    [
        '{"iteration": ' + "9" * 400 + "}",
        "[" * 10**5,
        '{"iteration": 2, "iteration": 3}',
        '{"iteration": true}',
        '{"iteration": 2, "lm loss": 1' + "0" * 400 + "}",
    ],
)
def test_strange_rows_are_noted(row, tmp_path):
    run = read_run(write_run(tmp_path / "run", [line(1), row + "\n", line(3, **{"lm loss": 4.9})]))
    assert [r["iteration"] for r in run.metrics] == [1, 3] and "damaged lines are left out: 1 of" in run.notes[0]
    assert "4.9000 -> 4.9000" in format_summary(run.path)


def test_rows_are_read_once_however_many_metrics_are_asked_for(tmp_path):
    class Counted(dict):
        reads = 0

        def items(self):
            self.reads += 1
            return super().items()

        def get(self, *key):
            raise AssertionError("a look at every row for each metric")

    rows = [Counted(row, more=float(i)) for i, row in enumerate(read_run(full_run(tmp_path)).metrics)]
    run = dataclasses.replace(read_run(tmp_path), metrics=rows)
    assert run.column("more")[1] == list(range(len(rows))) and run.column("nothing") == ([], [])
    assert len(run.column("lm loss")[0]) > 1 and {row.reads for row in rows} == {1}
