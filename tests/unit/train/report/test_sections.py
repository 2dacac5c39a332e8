"""The report of a run folder: every picture's figures by hand, and that it is one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.planner import Planner
from megatron_snip.train.report import sections
from megatron_snip.train.report.run_summary import read_run
from megatron_snip.train.report.sections import write_report
from tests.unit.snip.made_up import changed, statistics, without_updates
from tests.unit.train.recorded import (
    FP4,
    NAMES,
    SHAPES,
    full_run,
    line,
    measured,
    named,
    run_of_everything,
    shown,
    two_plans,
    write_run,
)  # fmt: skip

EVERYTHING = [
    "Loss", "Plans", "Divergences", "Measured against predicted", "Trade-off", "Pipeline stages", "Pace and memory",
    "Configuration",
]  # fmt: skip


class Page(HTMLParser):
    """A page's policy, and the text of its scripts that run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.policy, self.scripts, self.runs, self.handlers = "", [], False, []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self.handlers += [name for name in found if name.startswith("on")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        self.runs = tag == "script" and found.get("type") in (None, "text/javascript", "module")
        if self.runs:
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.runs:
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.runs = False


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    return write_report(run_of_everything(tmp_path_factory.mktemp("run") / "mine"))


def test_the_policy_names_each_script_and_allows_no_other(everything):
    page = Page(everything.read_text())
    rules = {words[0]: words[1:] for rule in page.policy.split(";") if (words := rule.split())}
    plotly = (files("plotly") / "package_data/plotly.min.js").read_text()  # the page's script unpacks and adds it
    assert len(page.scripts) == 1 and not page.handlers
    wanted = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in (*page.scripts, plotly)
    }
    assert set(rules["script-src"]) == wanted and rules["default-src"] == ["'none'"]


def test_the_report_is_one_file(tmp_path):
    path = write_report(full_run(tmp_path))
    text = path.read_text()
    assert path == tmp_path / "report.html" and not list(tmp_path.glob("*.png"))
    assert not re.search(r"(src|href)=", text) and "default-src 'none'" in text
    (packed,) = re.findall(r"id='plotly'>([^<]+)</script>", text)
    script = (files("plotly") / "package_data/plotly.min.js").read_bytes()
    assert gzip.decompress(base64.b64decode(packed)) == script and path.stat().st_size < 3e6
    assert all(plan.hash in text for plan in two_plans()) and "80.00% of the linears" in text


def test_every_section_is_there_and_plotly_knows_all_it_is_told(everything):
    found = shown(everything)
    assert list(found) == EVERYTHING
    for heading, figures in found.items():
        assert figures or heading == "Configuration"
        for figure in figures:
            go.Figure(figure["data"], figure["layout"])  # ValueError for a property that is none


def test_what_a_run_lacks_is_left_out(tmp_path):
    assert list(shown(write_report(write_run(tmp_path, [line(1)])))) == ["Loss", "Pace and memory"][:1]


def test_the_slider_holds_every_plan(everything):
    figure, shares = shown(everything)["Plans"]
    slider, plans = figure["plans"], read_run(everything.parent).plans
    assert len(slider["steps"]) == len(plans) == 10 and (slider["rows"], slider["columns"]) == (7, 3)
    assert slider["linears"][0] == [NAMES[0], 0, 0] and slider["linears"][-1] == [NAMES[-1], 6, 2]
    formats = [trace["name"] for trace in figure["data"][1:]]
    assert formats == ["fp8", "fp4"]  # widest first
    for (text, codes), plan in zip(slider["steps"], plans, strict=True):
        assert text.startswith(f"iteration {plan.iteration}: {plan.achieved:.1%} in FP4") and plan.hash in text
        for (name, *_), code in zip(slider["linears"], codes, strict=True):
            option, *three = slider["options"][ord(code) - 48]
            p = plan.linears[name]
            assert option == str(p) and [formats[k] for k in three] == [p.fprop, p.dgrad, p.wgrad]
    assert named(shares)["in FP4"]["y"] == pytest.approx([plan.achieved for plan in plans], rel=1e-5)
    assert named(shares)["linears changed"]["y"][0] == pytest.approx(plans[1].churn(plans[0]), rel=1e-5)


