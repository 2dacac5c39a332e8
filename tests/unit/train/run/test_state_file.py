"""state.json and config.json from a stranger: a field of another type, range or size ends in a line that names it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.files.json import JsonFileError
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.train.run.run_folder import find_start, run_id_of, with_saved_options
from megatron_snip.train.run.state_file import new_state, read_run_file, state_of
from tests.unit.train.run.test_run_folder import checkpoint, options

RUN = "0123456789abcdef"
PLAN = Plan.uniform(["a", "b"], LinearPrecision.parse("fp4"), iteration=4)
REQUEST = SolveRequest(np.array([[0.0, 1.0], [0.0, 2.0]]), np.array([[0.0, 0.5], [0.0, 0.5]]), 0.5)
STEP = {"kind": "plan", "iteration": 3, "why": "broken", "checkpoint": None}
GUARD = {
    "broke": None, "in_a_row": 0, "level": 0, "plan": PLAN.hash, "blamed": [PLAN.hash], "saved": [1, 2],
    "rewound_to": -1, "steps": [STEP], "due": STEP,
}  # fmt: skip
SNIP = {
    "unwritten": {"plans/iter_0000004.json": "{}", "stats/iter_12345678.json": "{}"},
    "plan": PLAN.to_dict(),
    "pending": {
        "probed": 5, "due": 6, "options": ["fp8", "fp4"], "objective": "snip", "request": REQUEST.to_dict(),
        "measure": "fp4", "max_loss": None,
    },
    "history": [
        {"iteration": 4, "hash": PLAN.hash, "achieved": 1.0, "changed": {"a": "fp4"}},
        {"iteration": 5, "hash": PLAN.hash, "achieved": 1.0, "changed": {}, "guard": "base"},
    ],
    "predictions": {"loss": {"a": {"fp4": 0.1}}, "weight": {}},
}  # fmt: skip
CORPUS = {
    "prefix": "/data/a", "weight": 1.0, "lengths": "0a", "size": 10, "content": "0b", "rounds": [2],
    "sequences": [0, 9],
}  # fmt: skip
STATE = {
    "version": 3, **new_state(RUN, Config()), "iteration": 5, "weights_alone": False, "guard": GUARD, "snip": SNIP,
    "plan_hash": PLAN.hash, "data": {"train": [CORPUS]}, "unwritten_rows": ['{"iteration": 5, "lm loss": null}\n'],
}  # fmt: skip


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The state with one field, ``a/b/0/c``, of another value; DELETE leaves it out."""
    state = json.loads(json.dumps(STATE))
    *steps, last = [int(step) if step.isdigit() else step for step in re.split(r"(?<!\\)\|", path)]
    place: Any = state
    for step in steps:
        place = place[step]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return state


