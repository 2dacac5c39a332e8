"""What a run takes from a checkpoint, and where it begins when the newest is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path, PosixPath
from types import SimpleNamespace

import pytest

from megatron_snip.cli.convert_checkpoint import export_hf
from megatron_snip.train import run_state, setup
from megatron_snip.train.run.state_file import read_state
from megatron_snip.train.run_state import go_back
from tests.unit.checkpoint.conftest import poison


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


def test_nothing_is_drawn_where_weights_are_loaded(train_here, tmp_path, monkeypatch):
    def draw(*_):
        raise AssertionError("drew weights")

    train_here(train_iters=2)
    for module in (run_state, setup):
        monkeypatch.setattr(module, "draw_weights", draw)
    saves = str(tmp_path / "run/checkpoints")
    assert len(train_here(train_iters=3, load=saves)) == 3
    assert len(train_here(train_iters=3, load=saves, finetune=True, run_dir=str(tmp_path / "fine"))) == 3
    with pytest.raises(AssertionError, match="drew weights"):
        train_here(train_iters=3, run_dir=str(tmp_path / "anew"))


def test_another_global_batch_size_is_refused(train_here, tmp_path):
    train_here(train_iters=2)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(
        ValueError,
        match="--global-batch-size is 4, but the checkpoint in .* was trained with 2; give --global-batch-size 2, or",
    ):
        train_here(train_iters=4, global_batch_size=4, load=str(tmp_path / "run/checkpoints"))
    assert sorted(p for p in tmp_path.rglob("*")) == before


def flip(path: Path) -> None:
    """Turn one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard(saves: Path, iteration: int) -> Path:
    return saves / f"iter_{iteration:07d}/__0_0.distcp"


@pytest.mark.parametrize("way", ["load", "finetune", "export", "go_back"])
def test_what_torch_pickled_is_not_unpickled(way, train_here, tmp_path, monkeypatch):
    """A crafted `.metadata` set an attribute on a class, and with that where the solver's process began to look."""
    monkeypatch.delattr(PosixPath, "stranger", raising=False)
    train_here(train_iters=2)
    saves = tmp_path / "run/checkpoints"
    poison(saves / "iter_0000002")
    if way == "export":
        pytest.importorskip("safetensors")
        export_hf(str(saves), None, tmp_path / "out", dtype=None, dry_run=False)
        assert (tmp_path / "out/model.safetensors").is_file()
    elif way == "go_back":
        assert go_back(SimpleNamespace(tensors=dict, stages={}), saves, 2)["iteration"] == 2
    else:
        more = {"finetune": True, "run_dir": str(tmp_path / "fine")} if way == "finetune" else {}
        assert len(train_here(train_iters=3, load=str(saves), **more)) == 3
    assert not hasattr(PosixPath, "stranger")


def test_the_newest_checkpoint_that_verifies_is_taken(train_here, tmp_path, caplog):
    """Whatever is found while tensors are read; the run then makes again what it had made."""
    whole = train_here(train_iters=6, run_dir=str(tmp_path / "whole"))
    train_here(train_iters=4, save_interval=1)
    saves = tmp_path / "run/checkpoints"
    flip(shard(saves, 4))
    (saves / "iter_0000003/manifest.json").unlink()
    with caplog.at_level("WARNING", logger="megatron_snip"):
        rows = train_here(train_iters=6, load=str(saves))
    assert losses(rows) == losses(whole)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("skipped")]
    assert "iter_0000004: __0_0.distcp at byte" in told[0] and "its CRC-32 differs" in told[0]
    assert "iter_0000003: it has no manifest.json" in told[1] and len(told) == 2
    assert len(list(saves.glob("iter_*.before-*"))) == 2, "nothing is deleted"


def test_no_checkpoint_that_verifies(train_here, tmp_path):
    train_here(train_iters=2, save_interval=1)
    saves = tmp_path / "run/checkpoints"
    flip(shard(saves, 1))
    flip(shard(saves, 2))
    with pytest.raises(ValueError, match="holds no other checkpoint that can be continued; there is no older one"):
        train_here(train_iters=4, load=str(saves))


def test_a_damaged_checkpoint_that_the_guard_goes_back_to_is_named(train_here, tmp_path):
    train_here(train_iters=2)
    saves = tmp_path / "run/checkpoints"
    shard(saves, 2).write_bytes(b"")
    with pytest.raises(ValueError, match=f"^{saves}/iter_0000002: __0_0.distcp has 0 bytes .*; load another"):
        go_back(SimpleNamespace(tensors=dict), saves, 2)


def test_one_checkpoint_can_be_named(train_here, tmp_path):
    whole = train_here(train_iters=4, save_interval=1)
    saves = tmp_path / "run/checkpoints"
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    for load, step in ((saves, 2), (saves / "iter_0000002", None), (saves / "iter_0000002", 2)):
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
        flip(shard(saves, 4))  # nobody asks for that one
        rows = train_here(train_iters=4, load=str(load), ckpt_step=step, save=str(saves))
        assert losses(rows) == losses(whole) and read_state(saves, 4)["iteration"] == 4


def test_a_named_checkpoint_is_not_replaced_by_another(train_here, tmp_path):
    train_here(train_iters=3, save_interval=1)
    saves = tmp_path / "run/checkpoints"
    flip(shard(saves, 3))
    for options in ({"load": str(saves), "ckpt_step": 3}, {"load": str(saves / "iter_0000003")}):
        with pytest.raises(
            ValueError, match=r"iter_0000003: __0_0.distcp at .* CRC-32 differs; load another iteration"
        ):
            train_here(train_iters=4, save=str(saves), **options)
    with pytest.raises(ValueError, match="no whole checkpoint of iteration 7 is there; those of this folder: 3, 2, 1"):
        train_here(train_iters=4, load=str(saves), ckpt_step=7)
    with pytest.raises(ValueError, match="iter_0000002 is from iteration 2, but --ckpt-step is 3; drop one"):
        train_here(train_iters=4, load=str(saves / "iter_0000002"), ckpt_step=3)
    shutil.copytree(saves / "iter_0000001", saves / "iter_2")  # a name that no save gives
    with pytest.raises(ValueError, match="iter_2: no checkpoint is there"):  # it was iter_0000002 that was loaded
        train_here(train_iters=4, save=str(saves), load=str(saves / "iter_2"))


def test_saving_in_the_background_changes_nothing(train_here, tmp_path):
    whole = train_here(train_iters=6, run_dir=str(tmp_path / "whole"), save_interval=2)
    train_here(train_iters=4, save_interval=1, async_save=True)
    rows = train_here(train_iters=6, load=str(tmp_path / "run/checkpoints"), async_save=True)
    assert losses(rows) == losses(whole)
    for saves in (tmp_path / "run/checkpoints", tmp_path / "whole/checkpoints"):
        assert (saves / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert shard(tmp_path / "run/checkpoints", 6).read_bytes() == shard(tmp_path / "whole/checkpoints", 6).read_bytes()


def test_trouble_is_left_behind_by_a_resume(train_here, tmp_path, monkeypatch):
    """A run that ended for want of finite steps begins before them, with as many tries as any other."""
    from tests.unit.train.test_loop import break_steps

    with monkeypatch.context() as patch:
        break_steps(patch, {3, 4, 5})
        with pytest.raises(ValueError, match="not finite in 2 iterations in a row"):
            train_here(max_skipped_iterations=2, save_interval=1, train_iters=8)
    rows = train_here(max_skipped_iterations=2, train_iters=5, load=str(tmp_path / "run/checkpoints"), lr=1e-3)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5] and rows[-1]["skipped"] == 0