def test_formats_of_each_gemm(tmp_path):
    plan = Plan(1, {NAMES[0]: LinearPrecision.parse("bf16/fp8/fp4"), "layers.0.a": FP4})
    (figure,) = shown(write_report(write_run(tmp_path, [line(1)], (plan,))))["Plans"]
    assert [trace["name"] for trace in figure["data"][1:]] == ["bf16", "fp8", "fp4"]
    assert figure["plans"]["options"] == [["bf16/fp8/fp4", 0, 1, 2]]
    assert figure["plans"]["linears"] == [[NAMES[0], 0, 0]]  # other names have no cell


def test_many_plans_are_thinned_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sections.pictures, "MOST_CELLS", 3 * len(NAMES))
    monkeypatch.setattr(sections, "MOST_LINES", 4)
    plans = tuple(Plan(i, dict.fromkeys(NAMES, FP4), achieved=i / 10) for i in range(1, 10))
    page = write_report(write_run(tmp_path, [line(1)], plans))
    steps = shown(page)["Plans"][0]["plans"]["steps"]
    assert [text.split(":")[0] for text, _ in steps] == ["iteration 1", "iteration 5", "iteration 9"]
    assert page.read_text().count("<tr><td>") - page.read_text().count("<tr><td>--") == 4
    assert "4 of 9 are listed" in page.read_text()


def test_plan_changes_stand_in_the_loss(everything):
    (figure,) = shown(everything)["Loss"]
    traces = named(figure)
    assert traces["new plan"]["x"][:4] == [10, 10, None, 20] and traces["training"]["y"][0] == 4.89
    low, top = figure["layout"]["yaxis"]["range"]
    assert low < 3.9 and top < 6 and traces["mean of 5"]["x"] == list(range(3, 99))
    assert traces["mean of 5"]["y"][0] == pytest.approx(np.mean([4.89, 5.08, 4.87, 5.06, 4.85]))


def test_the_difference_to_another_run(tmp_path):
    """Windows of 8 of 100 iterations: losses of two runs that differ by 0.25 and, in the second, by turns of 0.4."""
    mine = write_run(tmp_path / "mine", [line(i) for i in range(1, 101)])
    turns = [line(i, **{"lm loss": 5.0 - 0.1 * i - 0.25 - 0.4 * (i % 2)}) for i in range(1, 105)]
    page = write_report(mine, [write_run(tmp_path / "theirs", turns)], tmp_path / "both.html")
    loss, figure = shown(page)["Loss"]
    assert {"mine: training", "theirs: training", "mine: mean of 5"} <= set(named(loss))
    band, mean = figure["data"]
    assert page == tmp_path / "both.html" and len(mean["x"]) == 12 and mean["name"] == "mean of 8 or 9"
    assert mean["y"][5] == pytest.approx(0.45, abs=1e-5)  # of eight, four each
    error = 2 * np.std([0.25, 0.65] * 4, ddof=1) / math.sqrt(8)
    assert (band["y"][5], band["y"][-6]) == pytest.approx((0.45 + error, 0.45 - error), rel=1e-4)
    assert not read_run(mine).notes


def test_marks_beside_other_runs_name_their_run(tmp_path):
    mine, other = (run_of_everything(tmp_path / name) for name in ("mine", "other"))
    text, alone = write_report(mine, [other]).read_text(), write_report(mine).read_text()
    assert "New plans are those of mine." in text and "New plans" not in alone
    assert "mine - other: training loss +0.0000 ± 0 nats over the last 10 iterations." in text
    assert "<title>mine compared with other</title>" in text and "<title>mine</title>" in alone


def test_runs_that_differ_in_more_than_precision_are_told_of(tmp_path):
    """The difference of their losses is then not that of precision alone."""
    lines, alike = [line(1)], {"precision": "bf16", "run_dir": "elsewhere", "data_path": ("a", "b")}
    mine = write_run(tmp_path / "mine", lines, precision="snip", data_path=("a", "b"))
    same = write_run(tmp_path / "same", lines, **alike)
    other = write_run(tmp_path / "other", lines, **alike | {"global_batch_size": 16, "data_path": ("c",)})
    bare = write_run(tmp_path / "bare", lines)
    assert "differ in more" not in write_report(mine, [same, bare]).read_text()
    told = "mine and other differ in more than precision: --data-path a b and c, --global-batch-size 0 and 16<"
    assert told in write_report(mine, [same, other]).read_text()


