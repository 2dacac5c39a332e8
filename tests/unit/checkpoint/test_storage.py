"""Tensors are read by name and shape, and metadata from a stranger runs nothing."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_snip.checkpoint import storage
from megatron_snip.checkpoint.manifest import STATE_FIELDS, Damaged, folder_of
from megatron_snip.checkpoint.storage import load_tensors
from tests.unit.checkpoint.conftest import prove, tensors


def test_a_checkpoint_of_another_model(save, tmp_path):
    save(tmp_path, 5, 1.0)
    for wanted, said in (
        (
            tensors(0.0) | {"optim.a.exp_avg": torch.zeros(4, 30)},
            "exp_avg has shape [30, 4], the model's is [4, 30];",
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


class Crafted:
    """What pickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_crafted_metadata_runs_nothing(save, tmp_path):
    save(tmp_path, 5, 1.0)
    folder, trace = folder_of(tmp_path, 5), tmp_path / "trace"
    (folder / ".metadata").write_bytes(pickle.dumps(Crafted(trace)))
    prove(folder / ".metadata")
    with pytest.raises(Damaged, match=r"\.metadata names pathlib.Path.touch, which no checkpoint of tensors needs"):
        load_tensors(tmp_path, 5, tensors(0.0))
    assert not trace.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert trace.exists(), "a plain unpickler would have run it"


class LookUp:
    """What pickles as `getattr(...)`, as members of enumerations do in Python up to 3.11.3."""

    def __init__(self, *of: object) -> None:
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_an_attribute_is_looked_up_of_one_enumeration_alone(save, tmp_path):
    save(tmp_path, 5, 1.0)
    folder = folder_of(tmp_path, 5)
    encoding = storage.dcp._MEM_FORMAT_ENCODING
    for of in ((torch.Size, "__base__"), (encoding, "__class__"), (storage.dcp.Metadata, "__init__")):
        (folder / ".metadata").write_bytes(pickle.dumps(LookUp(*of)))
        prove(folder / ".metadata")
        with pytest.raises(
            Damaged, match=r"\.metadata looks up .*, which no checkpoint of tensors needs; do not trust it"
        ):
            load_tensors(tmp_path, 5, tensors(0.0))
    member = next(iter(encoding))
    found = storage._MetadataUnpickler(io.BytesIO(pickle.dumps(LookUp(encoding, member.name)))).load()
    assert found is member


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"not": "metadata"})])
def test_metadata_that_is_none(content, save, tmp_path):
    save(tmp_path, 5, 1.0)
    (folder_of(tmp_path, 5) / ".metadata").write_bytes(content)
    prove(folder_of(tmp_path, 5) / ".metadata")
    with pytest.raises(Damaged, match=r"\.metadata cannot be read"):
        load_tensors(tmp_path, 5, tensors(0.0))


def test_metadata_that_points_elsewhere(save, tmp_path):
    save(tmp_path, 5, 1.0)
    folder = folder_of(tmp_path, 5)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../outside"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "outside").write_bytes((folder / "__0_0.distcp").read_bytes())
    prove(folder / ".metadata")
    with pytest.raises(Damaged, match=r"\.metadata tells of a record that the manifest does not"):
        load_tensors(tmp_path, 5, tensors(0.0))


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
    "model.large": torch.arange(3 << 19, dtype=torch.int32),  # of several pieces
}


@pytest.mark.parametrize("change", ["as it was", "transposed", "another type"])
def test_values_come_back_whatever_they_are_read_into(change, saver, tmp_path):
    saver(tmp_path).save(5, SAVED, dict.fromkeys(STATE_FIELDS, 0) | {"iteration": 5}, finite=True, last=True)
    into = {name: torch.zeros_like(value) for name, value in SAVED.items()}
    if change == "transposed":
        into["model.matrix"] = torch.zeros(7, 5).t()
    elif change == "another type":
        into["model.half"] = into["model.half"].float()
    load_tensors(tmp_path, 5, into)
    for name, value in SAVED.items():
        assert torch.equal(into[name], value.to(into[name].dtype)), name


def test_values_that_do_not_lie_row_by_row_are_not_written(saver, tmp_path):
    with pytest.raises(CheckpointException, match=r"model.matrix is not contiguous, and checkpoints hold values row"):
        saver(tmp_path).save(5, {"model.matrix": torch.zeros(7, 5).t()}, {}, finite=True, last=True)


def test_a_record_that_is_smaller_than_its_tensor(save, tmp_path):
    """Metadata that tell of a larger tensor make nobody read beyond the record, or set memory aside for it."""
    save(tmp_path, 5, 1.0)
    path = folder_of(tmp_path, 5) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    large = torch.Size([1 << 40, 4])
    found = metadata.state_dict_metadata["model.a"]
    found.size, found.chunks[0].sizes = large, large
    path.write_bytes(pickle.dumps(metadata))
    prove(path)
    wanted = {"model.a": torch.zeros(1, 1).expand(large)}
    with pytest.raises(Damaged, match=r"\.metadata tells of a record that the manifest does not"):
        load_tensors(tmp_path, 5, wanted)
