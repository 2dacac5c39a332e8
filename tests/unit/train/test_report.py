"""The report of a run folder: its numbers by hand, every kind of partial run, pictures that show the plan."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan import Plan
from megatron_snip.train import report_pictures
from megatron_snip.train.report import format_summary, main, read_run, summary, write_report
from tests.unit.snip.made_up import changed, statistics, without_updates

KINDS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
NAMES = [f"layers.{block}.{kind}_proj" for block in range(3) for kind in KINDS]
SHAPES = [LinearShape(name, 8, 4, int(name.split(".")[1]), name.split(".")[-1][:-5]) for name in NAMES]
FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("fp8", "fp4", "fp8/fp4/fp4"))


def line(iteration: int, **more) -> str:
    values = {"iteration": iteration, "lm loss": 5.0 - 0.1 * iteration, "iteration-time": 2.0, "skipped": 0}
    return json.dumps({**values, "snip/plan_hash": "", **more}) + "\n"


def write_run(folder: Path, lines: list[str], plans: tuple[Plan, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    for plan in plans:
        plan.save(folder / "plans" / f"iter_{plan.iteration:07d}.json")
    return folder


def two_plans() -> tuple[Plan, Plan]:
    first = Plan(2, dict.fromkeys(NAMES, FP4), "snip", 0.75, 1.0)
    second = Plan(4, {**first.linears, NAMES[0]: FP8, NAMES[1]: MIXED, NAMES[2]: FP8}, "snip", 0.75, 0.8)
    return first, second


def full_run(folder: Path) -> Path:
    probed = {"snip/probe_seconds": 0.5, "snip/solver_seconds": 0.25}
    lines = [
        line(1, **{"lm loss validation": 6.0}),
        line(2, **probed),
        line(3, **{"lm loss": None}, skipped=1),
        line(4, **probed),
        line(5, **{"lm loss validation": 4.5}, skipped=1),
    ]
    measured().save(folder / "stats/iter_0000003.json")
    return write_run(folder, lines, two_plans())


def measured(scale: float = 1.0) -> Statistics:
    """dL 1e-4 ... 21e-4 nats in fp4, a tenth of it in fp8; rho^2 1/21 each."""
    worth = [2e-4 * scale * (i + 1) for i in range(len(NAMES))]
    ones = [1.0] * len(NAMES)
    token = {"fp4": worth, "fp8": [value / 10 for value in worth]}
    return statistics(SHAPES, token, ones, {"fp4": ones, "fp8": [0.5] * len(NAMES)}, tokens=1)


def test_summary_by_hand(tmp_path):
    assert summary(full_run(tmp_path)) == {
        "iterations": 5,
        "last_iteration": 5,
        "first_loss": 4.9,
        "last_loss": 4.5,
        "first_validation_loss": 6.0,
        "last_validation_loss": 4.5,
        "skipped": 1,
        "plans": 2,
        "fp4_share": 0.8,
        "target": 0.75,
        "target_unit": "FP4 share",
        "last_churn": 3 / 21,
        "seconds": 10.0,
        "probe_seconds": 1.0,
        "solver_seconds": 0.5,
        "probe_share": 0.1,
        "solver_share": 0.05,
    }


def test_summary_text(tmp_path):
    text = format_summary(full_run(tmp_path))
    assert "validation loss         6.0000 -> 4.5000" in text
    assert "80.00% of the linears' FLOPs (target 75.00%)" in text
    assert "1.0 s (10.00% of the run)" in text and "5 (1 skipped)" in text


def test_report_is_self_contained(tmp_path):
    path = write_report(full_run(tmp_path))
    text = path.read_text()
    assert path == tmp_path / "report.html"
    pictures = re.findall(r"src='data:image/png;base64,([^']+)'", text)
    for data, name in zip(pictures, ("loss", "plans", "divergence"), strict=True):
        assert base64.b64decode(data) == (tmp_path / f"report_{name}.png").read_bytes()
    assert not re.search(r"(src|href)='?\"?(http|/|\w+\.)", text)
    for plan in two_plans():
        assert plan.hash in text
    assert "80.00% of the linears" in text


def test_stages_of_the_last_plan(tmp_path):
    assert "Pipeline stages" not in write_report(full_run(tmp_path)).read_text()
    stages = {"snip/stage_0/achieved": 0.5, "snip/stage_0/modelled_time": 0.2}
    stages |= {"snip/stage_1/achieved": 0.75, "snip/stage_1/modelled_time": 0.125}
    lines = [line(1, **stages), line(2, **{**stages, "snip/stage_0/achieved": 0.625}), line(3)]
    text = write_report(write_run(tmp_path / "staged", lines, two_plans())).read_text()
    assert "<tr><td>0</td><td>62.50%</td><td>0.2000</td></tr><tr><td>1</td><td>75.00%</td><td>0.1250</td></tr>" in text


def test_a_target_of_modelled_time_is_told_as_such(tmp_path):
    plan = dataclasses.replace(two_plans()[0], target_unit="modelled time")
    folder = write_run(tmp_path, [line(1)], (plan,))
    assert "100.00% of the linears' FLOPs (target 75.00% in modelled time)" in format_summary(folder)
    assert "<td>75.00% in modelled time</td>" in write_report(folder).read_text()


def colours(picture: Path) -> dict[str, float]:
    """Share of the picture's pixels in each format's colour."""
    pixels = np.rint(imread(picture)[..., :3] * 255).astype(int)
    wanted = {"fp8": (0x5B, 0x8F, 0xBF), "fp4": (0xE8, 0x89, 0x3C)}
    return {name: float((np.abs(pixels - colour).sum(-1) <= 6).mean()) for name, colour in wanted.items()}


def test_heatmap_shows_the_precisions(tmp_path):
    """Coloured areas follow the GEMMs' formats, per-GEMM plans included."""
    from megatron_snip.train.report_pictures import plans

    half = {name: FP8 if number < 7 else FP4 for number, name in enumerate(NAMES)}
    found = colours(plans(tmp_path / "half.png", [Plan(0, half)]))
    assert found["fp4"] / found["fp8"] == pytest.approx(2, rel=0.1)
    # The white lines between the cells take some of the outer bands, of which fp8 has one and fp4 the other.
    found = colours(plans(tmp_path / "mixed.png", [Plan(0, dict.fromkeys(NAMES, MIXED))]))
    assert 2 < found["fp4"] / found["fp8"] < 2.5


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