def test_runs_without_a_common_iteration(tmp_path):
    mine, theirs = write_run(tmp_path / "a", [line(1)]), write_run(tmp_path / "b", [line(2), "garbage\n"])
    page = write_report(mine, [theirs])
    assert f"{theirs}/metrics.jsonl: damaged lines are left out: 1 of" in page.read_text()
    assert "a and b have no iteration in common" in page.read_text() and len(shown(page)["Loss"]) == 1


def test_long_curves_keep_their_spikes():
    values = np.sin(np.arange(100_000) / 1000)
    values[[12_345, 12_346, 70_001]] = 9, math.nan, -9
    xs, ys = sections.pictures.thinned((range(100_000), values.tolist()))
    assert len(xs) <= sections.pictures.MOST_POINTS and xs == sorted(xs) and (xs[0], xs[-1]) == (0, 99_999)
    assert dict(zip(xs, ys))[12_345] == 9 and dict(zip(xs, ys))[70_001] == -9
    assert sections.pictures.thinned(([1, 5], [0.1234567, math.nan])) == ([1, 5], [0.123457, None])


def last_divergences(page: Path) -> list[dict[tuple[int, int], float]]:
    """(row, block) -> value of each heatmap of single linears."""
    figures = [f for f in shown(page).get("Divergences", []) if "last statistics" in f["title"]]
    tables = [figure["data"][0]["customdata"] for figure in figures]
    return [{(r, c): v for r, row in enumerate(t) for c, v in enumerate(row) if v is not None} for t in tables]


