"""Tensors are read by name and shape, by the manifest alone, and what is not finite is refused."""

from __future__ import annotations

import os
import pickle
import sys
import zlib
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron_snip.checkpoint import storage
from megatron_snip.checkpoint.manifest import Damaged, check, folder_of
from megatron_snip.checkpoint.storage import load_tensors
from tests.unit.checkpoint.conftest import forge, loaded, poison, tensors


def test_a_checkpoint_of_another_model(save, tmp_path):
    save(tmp_path, 5, 1.0)
    for wanted, said in (
        (
            tensors(0.0) | {"optim.a.exp_avg": torch.zeros(4, 30)},
            "exp_avg has shape [30, 4], but the model's is [4, 30];",
        ),
        (tensors(0.0) | {"model.b": torch.zeros(1)}, "holds no model.b; it is a checkpoint of another model"),
    ):
        before = {name: tensor.clone() for name, tensor in wanted.items()}
        with pytest.raises(ValueError) as info:
            load_tensors(tmp_path, 5, wanted)
        assert (
            "\n" not in str(info.value) and said in str(info.value) and str(folder_of(tmp_path, 5)) in str(info.value)
        )
        assert all(torch.equal(before[name], wanted[name]) for name in wanted), "nothing is read before the error"


def test_what_torch_pickled_is_never_opened(save, tmp_path, monkeypatch):
    """It is written for torch's own reader; ours goes by the manifest, whatever the pickle holds."""
    monkeypatch.delattr(PosixPath, "stranger", raising=False)
    save(tmp_path, 5, 1.0)
    folder, opened = folder_of(tmp_path, 5), []
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors(1.0).items()}
    dcp_load(into, storage_reader=FileSystemReader(folder))
    assert torch.equal(into["model.a"], tensors(1.0)["model.a"]), "torch reads it"
    poison(folder)
    watched = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watched and event == "open" else None)
    assert loaded(tmp_path) == (5, 1.0, 1.0)
    watched.clear()
    assert any("__0_0.distcp" in path or "iter_0000005" in path for path in opened)
    assert not any(path.endswith(".metadata") for path in opened)
    assert not hasattr(PosixPath, "stranger")
    pickle.loads((folder / ".metadata").read_bytes())
    assert PosixPath.stranger == 1, "an unpickler with any list of names would have set it"


def test_any_crc_32_will_do(save, tmp_path, monkeypatch):
    """A checkpoint written with the fast one is read with Python's own."""
    save(tmp_path, 5, 1.0)
    monkeypatch.setattr(storage, "crc32", zlib.crc32)
    load_tensors(tmp_path, 5, tensors(0.0))


SAVED = {
    "model.matrix": torch.arange(35.0).reshape(5, 7),
    "model.half": torch.arange(6).to(torch.bfloat16),
    "model.one": torch.tensor(3.0),
    "model.none": torch.empty(0, 4),
    "model.large": torch.arange(3 << 19).float(),  # of several pieces
}


@pytest.mark.parametrize("change", ["as it was", "transposed", "another type"])
def test_values_come_back_whatever_they_are_read_into(change, saver, tmp_path):
    saver(tmp_path).save(5, SAVED, {"iteration": 5}, finite=True, last=True)
    into = {name: torch.zeros_like(value) for name, value in SAVED.items()}
    if change == "transposed":
        into["model.matrix"] = torch.zeros(7, 5).t()
    elif change == "another type":
        into["model.half"] = into["model.half"].float()
    load_tensors(tmp_path, 5, into)
    for name, value in SAVED.items():
        assert torch.equal(into[name], value.to(into[name].dtype)), name


def test_values_that_do_not_lie_row_by_row_are_not_written(saver, tmp_path):
    with pytest.raises(CheckpointException, match=r"model.matrix is not contiguous, but checkpoints hold values row"):
        saver(tmp_path).save(5, {"model.matrix": torch.zeros(7, 5).t()}, {}, finite=True, last=True)


def test_a_tensor_of_a_type_that_is_not_read_is_not_written(saver, tmp_path):
    with pytest.raises(CheckpointException, match=r"model.a is of type int64, but checkpoints hold float32 and bfl"):
        saver(tmp_path).save(5, {"model.a": torch.zeros(3, dtype=torch.int64)}, {}, finite=True, last=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.a", "optim.a.exp_avg"])
def test_values_that_are_not_finite_are_refused_whatever_the_manifest_says(name, value, saver, tmp_path):
    """One among a million; the manifest of a save tells, and a forged one does not."""
    saved = {"model.a": torch.ones(1024, 1024), "optim.a.exp_avg": torch.ones(1024, 1024)}
    saved[name][1000, 1000] = value
    saver(tmp_path).save(5, saved, {"iteration": 5}, finite=True, last=True)
    forge(folder_of(tmp_path, 5), lambda body: body.update(not_finite=[]))
    with pytest.raises(Damaged, match=f"^{name} has values that are not finite, in __0_0.distcp"):
        load_tensors(tmp_path, 5, {name: torch.zeros_like(tensor) for name, tensor in saved.items()})


def test_a_shard_that_was_exchanged_for_a_pipe_waits_for_nobody(save, tmp_path):
    save(tmp_path, 5, 1.0)
    manifest, path = check(tmp_path, 5), folder_of(tmp_path, 5) / "__0_0.distcp"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Damaged, match=r"__0_0.distcp cannot be read \(it is not a regular file\)"):
        load_tensors(tmp_path, 5, tensors(0.0), manifest)