@pytest.mark.filterwarnings("error")
def test_many_plans_of_a_wide_model(tmp_path):
    names = [f"layers.{block}.mlp.{kind}_proj" for block in range(50) for kind in ("up", "down", "gate")]
    plans = tuple(Plan(10 * i, dict.fromkeys(names, FP4 if i % 2 else FP8)) for i in range(15))
    write_report(write_run(tmp_path, [line(1)], plans))
    assert imread(tmp_path / "report_plans.png").shape[0] < 4000


def test_damaged_files_are_named_not_fatal(tmp_path):
    folder = write_run(tmp_path, [line(1), "garbage\n", '{"no": "iteration"}\n', line(2)], two_plans())
    (folder / "plans" / "iter_0000003.json").write_text("{")
    notes = read_run(folder).notes
    assert "2 unreadable lines left out, the first is line 2" in notes[0] and "iter_0000003.json" in notes[1]
    assert summary(folder)["plans"] == 2 and summary(folder)["iterations"] == 2
    assert "iter_0000003.json" in write_report(folder).read_text()


@pytest.fixture
def drawn(monkeypatch):
    """Call it with a run folder: what its report draws of divergences, None for no picture."""

    def draw(folder: Path) -> dict[str, dict[str, float]] | None:
        seen = []
        with monkeypatch.context() as patch:
            picture = report_pictures.divergences
            patch.setattr(
                report_pictures, "divergences", lambda file, found: seen.append(found) or picture(file, found)
            )
            write_report(folder)
        return seen[0] if seen else None

    return draw


