"""Checkpoints: whole or absent, read by name and shape, and every way in which one can be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.train import checkpoint
from megatron_snip.train.checkpoint import (
    STATE_FIELDS,
    folder_of,
    latest_iteration,
    load_tensors,
    read_state,
    save_checkpoint,
)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3, 4), value), "optim.a.exp_avg": torch.full((3, 4), -value)}


def save(folder: Path, iteration: int, value: float, mesh) -> None:
    state = dict.fromkeys(STATE_FIELDS, 0) | {"iteration": iteration, "value": value}
    save_checkpoint(folder, iteration, tensors(value), state, mesh)


def loaded(folder: Path) -> tuple[int | None, float, float]:
    """(iteration, value in its tensors, value in its state) of the newest checkpoint."""
    iteration = latest_iteration(folder)
    assert iteration is not None
    into = tensors(0.0)
    load_tensors(folder, iteration, into)
    value = float(into["model.a"][0, 0])
    assert (into["model.a"] == value).all() and (into["optim.a.exp_avg"] == -value).all()
    return iteration, value, read_state(folder, iteration)["value"]


def test_what_was_saved_is_loaded(lone_mesh, tmp_path):
    assert latest_iteration(tmp_path) is None and latest_iteration(tmp_path / "none") is None
    save(tmp_path, 3, 1.5, lone_mesh)
    save(tmp_path, 12, 2.5, lone_mesh)
    assert loaded(tmp_path) == (12, 2.5, 2.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000003", "iter_0000012", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert loaded(tmp_path) == (3, 1.5, 1.5), "an earlier one can be chosen by hand"


def test_an_iteration_is_saved_anew(lone_mesh, tmp_path):
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, 5, value, lone_mesh)
    assert loaded(tmp_path) == (5, 3.0, 3.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", "latest_checkpointed_iteration.txt"]


class Killed(Exception):
    """The end of the process at this point."""


def kill_at_call(monkeypatch, step: str, number: int, *, after: bool) -> None:
    """Make the module's number-th call of a function the last thing that happens: before it, or once it is done."""
    library, _, name = step.rpartition(".")
    real, calls = getattr(getattr(checkpoint, library) if library else checkpoint, name), []

    def deadly(*args, **kwargs):
        calls.append(name)
        if len(calls) == number and not after:
            raise Killed
        result = real(*args, **kwargs)
        if len(calls) == number and after:
            raise Killed
        return result

    if library:  # others use it too, so the module's view of it is changed, not the library
        monkeypatch.setattr(checkpoint, library, SimpleNamespace(**{name: deadly}))
    else:
        monkeypatch.setattr(checkpoint, name, deadly)


STEPS = [("dcp_save", 1), ("write_atomic", 1), ("os.rename", 1), ("write_atomic", 2)]
STEPS += [("shutil.rmtree", number) for number in (1, 2, 3)]
#: (step, its number, whether the iteration was there before, when a second rename puts the old one aside)
KILLS = [(*step, again) for step in STEPS for again in (False, True)] + [("os.rename", 2, True)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("step", "number", "again"), KILLS)
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(step, number, after, again, lone_mesh, tmp_path, monkeypatch):
    if again:  # a run that was killed after iteration 8, and went on from 4
        save(tmp_path, 8, 7.0, lone_mesh)
    save(tmp_path, 4, 1.0, lone_mesh)
    with monkeypatch.context() as patch:
        kill_at_call(patch, step, number, after=after)
        with pytest.raises(Killed):
            save(tmp_path, 8, 2.0, lone_mesh)
    assert loaded(tmp_path) in [(4, 1.0, 1.0), (8, 2.0, 2.0)]
    save(tmp_path, 8, 3.0, lone_mesh)
    assert loaded(tmp_path) == (8, 3.0, 3.0)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["iter_0000004", "iter_0000008", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("content", [b"", b"release", b"-3", b"4.0", "²".encode(), b"\xff\xfe"])
def test_a_damaged_tracker_is_named(content, tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(content)
    with pytest.raises(ValueError) as info:
        latest_iteration(tmp_path)
    assert str(info.value).startswith(f"{tracker}: ") and "write the number of an iter_ folder" in str(info.value)


def test_a_tracker_that_names_nothing_whole(lone_mesh, tmp_path):
    save(tmp_path, 5, 1.0, lone_mesh)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    with pytest.raises(ValueError, match=r"iter_0000006: no whole checkpoint, though .*txt names it; write an earlier"):
        latest_iteration(tmp_path)
    (tmp_path / "iter_0000006").mkdir()
    with pytest.raises(ValueError, match=r"iter_0000006: no whole checkpoint"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"3", "cannot be read"),
        (b"{}", "field run_id is missing"),
        (json.dumps(dict.fromkeys(STATE_FIELDS[:-1])).encode(), f"field {STATE_FIELDS[-1]} is missing"),
    ],
)
def test_damaged_state(text, said, lone_mesh, tmp_path):
    save(tmp_path, 5, 1.0, lone_mesh)
    path = tmp_path / "iter_0000005/state.json"
    path.write_bytes(text)
    with pytest.raises(ValueError) as info:
        read_state(tmp_path, 5)
    assert str(info.value).startswith(f"{path}: {said}") and "load an earlier iteration" in str(info.value)


