"""tools/report.py: a report for each run, one of several, and one line for what is wrong."""

from __future__ import annotations

import pytest

from megatron_snip.cli.report import main
from tests.unit.train.recorded import full_run, line, shown, write_run


@pytest.fixture
def runs(tmp_path) -> list[str]:
    (tmp_path / "one").mkdir()
    return [str(full_run(tmp_path / "one")), str(write_run(tmp_path / "two", [line(i) for i in (1, 2)]))]


def test_each_run_gets_its_report(runs, tmp_path, capsys):
    assert main(runs) == 0
    said = capsys.readouterr().out
    for run in runs:
        assert f"{run}/report.html" in said and len(shown(tmp_path / run / "report.html")["Loss"]) == 1
    assert said.count("validation loss") == 2


def test_one_report_of_several_runs(runs, tmp_path, capsys):
    assert main([*runs, "--compare"]) == 0
    assert capsys.readouterr().out.endswith(f"{runs[0]}/compare.html\n")
    assert len(shown(tmp_path / "one/compare.html")["Loss"]) == 2 and not (tmp_path / "one/report.html").exists()
    assert main([runs[0], "--compare", runs[1]]) == 0, "the option between the runs"
    assert main([*runs, "--compare", "--output", str(tmp_path / "new/both.html")]) == 0
    assert "Plans" in shown(tmp_path / "new/both.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{one}", "--compare"], "--compare needs two or more different runs, but got {one}; name another folder"),
        (["{one}", "{one}/", "--compare"], "--compare needs two or more different runs"),
        (["{one}", "{two}", "{two}", "--compare"], "--compare needs two or more different runs"),
        (["{one}", "{two}", "--output", "x.html"], "--output x.html is one file, but there are 2 reports; give"),
        (["{one}", "--output", "{two}"], "--output {two} is a folder; give a file"),
        (["{one}/none"], "{one}/none holds neither metrics.jsonl nor plans/*.json; give a run folder (--run-dir)"),
        (["n" * 300], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(words, message, runs, tmp_path, capsys):
    names = dict(zip(("one", "two"), runs, strict=True))
    assert main([word.format(**names) for word in words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and message.format(**names) in said
    assert not list(tmp_path.rglob("*.html"))


def test_an_empty_name(capsys):
    assert main([""]) == 2
    assert "the path is ''" in capsys.readouterr().err