def test_divergences_are_those_of_the_last_statistics(tmp_path, drawn):
    """Of the costliest format; there is no picture without statistics, whatever metrics say."""
    folder = write_run(tmp_path, [line(1, **{f"snip/loss_divergence/{name}": 1.0 for name in NAMES})])
    assert drawn(folder) is None and "Divergences" not in write_report(folder).read_text()
    measured(7.0).save(folder / "stats/iter_0000002.json")
    measured().save(folder / "stats/iter_0000010.json")
    found = drawn(folder)
    assert found.keys() == {"loss_divergence", "weight_divergence"}
    assert list(found["loss_divergence"]) == NAMES
    assert list(found["loss_divergence"].values()) == pytest.approx([1e-4 * (i + 1) for i in range(len(NAMES))])
    assert list(found["weight_divergence"].values()) == pytest.approx([1 / len(NAMES)] * len(NAMES))
    assert "<h2>Divergences</h2>" in (folder / "report.html").read_text()


@pytest.mark.parametrize("text", ["{", '{"version": 3, "linears": {}}', "[]", ""])
def test_broken_statistics_are_a_note(text, tmp_path, drawn):
    """The ones before them are drawn, if there are any."""
    folder = write_run(tmp_path, [line(1)])
    (folder / "stats").mkdir()
    (folder / "stats/iter_0000009.json").write_text(text)
    assert drawn(folder) is None
    assert re.search(r"<p class='note'>[^<]*stats/iter_0000009.json: ", (folder / "report.html").read_text())
    measured().save(folder / "stats/iter_0000008.json")
    assert drawn(folder)["loss_divergence"][NAMES[0]] == pytest.approx(1e-4)
    assert "iter_0000009.json" in (folder / "report.html").read_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [NAMES[:1], NAMES])
def test_linears_whose_statistics_are_not_finite_stay_grey(bad, tmp_path, drawn):
    stats = measured()
    for name in bad:
        stats = changed(stats, name, "token/fp8", math.nan)
    stats.save(tmp_path / "stats/iter_0000001.json")
    found = drawn(write_run(tmp_path, [line(1)]))
    assert all(list(table) == [name for name in NAMES if name not in bad] for table in (found or {}).values())
    assert "validation loss" in (tmp_path / "report.html").read_text()


@pytest.mark.filterwarnings("error")
def test_statistics_without_formats_are_drawn_too(tmp_path, drawn):
    none = statistics(SHAPES, {}, [1.0] * len(NAMES), {})
    none.save(tmp_path / "stats/iter_0000001.json")
    assert set(drawn(write_run(tmp_path, [line(1)]))["loss_divergence"].values()) == {0.0}


def test_a_block_beyond_any_model_takes_no_room(tmp_path, drawn):
    far = Plan.uniform([*NAMES, "layers.1000000000.mlp.up_proj", "layers." + "9" * 5000 + ".mlp.up_proj"], "fp4")
    write_report(write_run(tmp_path / "run", [line(1)], (far,)))
    assert imread(tmp_path / "run/report_plans.png").size < 10**8


@pytest.mark.parametrize(
    "row", ['{"iteration": ' + "9" * 400 + "}", "[" * 10**5, '{"iteration": 2, "iteration": 3}', '{"iteration": true}']
)
def test_strange_rows_are_noted(row, tmp_path):
    run = read_run(write_run(tmp_path / "run", [line(1), row + "\n", line(3, **{"lm loss": 10**400})]))
    assert [r["iteration"] for r in run.metrics] == [1, 3] and "1 unreadable lines left out" in run.notes[0]
    assert "4.9000 -> 4.9000" in format_summary(run.path)


def test_names_are_escaped(tmp_path):
    plan = Plan(1, {"layers.0.a": FP4}, objective="<script>")
    folder = write_run(tmp_path / "<script>", [line(1), "garbage\n"], (plan,))
    assert read_run(folder).notes and "<script>" not in write_report(folder).read_text()


@pytest.mark.parametrize("name", ["", "n" * 300])
def test_a_folder_that_cannot_be_is_one_line(name, capsys):
    assert main([name]) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_command_line(tmp_path, capsys):
    assert main([str(full_run(tmp_path))]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert main([]) == main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    assert "neither metrics.jsonl" in capsys.readouterr().err


def test_reading_needs_no_matplotlib():
    code = "import sys, megatron_snip.train.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


@pytest.mark.filterwarnings("error")
def test_statistics_without_updates_show_the_loss_divergence(tmp_path, drawn):
    without_updates(measured()).save(tmp_path / "stats/iter_0000001.json")
    found = drawn(write_run(tmp_path, [line(1)]))
    assert list(found["loss_divergence"]) == NAMES and not found.get("weight_divergence")
