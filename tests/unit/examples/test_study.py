"""The study of examples/study on a toy: pieces are made once, a lost one alone again, and tables tell them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.study import collect, quality, run
from examples.study.plans import FP4, FP8, key_of
from examples.study.setting import read_setting
from tests.dist.helpers.harness import run_ranks
from tests.unit.examples.study_runs import quality_of_arms, runs, shifted_losses

SETTINGS = sorted((Path(run.__file__).parent / "settings").glob("*.toml"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(folder, what ``runs`` told)."""
    folder = tmp_path_factory.mktemp("study")
    return folder, run_ranks(runs, 1, folder)[0]


def test_pieces_are_made_once_and_lost_ones_again(done):
    _, told = done
    first, second, third = told["made"]
    assert first > 30
    assert second == 0
    assert third == 2
    assert told["same"] == [True, True]


def test_tables_tell_what_was_measured(done):
    folder, _ = done
    text, figures = (folder / "a.md").read_text(), json.loads((folder / "a.json").read_text())
    assert all(arm in text for arm in (*quality.SUMS, *quality.OTHERS, quality.ORACLE))
    middle = figures["toy"]["checkpoints"]["middle"]
    rows = middle["increase"]["linear 0.75"]
    assert rows["dL"]["less dL"] == rows[quality.ORACLE]["less oracle"] == 0
    assert middle["regret"]["linear 0.75"][quality.ORACLE] == pytest.approx(0, abs=1e-12)
    assert sum(middle["composition"]["float32"]["sum"][t] for t in quality.SUMS["dL+own"]) == pytest.approx(1)
    further = middle["further"]
    assert further[middle["plans"]["uniform"]["bf16"]]["loss"]["count"] == 2
    assert further[middle["plans"]["uniform"]["all fp4"]]["loss"]["count"] == 1
    assert {path.name for path in folder.glob("*.png")} == {"study-switch.png", "study-after.png"}


def test_every_linear_can_be_shifted(tmp_path):
    (found,) = run_ranks(shifted_losses, 1, tmp_path)
    assert len(found) == 7
    for name, (before, inside, after) in found.items():
        assert before == after and inside != before, name


def test_terms_add_up_to_the_objective(tmp_path):
    found = run_ranks(quality_of_arms, 1, tmp_path)[0]
    for ours, theirs in found.values():
        assert np.allclose(ours, theirs, rtol=1e-6) and ours.any()
    assert not np.allclose(found["dL"][0], found["dL+own"][0])


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_settings_are_sound(path):
    setting = read_setting(path)
    m = setting.model
    head = m.get("kv_channels", m["hidden_size"] // m["num_attention_heads"])
    groups = m.get("num_query_groups", m["num_attention_heads"])
    sides = (m["hidden_size"], m["ffn_hidden_size"], m["num_attention_heads"] * head, groups * head)
    assert all(side % 128 == 0 for side in sides)
    assert all(0 <= block < m["num_layers"] and place in (0, 1, 2) for block, place in setting.planted)


def test_setting_with_an_unknown_name_is_refused(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\nplants = []\n[model]\n')
    with pytest.raises(ValueError, match="unknown plants"):
        read_setting(path)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read the setting"), ("name =", "no TOML"), ("plants = []", "unknown plants")]
)
def test_a_setting_that_is_none_ends_with_one_line(tmp_path, capsys, content, said):
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as left:
        run.main([str(path), "--output", str(tmp_path / "study")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and f"error: {path}: " in last and said in last
    assert not (tmp_path / "study").exists()


def test_keys_tell_plans_apart():
    a, b = ({"x": FP8, "y": FP4}, {"x": FP4, "y": FP8})
    assert key_of(a) == key_of(dict(reversed(a.items()))) != key_of(b)
    mixed = {"x": FP8, "y": type(FP4)("fp4", "fp8", "fp8")}
    assert key_of(a) != key_of(mixed)
    assert key_of(a, fprop=True) == key_of(mixed, fprop=True)


def test_interval_of_three_values():
    found = collect.interval([1.0, 2.0, 3.0])
    assert found == {"mean": 2.0, "half": pytest.approx(4.303 / 3**0.5), "count": 3}
    assert collect.interval([1.0])["half"] is None
