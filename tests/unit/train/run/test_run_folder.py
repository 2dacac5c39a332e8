"""Where a run starts, and that no folder ever holds two."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from megatron_snip.checkpoint import lock
from megatron_snip.checkpoint.manifest import VERSION, Damaged, Manifest
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.config import Config
from megatron_snip.train.run import run_folder
from megatron_snip.train.run.metrics import read_metrics
from megatron_snip.train.run.run_folder import (
    Start,
    earlier_start,
    find_start,
    open_run_folder,
    run_id_of,
)
from megatron_snip.train.run.state_file import new_state, read_state

ABC, DEF, GHI = "abc0" * 4, "def0" * 4, "1230" * 4  # runs


def options(folder: Path, **more) -> Config:
    return Config().replace(run_dir=str(folder), **more)


def checkpoint(save: Path, iteration: int, run_id: str, state: Mapping = MappingProxyType({}), **more) -> None:
    """What find_start looks at of a checkpoint; state: fields that its state.json has in place of its own."""
    folder = save / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    trained = {"version": VERSION, "iteration": iteration, "weights_alone": False, **more, **state}
    text = json.dumps(new_state(run_id, Config()) | trained)
    (folder / "state.json").write_text(text)
    small = {"state.json": (len(text), zlib.crc32(text.encode()))}
    (folder / "manifest.json").write_text(Manifest(iteration, run_id, {}, small, {}).to_text())
    (save / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")


def used(folder: Path, run_id: str, iteration: int | None = None) -> Path:
    """A run folder after some training, with a checkpoint if an iteration is given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"run_id": run_id, **options(folder).to_dict(), "versions": {}}))
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')
    if iteration is not None:
        checkpoint(folder / "checkpoints", iteration, run_id)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(config: Config, folder: Path) -> str:
    before = contents(folder)
    with pytest.raises(ValueError) as info:
        find_start(config)
    assert "\n" not in str(info.value) and contents(folder) == before
    return str(info.value)


def test_a_new_run_starts_at_0_with_an_id_of_its_own(tmp_path):
    config = options(tmp_path / "new")
    start, other = find_start(config), find_start(config)
    assert (start.iteration, start.state, start.load) == (0, None, None)
    assert len(start.run_id) == 16 and start.run_id != other.run_id
    assert not (tmp_path / "new").exists(), "looking writes nothing"


def test_load_of_an_empty_folder_starts_anew(tmp_path):
    run, saves = tmp_path / "run", tmp_path / "run/checkpoints"
    assert find_start(options(run, load=str(saves))).iteration == 0
    saves.mkdir(parents=True)
    assert find_start(options(run, load=str(saves))).iteration == 0
    said = refused(options(run, load=str(saves), exit_on_missing_checkpoint=True), tmp_path)
    assert said.startswith(f"--load {saves}: no checkpoint is there; drop --exit-on-missing-checkpoint")


