"""What a folder of checkpoints holds, and every way in which one is not whole."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from megatron_snip.checkpoint.manifest import (
    STATE_FIELDS,
    VERSION,
    Damaged,
    check,
    folder_of,
    newest,
    read_state,
    tracked_iteration,
)
from megatron_snip.checkpoint.storage import load_tensors
from tests.unit.checkpoint.conftest import loaded, tensors

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("content", [b"", b"release", b"-3", b"4.0", "²".encode(), b"\xff\xfe"])
def test_a_damaged_tracker_is_named(content, tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_bytes(content)
    with pytest.raises(ValueError) as info:
        newest(tmp_path)
    assert str(info.value).startswith(f"{tracker}: ") and "write the number of an iter_ folder" in str(info.value)


def test_a_lost_tracker_is_no_empty_folder(save, tmp_path):
    save(tmp_path, 5, 1.0)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(ValueError, match=f"holds checkpoints up to iteration 5 and no {TRACKER}; write .* or --load"):
        tracked_iteration(tmp_path)


def test_a_tracker_that_names_nothing(save, tmp_path):
    save(tmp_path, 5, 1.0)
    (tmp_path / TRACKER).write_text("6\n")
    iteration, passed_over = newest(tmp_path)
    assert iteration == 5
    assert passed_over == [f"{tmp_path}/iter_0000006: there is no such folder, though {TRACKER} names it"]
    shutil.rmtree(tmp_path / "iter_0000005")
    with pytest.raises(ValueError, match=r"holds no checkpoint that can be continued; .*0006: there is no such"):
        newest(tmp_path)


def cut_manifest(folder):
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[: len(text) // 2])


def edited_manifest(folder):
    body = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**body, "run_id": "mine"}))


def later_manifest(folder):
    body = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**body, "version": VERSION + 1}))


def other_iteration(folder):
    shutil.copy(folder.with_name("iter_0000003") / "manifest.json", folder / "manifest.json")


def other_shard(folder):
    """Same names and sizes, other weights: sizes do not tell, records do."""
    shutil.copy(folder.with_name("iter_0000003") / "__0_0.distcp", folder / "__0_0.distcp")


def cut_shard(folder):
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:100])


DAMAGES = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json, so its save did not end"),
    "cut manifest": (cut_manifest, "manifest.json cannot be read"),
    "no object": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "edited manifest": (edited_manifest, "manifest.json is not what was written: its SHA-256 differs"),
    "later version": (later_manifest, f"has version {VERSION + 1}, and this code reads version {VERSION}"),
    "other iteration": (other_iteration, "manifest.json is from iteration 3"),
    "other state": (lambda f: (f / "state.json").write_text("{}"), "state.json is not what was written"),
    "no state": (lambda f: (f / "state.json").unlink(), r"state.json cannot be read \(No such file"),
    "other metadata": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata is not what was written"),
    "cut shard": (cut_shard, "__0_0.distcp has 100 bytes of "),
    "no shard": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "other shard": (other_shard, "__0_0.distcp at byte .* is not what was written: its CRC-32 differs"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_one_before_is_taken(damage, save, tmp_path):
    break_it, said = DAMAGES[damage]
    save(tmp_path, 3, 1.0)
    save(tmp_path, 5, 2.0)
    break_it(tmp_path / "iter_0000005")
    with pytest.raises(Damaged, match=said):
        load_tensors(tmp_path, 5, tensors(0.0))
    if damage == "other shard":
        assert newest(tmp_path) == (5, []), "found while it is read"
        assert newest(tmp_path, below=5) == (3, [])
    else:
        with pytest.raises(Damaged, match=said):
            check(tmp_path, 5)
        assert loaded(tmp_path) == (3, 1.0, 1.0)
        _, (why,) = newest(tmp_path)
        assert why.startswith(f"{tmp_path}/iter_0000005: ")


def test_every_flipped_bit_is_noticed(save, tmp_path):
    """200 of 200, in any file of a checkpoint; none is loaded as other weights."""
    save(tmp_path, 5, 1.0)
    folder, draw = folder_of(tmp_path, 5), random.Random(1)
    files = sorted(path for path in folder.iterdir())
    for number in range(200):
        path = files[-1 if number % 2 else draw.randrange(len(files))]
        content = bytearray(path.read_bytes())
        whole, at = bytes(content), draw.randrange(len(content) * 8)
        content[at // 8] ^= 1 << at % 8
        path.write_bytes(content)
        with pytest.raises(Damaged):
            load_tensors(tmp_path, 5, tensors(0.0))
        path.write_bytes(whole)
    into = tensors(0.0)
    load_tensors(tmp_path, 5, into)
    assert torch.equal(into["model.a"], tensors(1.0)["model.a"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"3", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"{}", "field run_id is missing"),
        (json.dumps(dict.fromkeys(STATE_FIELDS[:-1])).encode(), f"field {STATE_FIELDS[-1]} is missing"),
        (json.dumps({**dict.fromkeys(STATE_FIELDS), "version": 99}).encode(), "version is 99, and this code reads "),
        (
            json.dumps({**dict.fromkeys(STATE_FIELDS), "version": VERSION, "iteration": 4}).encode(),
            "it is from iteration 4",
        ),
    ],
)
def test_damaged_state(text, said, save, tmp_path):
    save(tmp_path, 5, 1.0)
    path = tmp_path / "iter_0000005/state.json"
    path.write_bytes(text)
    with pytest.raises(ValueError) as info:
        read_state(tmp_path, 5)
    assert str(info.value).startswith(f"{path}: {said}") and "load another iteration" in str(info.value)