DELETE = object()
FORGED: list[tuple[str, Any, str]] = [
    ("run_id", "x/../../../../home/precious", "field run_id is 'x/../../../../home/precious'"),
    ("run_id", RUN.upper(), "field run_id is"),
    ("run_id", 5, "field run_id is 5: expected str"),
    ("iteration", 5.0, "field iteration is 5.0: expected int"),
    ("iteration", -1, "field iteration is -1"),
    ("consumed_samples", 1 << 62, "field consumed_samples is 4611686018427387904"),
    ("optimizer_steps", None, "field optimizer_steps is None: expected int"),
    ("optimizer_steps", DELETE, "field optimizer_steps is missing"),
    ("nan_iterations", True, "field nan_iterations is True"),
    ("more", 1, "field more is unknown"),
    ("weights_alone", 0, "field weights_alone is 0: expected bool"),
    ("divergence", [], "field divergence is []: expected object"),
    ("divergence|squares", -1.0, "field divergence.squares is -1.0"),
    ("divergence|plan", "x", "field divergence.plan is 'x'"),
    ("watch|losses", [1.0, "2"], "field watch.losses[1] is '2'"),
    ("watch|losses", [float("nan")], "field watch.losses[0] is nan"),
    ("watch|losses", [1e308], "field watch.losses[0] is 1e+308"),  # whose square a resume would have taken
    ("rerun|differed", -1, "field rerun.differed is -1"),
    ("guard|level", 3, "field guard.level is 3"),
    ("guard|saved", ["../x"], "field guard.saved[0] is '../x'"),
    ("guard|blamed", ["x"], "field guard.blamed[0] is 'x'"),
    ("guard|due|kind", "none of these", "field guard.due.kind is 'none of these'"),
    ("guard|steps", 5, "field guard.steps is 5"),
    ("guard|folders", [], "field guard.folders is unknown"),
    ("config", [], "field config is []: expected object"),
    ("config|model", DELETE, "field config.model is missing"),
    ("config|model", [], "field config.model is []"),
    ("config|model|num_layers", "3", "field config.model.num_layers is '3': expected int"),
    ("config|model|num_layers", 10**30, "field config.model.num_layers is 1000"),
    ("config|training|lr", float("nan"), "field config.training.lr is nan"),
    ("config|training|bf16", 1, "field config.training.bf16 is 1: expected bool"),
    ("config|training|lr_decay_style", "steep", "field config.training.lr_decay_style is 'steep'"),
    ("config|training|lr_decay_style", "a" * 10**6, "aaa': no known value"),
    ("config|data|data_path", "a", "field config.data.data_path is 'a': expected array"),
    ("config|data|tokenizer_model", "a\0b", "field config.data.tokenizer_model is 'a\\x00b'"),
    ("config|data|tokenizer_model", "a" * 5000, "field config.data.tokenizer_model is 'aaa"),
    ("snip", 5, "field snip is 5"),
    ("snip|history", 5, "field snip.history is 5: expected array"),
    ("snip|history|0|iteration", 4.0, "field snip.history[0].iteration is 4.0"),
    ("snip|history|0|changed", DELETE, "field snip.history[0].changed is missing"),
    ("snip|history|0|changed", {"a": "fp5"}, "field snip.history[0].changed['a']: fprop: unknown format 'fp5'"),
    ("snip|history|0|achieved", 7, "field snip.history[0].achieved is 7"),
    ("snip|plan", [], "field snip.plan is []"),
    ("snip|plan|hash", "0" * 16, "field snip.plan: "),
    ("snip|plan|iteration", None, "field snip.plan: "),
    ("snip|predictions|loss", {"a": 5}, "field snip.predictions.loss"),
    ("snip|unwritten", {"/etc/profile": "x"}, "field snip.unwritten has a name that it cannot have: expected str mat"),
    ("snip|unwritten", {"plans/../../iter_0000001.json": "x"}, "field snip.unwritten"),
    ("snip|unwritten", {"plans/iter_0000001.json\n": "x"}, "field snip.unwritten"),
    ("snip|unwritten", {"plans/iter_0000001.json": 5}, "field snip.unwritten"),
    ("snip|unwritten", {f"plans/iter_{i:07d}.json": "" for i in range(200)}, "field snip.unwritten is"),
    ("snip|pending|measure", "joules", "field snip.pending.measure is 'joules'"),
    ("snip|pending|due", "6", "field snip.pending.due is '6'"),
    ("snip|pending|options", ["fp8"], "field snip.pending.options: there are 1, but the request has 2"),
    ("snip|pending|options", ["fp8", "fp5"], "field snip.pending.options: fprop: unknown format 'fp5'"),
    ("snip|pending|request|quality_loss", 5, "field snip.pending.request: field quality_loss is 5"),
    ("snip|pending|request|quality_loss", [], "field snip.pending.request: field quality_loss is []"),
    ("snip|pending|request|quality_loss", [[0.0], [1.0, 2.0]], "field snip.pending.request: field quality_loss is not"),
    (
        "snip|pending|request|efficiency",
        [[0.0, 1.0]],
        "field snip.pending.request: field efficiency is not",
    ),
    ("snip|pending|request|stage", [0], "field snip.pending.request: field stage is not 2"),
    ("snip|pending|request|churn", [[0.0]], "field snip.pending.request: field churn is not 2 x 2"),
    ("snip|pending|request|time_limit", 1e9, "field snip.pending.request: field time_limit is 1000000000.0"),
    ("snip|pending|request|node_limit", 1.5, "field snip.pending.request: field node_limit is 1.5"),
    ("snip|pending|request|target", float("inf"), "field snip.pending.request: field target is inf"),
    ("plan_hash", "../x", "field plan_hash is '../x'"),
    ("data", {"test": []}, "field data has a name that it cannot have: no known value"),
    ("data|train|0|prefix", None, "field data[...][0].prefix: expected str"),
    ("data|train|0|sequences", [1], "field data[...][0].sequences"),
    ("unwritten_rows", "x", "field unwritten_rows is 'x'"),
    ("unwritten_rows", ["x\n"], "field unwritten_rows[0] is 'x\\n', but must be a line of metrics"),
    ("unwritten_rows", ['{"iteration": 1}\n{}\n'], "field unwritten_rows[0] is"),
    ("unwritten_rows", ['{"iteration": 1.5}\n'], "field unwritten_rows[0] is"),
]


