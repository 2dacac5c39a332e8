"""The data of a resumed run, and files that go bad while a run uses them."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest

from megatron_snip.checkpoint.manifest import newest
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.data.workers import Workers
from megatron_snip.train import loop, setup
from megatron_snip.train.run.data_identity import difference
from megatron_snip.train.run.metrics import read_metrics
from megatron_snip.train.run.state_file import read_state


def newest_iteration(saves):
    return newest(saves)[0]


SEQUENCES, LENGTH = 60, 100


def write(prefix, *, sequences=SEQUENCES, shift=0, length=LENGTH, bad=None):
    """Documents of 0 .. 99; bad: (document, id)."""
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document in range(sequences):
            tokens = (np.arange(length) + document + shift) % 128
            if bad is not None and bad[0] == document:
                tokens[0] = bad[1]
            builder.add_document(tokens)
    return str(prefix)


def unrecorded(prefix):
    os.unlink(f"{prefix}.ids.json")
    return prefix


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "text")


@pytest.fixture
def run(train_here, tmp_path, data):
    """Train on the data; ``more`` goes on from the checkpoint."""

    def train(*, more=False, **options):
        load = {"load": str(tmp_path / "run/checkpoints")} if more else {}
        return train_here(**{"mock_data": False, "train_data_path": (data,), "train_iters": 6, **load, **options})

    return train


CHANGES = {
    "rewritten": ({"shift": 1}, "dataset {0} has changed: the content of its .bin; give the data that the checkpoint"),
    "grown": (
        {"sequences": SEQUENCES + 1},
        "dataset {0} has changed: the size of its .bin, the lengths of its sequences, the content of its .bin; give",
    ),
    "cut elsewhere": (
        {"sequences": SEQUENCES // 2, "length": 2 * LENGTH},
        "dataset {0} has changed: the lengths of its sequences",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_unless_it_is_accepted(change, run, data, tmp_path, caplog):
    how, said = CHANGES[change]
    run(exit_interval=2)
    write(data, **how)
    with pytest.raises(ValueError) as info:
        run(more=True)
    assert str(info.value).startswith(said.format(data)) and str(info.value).endswith("or --accept-changed-data")
    assert "\n" not in str(info.value) and newest_iteration(tmp_path / "run/checkpoints") == 2
    with caplog.at_level("WARNING", logger="megatron_snip"):
        assert len(run(more=True, accept_changed_data=True)) == 6
    assert f"this run continues with other data: dataset {data} has changed" in caplog.text
    assert len(run(more=True)) == 6, "the new data is what the last checkpoint was trained on"


def test_the_same_data_elsewhere_is_accepted(run, data, tmp_path):
    run(exit_interval=2)
    for suffix in (".bin", ".idx"):
        shutil.copy(data + suffix, tmp_path / f"copy{suffix}")
    copy = (str(tmp_path / "copy"),)
    assert len(run(more=True, train_data_path=copy, exit_interval=4)) == 4
    write(data, shift=1)
    with pytest.raises(ValueError, match=rf"dataset {data} \(it was {copy[0]}\) has changed: the content"):
        run(more=True)
    assert len(run(more=True, train_data_path=copy)) == 6


def test_weights_and_number_of_a_blend_count(run, data, tmp_path):
    other = write(tmp_path / "other", shift=5)
    run(exit_interval=2, train_data_path=("1", data, "3", other))
    assert [len(read_state(tmp_path / "run/checkpoints", 2)["data"]["train"])] == [2]
    with pytest.raises(ValueError, match=rf"dataset {data} has changed: its weight in the blend; "):
        run(more=True, train_data_path=("1", data, "2", other))
    with pytest.raises(ValueError, match="training data has 1 datasets and had 2; "):
        run(more=True, train_data_path=(data,))
    assert len(run(more=True, train_data_path=("2", data, "6", other))) == 6, "weights are relative"


def test_the_part_of_a_file_that_is_read_counts(run, data, tmp_path):
    """--data-path reads the part that --split gives to training, --train-data-path all of it."""
    split = {"train_data_path": (), "data_path": ("2", data, "1", write(tmp_path / "other", shift=5))}
    run(exit_interval=2, **split)
    whole = {"train_data_path": split["data_path"]}
    with pytest.raises(ValueError, match=rf"{data} has changed: its sequences \[0, 60\) are read instead of \[0, 58\)"):
        run(more=True, **whole)
    assert len(run(more=True, exit_interval=4, **split)) == 4
    assert len(run(more=True, accept_changed_data=True, **whole)) == 6


def test_validation_data_counts_and_may_be_left_out(run, data, tmp_path):
    other = write(tmp_path / "other", shift=5)
    valid = {"valid_data_path": (other,), "eval_interval": 2, "eval_iters": 1}
    run(exit_interval=2, **valid)
    write(other, shift=6)
    with pytest.raises(ValueError, match=rf"dataset {other} has changed: the content"):
        run(more=True, **valid)
    run(more=True)


def test_finetuning_takes_other_data(run, data, tmp_path):
    run(exit_interval=2)
    write(data, shift=1)
    saves = str(tmp_path / "run/checkpoints")
    run(load=saves, finetune=True, run_dir=str(tmp_path / "fine"), train_iters=2)


def test_a_recorded_id_outside_the_vocabulary_is_found_at_the_start(run, data, tmp_path):
    write(data, bad=(30, 128))
    with pytest.raises(ValueError, match=rf"^dataset {data} holds token id 128, outside the vocabulary of 128; give"):
        run()
    assert not (tmp_path / "run").exists()


def test_an_unrecorded_id_ends_the_run_after_a_save(run, data, tmp_path):
    for document in range(SEQUENCES):
        unrecorded(write(data, bad=(document, 500)))
        with pytest.raises(ValueError) as info:
            run(train_iters=20, run_dir=str(tmp_path / f"run{document}"))
        line = str(info.value)
        assert line.startswith(f"sequence {document} of dataset {data} holds token id 500, outside the vocabulary of")
        saves = tmp_path / f"run{document}/checkpoints"
        if saves.exists() and newest_iteration(saves):
            break
    saved = newest_iteration(saves)
    assert saved is not None and 0 < saved < 20 and line.endswith(f"(iteration {saved} is saved)")
    assert not (tmp_path / "run0").exists() or document == 0, "a bad first batch leaves nothing"
    again = {"train_iters": 20, "run_dir": str(tmp_path / f"run{document}"), "load": str(saves)}
    with pytest.raises(ValueError, match="holds token id 500") as info:
        run(**again)
    assert "saved" not in str(info.value) and newest_iteration(saves) == saved
    write(data)
    with pytest.raises(ValueError, match="has changed: the content"):
        run(**again)
    assert len(run(**again, accept_changed_data=True)) == 20, "no row is missing and none appears twice"


def cut_after(monkeypatch, iteration, path, size):
    """Cut a file short when an iteration begins."""
    plain = loop.runtime.seed_iteration

    def seed(number, at):
        if at == iteration:
            os.truncate(path, size)
        plain(number, at)

    monkeypatch.setattr(loop.runtime, "seed_iteration", seed)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_while_it_is_used_ends_the_run_after_a_save(suffix, run, data, tmp_path, monkeypatch):
    whole = (tmp_path / f"text{suffix}").read_bytes()
    cut_after(monkeypatch, 3, data + suffix, 100)
    with pytest.raises(ValueError, match=rf"^{data}\{suffix} has 100 bytes, but had {len(whole)} when .* is saved\)$"):
        run(train_iters=15)
    saved = newest_iteration(tmp_path / "run/checkpoints")
    assert saved is not None and 3 <= saved <= 5
    (tmp_path / f"text{suffix}").write_bytes(whole)
    monkeypatch.undo()


def test_a_killed_worker_ends_the_run_after_a_save(run, tmp_path, monkeypatch):
    made = []
    plain = loop.runtime.seed_iteration
    monkeypatch.setattr(setup, "Workers", lambda *given: made.append(Workers(*given)) or made[0])

    def seed(number, at):
        if at == 3:
            os.kill(made[0]._all[0].process.pid, signal.SIGKILL)
        plain(number, at)

    losses = [row["lm loss"] for row in run(train_iters=5, run_dir=str(tmp_path / "other"))]
    monkeypatch.setattr(loop.runtime, "seed_iteration", seed)
    with pytest.raises(ValueError, match=r"^data worker 1 of 1 .* killed by signal 9 .*--num-workers.* is saved\)$"):
        run(train_iters=15, num_workers=1)
    saved = newest_iteration(tmp_path / "run/checkpoints")
    assert saved is not None and 3 <= saved <= 5
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["lm loss"] for row in rows] == losses[:saved], "as without workers"
    assert made[0]._all[0].process.returncode == -9


def test_validation_data_cut_while_it_is_used_ends_the_run_after_a_save(run, data, tmp_path, monkeypatch):
    other = write(tmp_path / "other", shift=5)
    cut_after(monkeypatch, 3, other + ".bin", 0)
    with pytest.raises(ValueError, match=rf"^{other}.bin has 0 bytes, .* \(iteration 4 is saved\)$"):
        run(valid_data_path=(other,), eval_interval=2, eval_iters=1)
    assert newest_iteration(tmp_path / "run/checkpoints") == 4


def test_a_probe_that_cannot_read_a_later_batch_keeps_the_plan(run, data, tmp_path, monkeypatch, caplog):
    """The probe before iteration 3 takes four batches; training then comes to the bad file and ends."""
    cut_after(monkeypatch, 3, data + ".bin", 100)
    snip = {"precision": "snip", "snip_start": 3, "snip_interval": 9, "snip_probe_tokens": 4 * 256}
    with caplog.at_level("WARNING", logger="megatron_snip"), pytest.raises(ValueError, match=r"is saved\)$"):
        run(train_iters=15, **snip)
    assert f"iteration 3: no new plan, keeping the current one: {data}.bin has 100 bytes" in caplog.text
    assert newest_iteration(tmp_path / "run/checkpoints") >= 3


def test_an_order_that_another_number_of_samples_gives_is_told(run, data, caplog):
    """As in Megatron-LM, epochs are shuffled together, so more of them are another order."""
    first = run(train_iters=2)
    run(more=True, train_iters=3)
    assert "another order" not in caplog.text, "of one epoch all samples are in order"
    rows = run(more=True, train_iters=300, exit_interval=4)
    assert f"some repeat early: training data {data} is shuffled as " in caplog.text and rows[:2] == first
    assert "epochs instead of 1. The order depends on" in caplog.text


def test_identities_of_a_resume():
    one = {"prefix": "a", "weight": 1.0, "lengths": "x", "size": 1, "content": "y", "sequences": [0, 9]}
    assert difference({"train": [one]}, {"train": [{**one, "prefix": "b"}], "valid": [one]}) == ""
    assert difference({"train": [one], "valid": [one]}, {"train": []}) == "training data has 1 datasets and had 0"
