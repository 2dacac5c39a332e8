"""What tools/soak.py says of bad options, and what its report tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import soak
from tools.soak import Outcome, Report

ROOT = Path(__file__).resolve().parents[3]


def test_it_runs_as_its_help_says():
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "python -m tools.soak --faults 200" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--kinds", "rank,rnak"], "--kinds rnak unknown; known: rank, node"), ([], "is not empty; give a")],
)
def test_bad_options(words, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as info:
        soak.main([*words, "--output", str(tmp_path)])
    assert info.value.code == 2 and said in capsys.readouterr().err


def test_the_report_counts_what_was_lost_and_what_was_silent():
    good = Outcome(1, 1, "rank", "save", fell_at=9, whole=6, resumed=6, seconds=2.0)
    report = Report(1, {}, [good, Outcome(2, 1, "bit", "anywhere", fell_at=12, whole=6, resumed=6, seconds=4.0)])
    assert report.good and "| rank | 1 | 0 | 0 | 3 (3) | 2.0 |" in report.to_markdown()
    for outcome in (Outcome(3, 2, "bit", "anywhere", silent=True), Outcome(3, 2, "rank", "save", lost=3)):
        bad = Report(1, {}, [good, outcome])
        assert not bad.good
    assert not Report(1, {}, [good], ["round 1: iteration 7"]).good
    assert soak.differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b", "c"]
