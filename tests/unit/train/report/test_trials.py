"""The report's pictures of trials."""

from __future__ import annotations

import dataclasses
import math

import plotly.graph_objects as go
import pytest

from megatron_snip.snip.plan.plan_file import TrialRecord, TriedRecord
from megatron_snip.train.report import trials
from megatron_snip.train.report.page import Section, page, table
from megatron_snip.train.report.sections import write_report
from tests.unit.snip.made_up import changed, statistics
from tests.unit.train.recorded import NAMES, SHAPES, full_run, line, named, shown, two_plans, write_run


def record(best: int) -> TrialRecord:
    """Of three plans, of which one has no finite loss and one no prediction."""
    tried = [
        TriedRecord("solver", 0.5, 0.01, 0.1),
        TriedRecord("lowest", None, None, 2.0),
        TriedRecord("hold layers.0.mlp.up_proj", 0.2, 0.02, None),
    ]
    return TrialRecord(tried[best].name, tried[best].increase, tried[best].error, 8192, tried)


def plans():
    return tuple(dataclasses.replace(plan, trial=record(best)) for plan, best in zip(two_plans(), (0, 2)))


def test_every_plan_that_was_tried_is_shown(tmp_path):
    """Measured with bars of two standard errors, beside what was predicted; the applied one is marked."""
    page = write_report(write_run(tmp_path, [line(i) for i in range(1, 6)], plans()))
    over, second, first = shown(page)["Trials"]
    assert "2 plans were tried before they took effect; 1 of them replaced the solver&#39;s own" in page.read_text()
    assert second["title"] == "Trial before iteration 4" and first["title"] == "Trial before iteration 2"
    traces = named(second)
    names = ["solver", "lowest", "hold layers.0.mlp.up_proj"]
    assert traces["measured"]["x"] == names and traces["measured"]["y"] == [0.5, None, 0.2]
    assert traces["measured"]["error_y"]["array"] == pytest.approx([0.02, 0.0, 0.04])
    assert (traces["predicted"]["x"], traces["predicted"]["y"]) == (names[:2], [0.1, 2.0])
    assert (traces["applied"]["x"], traces["applied"]["y"]) == (names[2:], [0.2])
    assert named(first)["applied"]["x"] == ["solver"] and "8192 tokens" in first["layout"]["yaxis"]["title"]["text"]
    traces = named(over)
    assert (traces["applied"]["x"], traces["applied"]["y"]) == ([2, 4], [0.5, 0.2])
    assert traces["tried beside it"]["x"] == [2, 2, 4, 4] and traces["tried beside it"]["y"] == [None, 0.2, 0.5, None]
    assert traces["predicted of the applied plan"]["x"] == [2]
    for figure in (over, second, first):
        go.Figure({key: figure[key] for key in ("data", "layout")})


def test_the_newest_trials_are_shown_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "MOST_TRIALS", 1)
    page = write_report(write_run(tmp_path, [line(1)], plans()))
    assert [figure["title"] for figure in shown(page)["Trials"]] == ["All trials", "Trial before iteration 4"]
    assert "The newest 1 are shown one by one." in page.read_text()


def test_a_single_trial_has_one_picture(tmp_path):
    page = write_report(write_run(tmp_path, [line(1)], plans()[:1]))
    assert [figure["title"] for figure in shown(page)["Trials"]] == ["Trial before iteration 2"]
    assert "none of them replaced" in page.read_text()


def test_plans_that_were_not_tried(tmp_path):
    assert "Trials" not in shown(write_report(full_run(tmp_path)))


def top_tokens(page) -> dict[str, float]:
    """The share in each cell that is not empty, by kind and block."""
    (figure,) = [one for one in shown(page)["Divergences"] if one["title"].startswith("Top token")]
    heat = figure["data"][0]
    return {
        (kind, block): 10**value
        for kind, row in zip(figure["layout"]["yaxis"]["ticktext"], heat["z"])
        for block, value in enumerate(row)
        if value is not None
    }


def test_the_share_of_the_top_token(tmp_path):
    """In the costliest format of each linear; one that is not finite has no cell."""
    token, ones = [2.0] * len(NAMES), [1.0] * len(NAMES)
    top = [1.0] + [0.5] * (len(NAMES) - 1)
    more = {"spread/fp4": ones, "top_token/fp4": top}
    stats = statistics(SHAPES, {"fp4": token}, ones, {"fp4": ones}, more)
    changed(stats, NAMES[-1], "token/fp4", math.nan).save(tmp_path / "stats/iter_0000002.json")
    found = top_tokens(write_report(write_run(tmp_path, [line(1)])))
    assert found.pop(("q", 0)) == pytest.approx(0.5, rel=1e-3)
    assert ("down", 2) not in found and len(found) == 19
    assert list(found.values()) == pytest.approx([0.25] * 19, rel=1e-3)


def test_a_table_escapes_cells_and_aligns_columns_of_numbers():
    text = table(("name", "nats", "of"), [["<script>", "1.2e-5 ± 3e-6", "a&b"], ["2", "", "3"]])
    assert "<tr><td>&lt;script&gt;</td><td class='number'>1.2e-5 ± 3e-6</td><td>a&amp;b</td></tr>" in text
    assert "<th>name</th><th class='number'>nats</th><th>of</th>" in text and "tabindex='0'" in text


def test_a_page_escapes_all_that_it_is_given():
    evil = "</script><script>alert(1)</script>"
    figure = {"data": [], "layout": {"height": 200}, "title": evil}
    text = page(evil, evil, [(evil, evil)], [evil], [Section(evil, evil, [figure])], evil)
    assert "<script>alert" not in text and text.count("&lt;script&gt;alert(1)") == 10
    assert "style='min-height: 200px'" in text  # nothing moves when the picture is drawn