def test_divergences_are_those_of_the_last_statistics(tmp_path):
    """Of the costliest format; there is no picture without statistics, whatever metrics say."""
    folder = write_run(tmp_path, [line(1, **{f"snip/loss_divergence/{name}": 1.0 for name in NAMES})])
    assert "Divergences" not in shown(write_report(folder))
    measured(7.0).save(folder / "stats/iter_0000002.json")
    measured().save(folder / "stats/iter_0000010.json")
    loss, weight = last_divergences(write_report(folder))
    assert loss == pytest.approx({(i % 7, i // 7): 1e-4 * (i + 1) for i in range(21)})
    assert list(weight.values()) == pytest.approx([1 / 21] * 21, rel=1e-5)


def test_divergences_over_iterations(everything):
    kinds, blocks, *_ = shown(everything)["Divergences"]
    assert list(named(kinds)) == ["q", "down"] and named(kinds)["down"]["x"] == list(range(10, 101, 10))
    assert set(named(kinds)["down"]["y"]) == {2e-4} and kinds["layout"]["yaxis"]["type"] == "log"
    (heat,) = blocks["data"]
    assert [row[0] for row in heat["customdata"]] == [3e-4, 4e-4, 5e-4] and heat["x"][:2] == ["10", "20"]
    assert heat["z"][0][0] == pytest.approx(math.log10(3e-4), abs=1e-4)


@pytest.mark.parametrize("text", ["{", '{"version": 3, "linears": {}}', "[]", ""])
def test_broken_statistics_are_a_note(text, tmp_path):
    """The ones before them are drawn, if there are any."""
    folder = write_run(tmp_path, [line(1)])
    (folder / "stats").mkdir()
    (folder / "stats/iter_0000009.json").write_text(text)
    page = write_report(folder)
    assert not last_divergences(page)
    assert re.search(r"<p class='note'>[^<]*stats/iter_0000009.json: ", page.read_text())
    measured().save(folder / "stats/iter_0000008.json")
    assert last_divergences(write_report(folder))[0][0, 0] == pytest.approx(1e-4)
    assert "iter_0000009.json" in page.read_text()


@pytest.mark.parametrize("bad", [NAMES[:1], NAMES])
def test_linears_whose_statistics_are_not_finite_stay_empty(bad, tmp_path):
    stats = measured()
    for name in bad:
        stats = changed(stats, name, "token/fp8", math.nan)
    stats.save(tmp_path / "stats/iter_0000001.json")
    found = last_divergences(write_report(write_run(tmp_path, [line(1)])))
    assert all(len(table) == len(NAMES) - len(bad) for table in found) and len(found) == (0 if bad == NAMES else 2)


def test_statistics_without_formats_or_updates(tmp_path):
    none = statistics(SHAPES, {}, [1.0] * len(NAMES), {})
    none.save(tmp_path / "stats/iter_0000001.json")
    assert not any(last_divergences(write_report(write_run(tmp_path, [line(1)]))))
    without_updates(measured()).save(tmp_path / "stats/iter_0000002.json")
    (loss,) = last_divergences(write_report(tmp_path))
    assert len(loss) == len(NAMES)


def test_measured_against_predicted(everything):
    """Of each plan the last mean, with bars of two standard errors, and the first prediction, of the statistics that it
    was made from: the first plan holds from 10 to 19, and was measured at 10 and 15.
    """
    over, against = shown(everything)["Measured against predicted"]
    traces = named(over)
    assert traces["measured"]["x"] == [*range(15, 100, 10), 100]
    assert traces["measured"]["y"][0] == pytest.approx(0.025) and traces["predicted"]["y"][0] == pytest.approx(0.03)
    assert traces["measured"]["error_y"]["array"] == pytest.approx([0.004] * 10)
    plans = named(against)["plans"]
    assert (plans["x"][0], plans["y"][0]) == pytest.approx((0.03, 0.025)) and plans["text"][0] == "iteration 15"
    assert named(against)["as predicted"]["x"] == named(against)["as predicted"]["y"] == pytest.approx([0.03, 0.12])


def test_measurements_before_the_first_plan_are_no_plan(tmp_path):
    """BF16 before it costs exactly what is predicted, nothing; without any plan they are all that there is."""
    name = "snip/measured_loss_divergence_mean"
    warmup = [line(i, **{name: 0.0, "snip/predicted_loss_divergence": 0.0}) for i in (1, 2)]
    under = [line(i, **{name: 0.5, "snip/plan_hash": "a"}) for i in (3, 4)]
    for lines, at in ((warmup, [2]), (warmup + under, [4]), (under, [4])):
        over, *_ = shown(write_report(write_run(tmp_path, lines)))["Measured against predicted"]
        assert named(over)["measured"]["x"] == at


def test_the_trade_off_with_the_chosen_plan(everything):
    (figure,) = shown(everything)["Trade-off"]
    traces, plan = named(figure), read_run(everything.parent).plans[-1]
    saved, cost = traces["solved for each share"]["x"], traces["solved for each share"]["y"]
    assert saved == sorted(saved) and cost == sorted(cost) and (saved[0], saved[-1]) == (0, 1)
    chosen = traces["chosen (the last plan)"]
    assert chosen["x"] == pytest.approx([plan.achieved], rel=1e-5) and chosen["text"] == ["iteration 100"]
    assert chosen["y"][0] >= np.interp(chosen["x"][0], saved, cost) * (1 - 1e-6)
    # by hand: dL of fp4 above fp8's, over the loss, of the linears that the plan has in fp4
    worth = [0.9e-4 * (i + 1) / 5.0 for i, name in enumerate(NAMES) if plan.linears[name] == FP4]
    assert chosen["y"][0] == pytest.approx(sum(worth), rel=1e-4)
    assert len(traces["plans before it"]["x"]) == 9


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_layers": 2}, "config.json and the statistics are of different models"),
        ({"gemm_times": "gone.json"}, "gone.json"),
        ({"snip_options": "fp9"}, "fp9"),
    ],
)
def test_options_that_no_longer_fit_are_a_note(options, why, tmp_path):
    folder = run_of_everything(tmp_path / "run")
    saved = json.loads((folder / "config.json").read_text())
    for name, value in options.items():
        saved["model" if name == "num_layers" else "snip"][name] = value
    (folder / "config.json").write_text(json.dumps(saved))
    page = write_report(folder)
    assert "Trade-off" not in shown(page)
    assert re.search(rf"<p class='note'>no trade-off is shown: [^<]*{re.escape(why)}", page.read_text())


def test_a_solve_of_the_trade_off_has_little_time(everything, monkeypatch):
    asked = []
    monkeypatch.setattr(Planner, "frontier", lambda self, name, **limits: asked.append(limits) or [self.solve(name)])
    page = write_report(everything.parent, file=everything.parent / "other.html")
    assert len(named(shown(page)["Trade-off"][0])["solved for each share"]["x"]) == 1
    assert asked == [{"time_limit": sections.POINT_SECONDS, "gap": 1e-3}]


def test_a_run_s_name_is_no_markup(tmp_path):
    """plotly would take it for some, as a browser would."""
    runs = [full_run(tmp_path / name) for name in ("a<b>&c", "plain")]
    loss, difference = shown(write_report(runs[0], runs[1:]))["Loss"]
    assert loss["data"][0]["name"] == "a&lt;b&gt;&amp;c: training"
    assert difference["layout"]["yaxis"]["title"]["text"] == "a&lt;b&gt;&amp;c - plain (nats)"
    assert "<title>a&lt;b&gt;&amp;c compared with plain</title>" in (runs[0] / "report.html").read_text()


def test_stages_of_the_last_plan(tmp_path):
    stages = {"snip/stage_0/achieved": 0.5, "snip/stage_0/modelled_time": 0.2}
    stages |= {"snip/stage_1/achieved": 0.75, "snip/stage_1/modelled_time": 0.125}
    lines = [line(1, **stages), line(2, **{**stages, "snip/stage_0/achieved": 0.625}), line(3)]
    page = write_report(write_run(tmp_path / "staged", lines, two_plans()))
    (bars,) = shown(page)["Pipeline stages"][0]["data"]
    assert (bars["y"], bars["text"]) == ([0.2, 0.125], ["62.5% in FP4", "75.0% in FP4"])
    assert "The slowest stage takes 1.231 times the mean." in page.read_text()


def test_pace_and_memory(everything):
    """4 sequences of 128 tokens in 2 s; ten probes of 0.5 s in 200 s; 2 GiB."""
    pace, share, memory = shown(everything)["Pace and memory"]
    assert set(named(pace)["tokens/s"]["y"]) == {256} and named(pace)["tokens/s"]["x"] == list(range(1, 101))
    assert named(share)["probes"]["y"][-1] == pytest.approx(5 / 200) and named(share)["probes"]["y"][8] == 0
    assert named(share)["waiting for the solver"]["y"][-1] == pytest.approx(1 / 200)
    assert set(named(memory)["allocated"]["y"]) == {2}


def test_configuration_and_versions(everything):
    text = everything.read_text()
    changed_ones, every = text.split("Configuration</h2>")[1].split("<details>")
    assert "<tr><td>--precision</td><td>snip</td></tr>" in changed_ones and "--micro-batch-size" not in changed_ones
    assert "<tr><td>torch</td><td>2.99</td></tr>" in changed_ones
    assert "<tr><td>training</td><td>--micro-batch-size</td><td>1</td></tr>" in every


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 3}'])
def test_a_strange_config_costs_no_report(text, tmp_path):
    folder = full_run(tmp_path)
    (folder / "config.json").write_text(text)
    assert list(shown(write_report(folder)))[:2] == ["Loss", "Plans"]


def test_a_block_beyond_any_model_takes_no_room(tmp_path):
    far = Plan.uniform([*NAMES, "layers.1000000000.mlp.up_proj", "layers." + "9" * 4000 + ".mlp.up_proj"], "fp4")
    page = write_report(write_run(tmp_path / "run", [line(1)], (far,)))
    assert shown(page)["Plans"][0]["plans"]["columns"] == 3


def test_names_are_escaped(tmp_path):
    plan = Plan(1, {"layers.0.a": FP4}, objective="<script>")
    folder = write_run(tmp_path / "<script>", [line(1, **{"mem-<script>": 1}), "garbage\n"], (plan,))
    text = write_report(folder).read_text()
    assert read_run(folder).notes and text.count("<script>") == 1 and "\\u003cscript>" in text  # ours alone


def test_a_report_needs_no_matplotlib():
    drawing = "'matplotlib' in sys.modules or 'plotly' in sys.modules"
    code = f"import sys, megatron_snip.train.report.sections; sys.exit({drawing})"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4]).returncode == 0