def test_takes_what_runs_write():
    assert state_of(copy.deepcopy(STATE)) == STATE
    assert state_of({"version": 3, **new_state(RUN, Config())})["weights_alone"] is True


@pytest.mark.parametrize(
    ("path", "value", "said"), FORGED, ids=[f"{p} {'left out' if v is DELETE else repr(v):.30}" for p, v, _ in FORGED]
)
def test_each_field_is_checked(path, value, said):
    with pytest.raises(JsonFileError, match=re.escape(said)) as caught:
        state_of(with_value(path, value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def test_every_field_of_the_state_is_needed():
    for name in STATE.keys() - {"version", "memory_plan"}:  # checkpoints from before memory plans have none
        with pytest.raises(JsonFileError, match=f"^field {name} is missing"):
            state_of(with_value(name, DELETE))


def test_an_option_that_the_version_did_not_have_is_at_its_default():
    state = with_value("config|model|model_name", DELETE)
    state["config"]["model"]["of a later version"] = 5
    assert state_of(state) == STATE


def test_every_linear_may_have_been_fixed_by_name():
    fixes = ",".join(f"layers.{block}.self_attn.q_proj=fp8" for block in range(200))
    config = Config().replace(snip_fix=fixes)
    assert state_of({"version": 4, **new_state(RUN, config)})["config"] == config.to_dict()


@pytest.mark.parametrize(
    "forged",
    [
        {"run_id": "x/../../../../home/precious"},
        {"snip": {**SNIP, "unwritten": {"/tmp/profile": "evil"}}},
        {"optimizer_steps": None},
        {"config": []},
    ],
    ids=lambda forged: next(iter(forged)),
)
def test_a_run_takes_nothing_of_a_forged_checkpoint(forged, tmp_path: Path):
    """Whether it goes on from it or takes its weights alone."""
    saves = tmp_path / "run/checkpoints"
    checkpoint(saves, 7, RUN, state=forged)
    name = next(iter(forged))
    for more in ({}, {"finetune": True}):
        config = options(tmp_path / "new", load=str(saves), **more)
        with pytest.raises(ValueError, match=rf"state\.json: field {name}.*; load another iteration \(--ckpt-step\)$"):
            find_start(config)


def test_a_checkpoint_names_no_folder_for_a_tool_to_write_to(tmp_path: Path):
    named = Config().replace(data_cache_path="yours", data_path=("a",), num_layers=3)
    checkpoint(tmp_path, 7, RUN, config=named.to_dict())
    config, _ = with_saved_options(["--load", str(tmp_path)], ("model", "data"))
    assert config.data.data_cache_path is None and config.data.data_path == ("a",) and config.model.num_layers == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run_id": "../x"}, "field run_id is '../x'"),
        ({"model": []}, "field model is []"),
        ({"checkpoint": {"save": 5}}, "field checkpoint.save is 5"),
        ({"versions": {"torch": []}}, "field versions[...]: expected"),
    ],
)
def test_the_run_folders_options_are_checked(change, said, tmp_path: Path):
    values = {"run_id": RUN, **Config().to_dict(), "versions": {"torch": "2", "processes": 1}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert read_run_file(path, "x") == (RUN, Config(), values["versions"]) and run_id_of(tmp_path) == RUN
    path.write_text(json.dumps({**values, **change}))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}")) as caught:
        run_id_of(tmp_path)
    assert str(caught.value).endswith("; move the folder aside")
