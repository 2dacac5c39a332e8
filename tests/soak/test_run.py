"""What tests/soak/run.py says of bad options, and what its report tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import run
from tests.soak.run import Outcome, Report

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_as_its_help_says():
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.run", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "python -m tests.soak.run --faults 200" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--kinds", "rank,rnak"], "--kinds rnak unknown; known: rank, node"), ([], "is not empty; give a")],
)
def test_bad_options(words, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as info:
        run.main([*words, "--output", str(tmp_path)])
    assert info.value.code == 2 and said in capsys.readouterr().err


def test_the_report_counts_what_was_lost_and_what_was_silent():
    good = Outcome(1, 1, "rank", "save", fell_at=9, whole=6, resumed=6, seconds=2.0)
    report = Report(1, {}, [good, Outcome(2, 1, "bit", "anywhere", fell_at=12, whole=6, resumed=6, seconds=4.0)])
    assert report.good and "| rank | 1 | 0 | 0 | 3 (3) | 2.0 |" in report.to_markdown()
    for outcome in (Outcome(3, 2, "bit", "anywhere", silent=True), Outcome(3, 2, "rank", "save", lost=3)):
        bad = Report(1, {}, [good, outcome])
        assert not bad.good
    assert not Report(1, {}, [good], ["round 1: iteration 7"]).good
    assert run.differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b", "c"]


def test_a_run_that_was_ending_already_tells_why():
    """Seen once in 200 faults: a process was stopped just as the third save on a full disk had failed."""
    stopped = "error [rank 3]: rank 2 (process 7 on vm) is stopped; its last checkpoint is iteration 6, continue it"
    full = (
        "error: the background save to x/checkpoints failed on rank 0 ([Errno 27] File too large), 3 in a row; "
        "free space or give another --save, and continue with --load x/checkpoints"
    )
    warned = full.replace("error:", "2026-11-22 14:00:56 [rank 0]").replace(", 3 in a row; free space", "; training")
    expected = r"error.*\(process 7 on .*its last checkpoint is"
    assert run.told(f"a\n{full}\n{stopped}", expected, ends=True) == stopped
    assert run.told(f"a\n{warned}\n{full}", expected, ends=True) == full
    assert run.told(f"a\n{full}", "skipped", ends=False) == run.told(warned, expected, ends=True) == ""
    assert run.told("error: something else", expected, ends=True) == run.told(full, "", ends=True) == ""