def load_error(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    with pytest.raises(ValueError) as info:
        load_tensors(folder, 5, wanted)
    assert "\n" not in str(info.value) and str(folder_of(folder, 5)) in str(info.value)
    assert all(torch.equal(before[name], wanted[name]) for name in wanted), "nothing is read before the error"
    return str(info.value)


def test_a_checkpoint_of_another_model(lone_mesh, tmp_path):
    save(tmp_path, 5, 1.0, lone_mesh)
    wanted = tensors(0.0) | {"optim.a.exp_avg": torch.zeros(4, 3)}
    said = load_error(tmp_path, wanted)
    assert "optim.a.exp_avg has shape [3, 4], the model's is [4, 3]; match the model options" in said
    assert "holds no model.b; it is a checkpoint of another model" in load_error(
        tmp_path, tensors(0.0) | {"model.b": torch.zeros(1)}
    )


@pytest.mark.parametrize("content", [b"", b"no pickle"])
def test_damaged_metadata(content, lone_mesh, tmp_path):
    save(tmp_path, 5, 1.0, lone_mesh)
    (tmp_path / "iter_0000005/.metadata").write_bytes(content)
    assert "metadata cannot be read" in load_error(tmp_path, tensors(0.0))
    (tmp_path / "iter_0000005/.metadata").unlink()
    assert "metadata cannot be read" in load_error(tmp_path, tensors(0.0))


def test_damaged_tensors(lone_mesh, tmp_path):
    save(tmp_path, 5, 1.0, lone_mesh)
    (data,) = (tmp_path / "iter_0000005").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    assert "tensors cannot be read" in load_error(tmp_path, tensors(0.0))
    data.unlink()
    assert "tensors cannot be read" in load_error(tmp_path, tensors(0.0))


def losses(rows: list[dict]) -> list[float]:
    return [row["lm loss"] for row in rows]


def test_no_load_optim_takes_the_weights_and_leaves_the_moments(train_here, tmp_path):
    saves = str(tmp_path / "run/checkpoints")
    train_here(save_interval=2, train_iters=2)
    (tmp_path / "run").rename(tmp_path / "first")
    first = str(tmp_path / "first/checkpoints")
    whole = train_here(load=first, train_iters=5, save=saves)
    (tmp_path / "run").rename(tmp_path / "second")
    without = train_here(load=first, train_iters=5, save=saves, no_load_optim=True)
    assert [row["iteration"] for row in without] == [3, 4, 5]
    assert losses(without)[0] == losses(whole)[0], "the same weights, the same batch"
    assert losses(without)[1] != losses(whole)[1], "but another update"
    assert read_state(Path(saves), 5)["optimizer_steps"] == 3


def test_finetune_takes_the_weights_alone(train_here, tmp_path):
    train_here(train_iters=2)
    first = str(tmp_path / "run/checkpoints")
    anew = losses(train_here(run_dir=str(tmp_path / "anew"), train_iters=3))
    rows = train_here(load=first, finetune=True, run_dir=str(tmp_path / "fine"), train_iters=3)
    assert [row["iteration"] for row in rows] == [1, 2, 3] and rows[0]["consumed-samples"] == 2
    assert losses(rows)[0] < anew[0], "the first batch again, with trained weights"
    state = read_state(tmp_path / "fine/checkpoints", 3)
    assert state["optimizer_steps"] == 3 and state["run_id"] != read_state(Path(first), 2)["run_id"]


def test_a_resume_is_bit_for_bit_and_cuts_the_metrics(train_here, tmp_path):
    whole = train_here(train_iters=5, run_dir=str(tmp_path / "whole"))
    train_here(train_iters=4, save_interval=3)
    saves = tmp_path / "run/checkpoints"
    (saves / "latest_checkpointed_iteration.txt").write_text("3")  # as if killed before it saved iteration 4
    rows = train_here(train_iters=5, load=str(saves))
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    assert losses(rows) == losses(whole)
    assert [row["grad-norm"] for row in rows] == [row["grad-norm"] for row in whole]


def test_another_global_batch_size_is_refused(train_here, tmp_path):
    train_here(train_iters=2)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(
        ValueError,
        match="--global-batch-size is 4, the checkpoint in .* was trained with 2; give --global-batch-size 2, or start",
    ):
        train_here(train_iters=4, global_batch_size=4, load=str(tmp_path / "run/checkpoints"))
    assert sorted(p for p in tmp_path.rglob("*")) == before
