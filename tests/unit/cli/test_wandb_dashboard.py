"""megatron-snip dashboard: the workspace as it would be sent, and one line for what is wrong.

tests/unit/train/run/test_wandb.py checks that each metric is one that a run logs.
"""

from __future__ import annotations

import json
import sys
import types

import pytest

from megatron_snip.cli.wandb_dashboard import BAND, PANELS, main

WORDS = ["--project", "llama", "--entity", "team"]


def test_the_dry_run_prints_every_panel(capsys):
    pytest.importorskip("wandb_workspaces")
    assert main([*WORDS, "--name", "mine", "--dry-run"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["entity"], made["project"], made["name"]) == ("team", "llama", "mine")
    assert [section["name"] for section in made["sections"]] == list(PANELS)
    assert made["settings"]["x_axis"] == "iteration"
    panels = [panel for section in made["sections"] for panel in section["panels"]]
    shown = {name for panel in panels for name in panel.get("y", ())}
    shown |= {f"/{panel['metric_regex']}/" for panel in panels if "metric_regex" in panel}
    assert shown >= {name for each in PANELS.values() for _, names in each for name in names}
    assert all(panel["x"] == "iteration" for panel in panels if "y" in panel or "metric_regex" in panel)
    assert [panel["custom_expressions"] for panel in panels if "custom_expressions" in panel] == [BAND]
    assert [panel["media_keys"] for panel in panels if "media_keys" in panel] == [["snip/plan_heatmap"]]
    assert [panel["table_name"] for panel in panels if "table_name" in panel] == ["snip/plan"]


def test_the_target_is_drawn_with_what_has_its_unit():
    """The FP4 share has another one where BF16 is an option."""
    drawn = [set(names) for each in PANELS.values() for _, names in each]
    assert [names for names in drawn if "snip/target" in names] == [{"snip/saved", "snip/target"}]


def test_without_the_package_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main([*WORDS, "--dry-run"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: wandb-workspaces cannot be used") and "pip install wandb-workspaces" in said


def test_what_wandb_raises_is_one_line(monkeypatch, capsys):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")

    def save(self):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(workspaces.Workspace, "save", save)
    assert main(WORDS) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "--project llama of team: the workspace was not saved: no network" in said and "--dry-run" in said


def without_network(*arguments, **options):
    raise ConnectionError("no\nnetwork")


def test_the_dry_run_needs_no_entity_and_asks_nobody(monkeypatch, capsys):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr("wandb.Api", without_network)
    assert main(["--project", "llama", "--dry-run"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["entity"], made["project"]) == ("", "llama") and len(made["sections"]) == len(PANELS)


@pytest.mark.parametrize(("words", "entity"), [((), "me"), (("--entity", "team"), "team")])
def test_without_an_entity_it_is_wandb_s_default(words, entity, monkeypatch, capsys):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    saved = []
    monkeypatch.setattr("wandb.Api", lambda: types.SimpleNamespace(default_entity="me"))
    monkeypatch.setattr(workspaces.Workspace, "save", lambda self: saved.append((self.entity, self.project)))
    monkeypatch.setattr(workspaces.Workspace, "url", property(lambda self: f"https://wandb.ai/{self.entity}"))
    assert main(["--project", "llama", *words]) == 0
    assert saved == [(entity, "llama")] and capsys.readouterr().out == f"https://wandb.ai/{entity}\n"


@pytest.mark.parametrize(
    ("api", "why"),
    [(without_network, "no network"), (lambda: types.SimpleNamespace(default_entity=None), "this user has none")],
)
def test_without_any_entity_it_is_one_line(api, why, monkeypatch, capsys):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr("wandb.Api", api)
    assert main(["--project", "llama"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: wandb names no default entity: {why}; give --entity")