def hf_folder(folder: Path) -> Path:
    """What a Hugging Face folder is known by."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_run_folder_in_place_of_its_checkpoints(tmp_path):
    used(tmp_path / "old", ABC, 20)
    said = f"{tmp_path}/old holds no checkpoint itself, but {tmp_path}/old/checkpoints does; give that folder"
    for option in ("load", "pretrained_checkpoint"):
        assert refused(options(tmp_path / "new", **{option: str(tmp_path / "old")}), tmp_path) == said


def test_a_pretrained_checkpoint_counts_until_the_run_has_its_own(tmp_path, monkeypatch):
    """So one command line starts the run and continues it."""
    run, saves, other = tmp_path / "run", tmp_path / "run/checkpoints", used(tmp_path / "other", ABC, 7)
    config = options(run, load=str(saves), pretrained_checkpoint=str(other / "checkpoints"))
    start = find_start(config)
    assert (start.iteration, start.state, start.load, start.load_iteration) == (0, None, other / "checkpoints", 7)
    assert start.run_id != ABC, "a run of its own"
    checkpoint(saves, 3, DEF)
    assert find_start(config).load == saves and find_start(config).iteration == 3
    nowhere = options(tmp_path / "new", pretrained_checkpoint=str(tmp_path / "none"))
    assert refused(nowhere, tmp_path).startswith(f"--pretrained-checkpoint {tmp_path}/none: no checkpoint is there")
    monkeypatch.setattr(run_folder, "check_model", lambda folder, model: None)  # which tests/dist/test_convert.py has
    begun = tmp_path / "begun"  # and was killed before its first checkpoint
    used(begun, GHI)
    for weights in (other / "checkpoints", hf_folder(tmp_path / "hf")):
        again = options(begun, pretrained_checkpoint=str(weights))
        assert "already holds a run" in refused(again, tmp_path), "without --load it is a new run"
        with_load = again.replace(load=str(begun / "checkpoints"))
        assert find_start(with_load).load == weights
    both = options(tmp_path / "new", load=str(weights), pretrained_checkpoint=str(other / "checkpoints"))
    assert refused(both, tmp_path).endswith(f"and --pretrained-checkpoint is {other}/checkpoints; drop one")
    wide = options(tmp_path / "new", pretrained_checkpoint=str(other / "checkpoints"), hidden_size=256)
    assert f"--hidden-size is 256, but the checkpoint in {other}/checkpoints was" in refused(wide, tmp_path)
    assert find_start(options(tmp_path / "new", pretrained_checkpoint=str(other / "checkpoints"))).load_iteration == 7


def test_a_pretrained_checkpoint_that_turns_out_damaged(tmp_path):
    """Each try goes further back, so that it ends."""
    others, saves = tmp_path / "other", tmp_path / "run/checkpoints"
    for iteration in (7, 9):
        checkpoint(others, iteration, ABC)
    config = options(tmp_path / "run", load=str(saves), pretrained_checkpoint=str(others))
    damaged = Damaged("its CRC-32 differs")
    older = earlier_start(config, find_start(config), damaged)
    assert (older.load, older.load_iteration, older.state) == (others, 7, None)
    with pytest.raises(ValueError, match=f"{others} holds no other checkpoint that can be continued"):
        earlier_start(config, older, damaged)
    one = config.replace(pretrained_checkpoint=str(others / "iter_0000009"))
    with pytest.raises(ValueError, match="iter_0000009: its CRC-32 differs; load another iteration"):
        earlier_start(one, find_start(one), damaged)
    for iteration in (3, 5):
        checkpoint(saves, iteration, DEF)
    assert earlier_start(one, find_start(one), damaged).load_iteration == 3, "the run's own, which --load does not name"


def test_load_continues(tmp_path):
    run = used(tmp_path / "run", ABC, 7)
    start = find_start(options(run, load=str(run / "checkpoints")))
    assert (start.iteration, start.load, start.load_iteration, start.run_id) == (7, run / "checkpoints", 7, ABC)
    assert start.state is not None and start.state["iteration"] == 7
    elsewhere = find_start(options(tmp_path / "other", load=str(run / "checkpoints")))
    assert elsewhere.run_id == ABC, "the same run, in a new folder"


def test_a_used_folder_is_refused(tmp_path):
    run = used(tmp_path / "run", ABC, 7)
    saves = run / "checkpoints"
    said = refused(options(run), tmp_path)
    assert said == (
        f"{saves} already holds checkpoints up to iteration 7; --load {saves} continues them, "
        "or give another --run-dir and --save"
    )
    assert f"{saves} already holds checkpoints" in refused(options(tmp_path / "new", save=str(saves)), tmp_path)
    assert "already holds checkpoints" in refused(options(run, load=str(saves), finetune=True), tmp_path)


def test_metrics_without_a_checkpoint_are_a_run_too(tmp_path):
    run = used(tmp_path / "run", ABC)
    said = refused(options(run), tmp_path)
    assert said.startswith(f"--run-dir {run} already holds a run; --load {run}/checkpoints continues it")
    other = used(tmp_path / "other", DEF, 5)
    fine = options(run, load=str(other / "checkpoints"), finetune=True)
    weights = f"{run}/checkpoints --pretrained-checkpoint {other}/checkpoints/iter_0000005 without --finetune begins it"
    assert weights in refused(fine.replace(ckpt_step=5), tmp_path), "--load alone would begin with new weights"
    again = options(run, load=str(run / "checkpoints"), pretrained_checkpoint=fine.checkpoint.load)
    assert find_start(again).load == other / "checkpoints", "what it says is so"


def test_two_runs_are_not_mixed(tmp_path):
    one, two = used(tmp_path / "one", ABC, 7), used(tmp_path / "two", DEF, 5)
    said = refused(options(two, load=str(one / "checkpoints")), tmp_path)
    assert f"--run-dir {two} holds run {DEF}, but {one}/checkpoints belongs to run {ABC}" in said
    assert "--finetune to start a new run from these weights" in said
    there = options(tmp_path / "new", load=str(one / "checkpoints"), save=str(two / "checkpoints"))
    said = refused(there, tmp_path)
    assert said == (
        f"--save {two}/checkpoints holds checkpoints of run {DEF}, but {one}/checkpoints belongs to run {ABC}; "
        "give another --save"
    )
    shutil.rmtree(two)
    checkpoint(two / "checkpoints", 3, ABC)
    assert find_start(there).iteration == 7, "older checkpoints of this very run"
    checkpoint(two / "checkpoints", 9, ABC)
    said = (
        f"--save {two}/checkpoints holds iteration 9 of this run, and --load {one}/checkpoints would go back to itera"
    )
    assert refused(there, tmp_path).startswith(said), "as the command of a requeued job would each time"


def test_finetune_takes_weights_into_a_new_run(tmp_path):
    one = used(tmp_path / "one", ABC, 7)
    start = find_start(options(tmp_path / "new", load=str(one / "checkpoints"), finetune=True))
    assert (start.iteration, start.state, start.load_iteration) == (0, None, 7)
    assert start.load == one / "checkpoints" and start.run_id != ABC
    said = refused(options(one, load=str(one / "checkpoints"), finetune=True), tmp_path)
    assert f"; --load {one / 'checkpoints'} without --finetune continues them, or give another --run-dir" in said
    shutil.rmtree(one / "checkpoints")
    checkpoint(tmp_path / "weights", 7, ABC)
    said = refused(options(one, load=str(tmp_path / "weights"), finetune=True), tmp_path)
    way_out = f"--load {one}/checkpoints --pretrained-checkpoint {tmp_path}/weights without --finetune begins it again"
    assert f"; {way_out}, or give another --run-dir" in said


def test_weights_alone_need_a_checkpoint(tmp_path):
    for option in ("finetune", "no_load_optim"):
        for load in (None, str(tmp_path / "none")):
            said = refused(options(tmp_path / "new", load=load, **{option: True}), tmp_path)
            assert said.startswith(f"--{option.replace('_', '-')} needs a checkpoint, but --load is {load}")


@pytest.mark.parametrize(
    ("name", "value", "finetune_too"),
    [
        ("model_name", "qwen3", True),
        ("num_layers", 2, True),
        ("num_attention_heads", 8, True),
        ("untie_embeddings_and_output_weights", True, True),
        ("norm_epsilon", 1e-6, True),
        ("rotary_base", 5e5, False),
        ("seq_length", 256, False),
        ("seed", 7, False),
        ("global_batch_size", 4, False),
        ("split", "1,1,1", False),
    ],
)
def test_a_checkpoint_of_another_model_or_order_is_refused(name, value, finetune_too, tmp_path):
    """Many of these have the same shapes and would go on silently as another function."""
    load = str(used(tmp_path / "run", ABC, 7) / "checkpoints")
    old = next(group[name] for group in Config().to_dict().values() if name in group)
    said = refused(options(tmp_path / "new", load=load, **{name: value}), tmp_path)
    option = f"--{name.replace('_', '-')}"
    assert said.startswith(f"{option} is {value}, but the checkpoint in {load} was trained with {old}; give {option} ")
    tuned = options(tmp_path / "new", load=load, finetune=True, **{name: value})
    if finetune_too:
        assert "was trained with" in refused(tuned, tmp_path)
    else:
        assert find_start(tuned).load_iteration == 7


def test_a_ramp_stays_what_it_was(tmp_path):
    """Iterations are counted by it: without it a run would end before it has read its samples."""
    load = str(used(tmp_path / "run", ABC) / "checkpoints")
    grown = {"train_samples": 44, "global_batch_size": 8, "load": load}
    ramp = {"rampup_batch_size": (2, 2, 12)}
    was = Config().replace(**grown, **ramp).to_dict()
    checkpoint(Path(load), 7, ABC, config=was)
    said = refused(options(tmp_path / "run", **grown), tmp_path)
    assert said.startswith(f"--rampup-batch-size is not given, but the checkpoint in {load} was trained with 2 2 12;")
    assert find_start(options(tmp_path / "run", **grown, **ramp)).iteration == 7
    was["training"]["rampup_batch_size"] = []
    checkpoint(Path(load), 8, ABC, config=was)
    said = refused(options(tmp_path / "run", **grown, **ramp), tmp_path)
    assert "--rampup-batch-size is 2 2 12, but the" in said and "without it; leave --rampup-batch-size out, or" in said


def test_a_mistyped_load_does_not_take_another_runs_folder(tmp_path):
    run = used(tmp_path / "run", ABC)
    there = options(run, load=str(tmp_path / "mistyped"), save=str(tmp_path / "elsewhere"))
    assert refused(there, tmp_path) == (
        f"--load {tmp_path}/mistyped: no checkpoint is there; correct the path, or drop --load to start a new run "
        "(--load and --save of the same folder start one too)"
    )
    there = options(run, load=str(tmp_path / "elsewhere"), save=str(tmp_path / "elsewhere"))
    said = refused(there, tmp_path)
    assert said.startswith(f"--run-dir {run} holds a run that saves to {run}/checkpoints, not to {tmp_path}/elsewhere")


def test_a_lost_tracker_starts_nothing_anew(tmp_path):
    run = used(tmp_path / "run", ABC, 7)
    checkpoint(run / "checkpoints", 6, ABC)
    (run / "checkpoints/latest_checkpointed_iteration.txt").unlink()
    said = refused(options(run, load=str(run / "checkpoints")), tmp_path)
    assert "checkpoints up to iteration 7 but no latest_checkpointed_iteration.txt; write the iteration" in said
    assert "already holds checkpoints up to iteration 7" in refused(options(run), tmp_path)
    assert find_start(options(run, load=str(run / "checkpoints/iter_0000007"))).iteration == 7


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert refused(options(file), tmp_path) == f"--run-dir {file} is not a folder; give another"
    for option, more in (("save", {}), ("tensorboard_dir", {}), ("wandb_save_dir", {"wandb_project": "p"})):
        said = refused(options(tmp_path / "run", **{option: str(file)}, **more), tmp_path)
        assert said == f"--{option.replace('_', '-')} {file} is not a folder; give another"
    find_start(options(tmp_path / "run", wandb_save_dir=str(file)))  # nobody uses it


@pytest.mark.parametrize("text", [b"{", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000, b'{"run_id": "abc0abc0abc0abc0"}'])
def test_a_damaged_config_is_named(text, tmp_path):
    run = used(tmp_path / "run", ABC, 7)
    (run / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"config.json: .*; move the folder aside"):
        run_id_of(run)
    assert run_id_of(tmp_path) is None


def test_opening_puts_aside_what_was_made_after_the_checkpoint(tmp_path):
    run = used(tmp_path / "run", ABC, 7)
    for kind in ("plans", "stats"):
        (run / kind).mkdir()
        for name in ("iter_0000003.json", "iter_0000007.json", "iter_0000008.json", "iter_0000123.json", "notes.json"):
            (run / kind / name).write_text("{}")
    (run / "evaluations").mkdir()
    for name in ("iter_0000007.json", "iter_0000008.json"):
        (run / "evaluations" / name).write_text("{}")
    followed = run / "plans/iter_0000123.json"
    config = options(run, train_iters=9, precision="plan", precision_plan=os.path.relpath(followed))
    open_run_folder(config, Start(7, {}, run / "checkpoints", 7, ABC))
    kept, aside = sorted(p.name for p in (run / "evaluations").iterdir())
    assert kept == "iter_0000007.json" and aside.startswith("iter_0000008.json.before-"), "scores of other weights"
    for kind in ("plans", "stats"):
        names = ["iter_0000003.json", "iter_0000007.json", *[followed.name] * (kind == "plans"), "notes.json"]
        assert sorted(p.name for p in (run / kind).iterdir()) == names
    written = json.loads((run / "config.json").read_text())
    made = written.pop("versions")
    assert written == {"run_id": ABC, **config.to_dict()}
    assert made["torch"] == torch.__version__ and made["device"].startswith("CPU") and made["processes"] == 1
    assert (run / "metrics.jsonl").is_file() and len(list(run.glob("metrics.*"))) == 1


def test_a_run_killed_before_its_first_checkpoint_keeps_its_metrics_aside(tmp_path):
    run = used(tmp_path / "run", ABC)
    for kind in ("plans", "evaluations"):
        (run / kind).mkdir()
        (run / kind / "iter_0000001.json").write_text("{}")
    (run / "metrics").mkdir()
    (run / "metrics/rank_0001.jsonl").write_text('{"iteration": 1}\n')
    for run_id in (DEF, GHI):  # twice within one second
        open_run_folder(options(run), Start(0, None, None, 0, run_id))
        (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert len(list(run.glob("before-*/metrics.jsonl"))) == 2 and not list((run / "plans").iterdir())
    for kind in ("plans", "evaluations"):
        assert len(list(run.glob(f"before-*/{kind}/iter_0000001.json"))) == 1, "nothing is deleted"
    assert len(list(run.glob("before-*/metrics/rank_0001.jsonl"))) == 1 and not (run / "metrics").exists()
    assert run_id_of(run) == GHI


def test_a_run_killed_before_its_first_checkpoint_starts_anew(train_here, tmp_path, monkeypatch):
    run, saves = tmp_path / "run", str(tmp_path / "run/checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", lambda *args, **how: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_here(train_iters=3, load=saves)
    first = read_metrics(run / "metrics.jsonl")
    with pytest.raises(ValueError, match="already holds a run"):
        train_here(train_iters=3)
    again = train_here(train_iters=3, load=saves)
    (aside,) = run.glob("before-*/metrics.jsonl")
    assert read_metrics(aside) == first and [row["lm loss"] for row in again] == [row["lm loss"] for row in first]
    assert read_state(Path(saves), 3)["run_id"] == run_id_of(run)


def test_a_run_folder_that_another_process_trains_in_is_refused(train_here, tmp_path):
    """With another --save the lock there does not tell, and both would write metrics.jsonl."""
    run, saves = tmp_path / "run", tmp_path / "run/checkpoints"
    train_here(train_iters=2)
    theirs = lock.FolderLock(saves, "a")
    alive = {"pid": os.getppid(), "born": lock._born(os.getppid())}
    (saves / lock.LOCK).write_text(json.dumps({**json.loads((saves / lock.LOCK).read_text()), **alive}))
    before = contents(run)
    with pytest.raises(ValueError, match=rf"--run-dir {run} belongs to run a, process {alive['pid']} on .*, which is"):
        train_here(train_iters=3, load=str(saves), save=str(tmp_path / "other"))
    assert contents(run) == before
    theirs.release()
    assert len(train_here(train_iters=3, load=str(saves), save=str(tmp_path / "other"))) == 3
