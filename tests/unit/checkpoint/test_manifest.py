"""What a folder of checkpoints holds, and every way in which one is not whole."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron_snip.checkpoint import manifest as manifest_module
from megatron_snip.checkpoint.manifest import (
    VERSION,
    Damaged,
    check,
    folder_of,
    newest,
    read_state,
    tracked_iteration,
)
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.errors import UserError
from tests.unit.checkpoint.conftest import ANOTHER, forge, loaded, tensors

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("content", [b"", b"release", b"-3", b"4.0", "²".encode(), b"\xff\xfe", b"5" * 5000, b"5\0"])
def test_a_damaged_tracker_is_named(content, tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_bytes(content)
    with pytest.raises(ValueError) as info:
        newest(tmp_path)
    assert len(str(info.value)) < 500
    assert str(info.value).startswith(f"{tracker}: ") and "write the number of an iter_ folder" in str(info.value)


def test_a_kill_before_the_first_tracker_loses_nothing(save, tmp_path):
    """The folder is renamed first; a restart continues from it, unless it is damaged or its numbers are not finite."""
    save(tmp_path, 5, 1.0)
    (tmp_path / TRACKER).unlink()
    assert newest(tmp_path) == (5, []) and not (tmp_path / TRACKER).exists()
    shutil.copytree(tmp_path, tmp_path / "bad")
    cut_manifest(tmp_path / "bad/iter_0000005")
    with pytest.raises(ValueError, match=f"holds checkpoints up to iteration 5 but no {TRACKER}"):
        newest(tmp_path / "bad")
    save(tmp_path / "nan", 5, float("nan"))
    assert not (tmp_path / "nan" / TRACKER).exists()
    with pytest.raises(ValueError, match=f"holds checkpoints up to iteration 5 but no {TRACKER}"):
        newest(tmp_path / "nan")


def test_a_lost_tracker_is_no_empty_folder(save, tmp_path):
    save(tmp_path, 4, 1.0)
    save(tmp_path, 5, 1.0)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(ValueError, match=f"holds checkpoints up to iteration 5 but no {TRACKER}; write .* or --load"):
        tracked_iteration(tmp_path)


def test_a_tracker_that_names_nothing(save, tmp_path):
    save(tmp_path, 5, 1.0)
    (tmp_path / TRACKER).write_text("6\n")
    iteration, passed_over = newest(tmp_path)
    assert iteration == 5
    assert passed_over == [f"{tmp_path}/iter_0000006: there is no such folder, although {TRACKER} names it"]
    shutil.rmtree(tmp_path / "iter_0000005")
    with pytest.raises(ValueError, match=r"holds no checkpoint that can be continued; .*0006: there is no such"):
        newest(tmp_path)


def cut_manifest(folder):
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[: len(text) // 2])


def edited_manifest(folder):
    body = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**body, "run_id": ANOTHER}))


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
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json: its save did not finish"),
    "cut manifest": (cut_manifest, "manifest.json cannot be read"),
    "no object": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "edited manifest": (edited_manifest, "manifest.json is not what was written: its SHA-256 or its form differs"),
    "later version": (later_manifest, f"has version {VERSION + 1}, but this code reads version {VERSION}"),
    "other iteration": (other_iteration, "manifest.json is from iteration 3"),
    "other state": (lambda f: (f / "state.json").write_text("{}"), "state.json is not what was written"),
    "no state": (lambda f: (f / "state.json").unlink(), r"state.json cannot be read \(No such file"),
    "other metadata": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata has 0 bytes of "),
    "no metadata": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
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


@pytest.mark.parametrize(
    "tracked, file",
    [
        ("10", "iter_0000010/metadata.json"),  # torch_dist
        ("10", "iter_0000010/mp_rank_00/model_optim_rng.pt"),  # torch
        ("release", "release/mp_rank_00/model_optim_rng.pt"),  # of Megatron-LM's converter
    ],
)
def test_a_checkpoint_of_megatron_lm_is_called_so(tracked, file, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    with pytest.raises(UserError, match=r"Megatron-LM.*Hugging Face.*`megatron-snip convert import`") as caught:
        newest(tmp_path)
    assert "did not finish" not in str(caught.value)


def test_every_flipped_bit_is_noticed(save, tmp_path):
    """200 of 200, in any file that is read; none is loaded as other weights."""
    save(tmp_path, 5, 1.0)
    folder, draw = folder_of(tmp_path, 5), random.Random(1)
    files = sorted(path for path in folder.iterdir() if path.name != ".metadata")  # which nobody reads
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


def first_shard(body, place, value):
    body["tensors"]["model.a"]["shards"][0][place] = value


def two_shards(body, *parts):
    """Two halves of model.a [30, 4] in place of the one shard, each (first row, rows), in its record."""
    rank, offset, length, crc, start, _, _ = body["tensors"]["model.a"]["shards"][0]
    body["tensors"]["model.a"]["shards"] = [
        [rank, offset, length - 480 + 16 * rows, crc, start, [first, 0], [rows, 4]] for first, rows in parts
    ]


A = "manifest.json: model.a"
INT64 = 1 << 63
#: What a stranger may write into a manifest whose SHA-256 is right, and what is said of it.
FORGERIES = {
    "a device": (lambda b: b["small"].update({"/dev/zero": [1, 2]}), r"manifest.json cannot be read: .*small"),
    "a file above": (lambda b: b["small"].update({"../state.json": [1, 2]}), r"manifest.json cannot be read: .*small"),
    "no state": (lambda b: b["small"].pop("state.json"), "manifest.json does not list state.json"),
    "a name of another tensor": (lambda b: b["tensors"].update({"a/b": b["tensors"]["model.a"]}), ".*tensors"),
    "an unknown field": (lambda b: b.update(more=1), "manifest.json cannot be read: field more is unknown"),
    "a missing field": (lambda b: b.pop("layout"), "manifest.json cannot be read: field layout is missing"),
    "an iteration with a point": (lambda b: b.update(iteration=5.0), "manifest.json "),
    "a large iteration": (lambda b: b.update(iteration=1 << 70), "manifest.json cannot be read: "),
    "no iteration": (lambda b: b.update(iteration=None), "manifest.json cannot be read: field iteration: expected int"),
    "a path as run": (lambda b: b.update(run_id="x/../../../home"), "manifest.json cannot be read: field run_id: "),
    "tensors in a list": (lambda b: b.update(tensors=[]), "manifest.json cannot be read: field tensors: "),
    "integers": (lambda b: b["tensors"]["model.a"].update(dtype="int32"), f"{A} is of type 'int32', but checkpoints "),
    "no type at all": (lambda b: b["tensors"]["model.a"].update(dtype="load"), f"{A} is of type 'load', but"),
    "another shape": (lambda b: b["tensors"]["model.a"].update(shape=[30, 5]), f"{A} .* not have every value once"),
    "other dims": (lambda b: b["tensors"]["model.a"].update(shape=[120]), f"{A} has 1 dims, and a shard in __0_0.dis"),
    "many dims": (lambda b: b["tensors"]["model.a"].update(shape=[1] * 9), "manifest.json cannot be read: .*shape"),
    "no shards": (lambda b: b["tensors"]["model.a"].update(shards=[]), f"{A} .* does not have every value once"),
    "half the shards": (lambda b: two_shards(b, (0, 15)), f"{A} of shape \\[30, 4\\] does not have every value once"),
    "a shard twice": (lambda b: two_shards(b, (0, 15), (0, 15)), f"{A} .* does not have every value once"),
    "shards that overlap": (lambda b: two_shards(b, (0, 16), (15, 15)), f"{A} .* does not have every value once"),
    "a hole": (lambda b: two_shards(b, (0, 15), (16, 15)), f"{A} .* does not have every value once"),
    "a larger shard": (lambda b: first_shard(b, 6, [1 << 40, 4]), f"{A} has a shard in __0_0.distcp at byte .* that"),
    "a huge record": (lambda b: first_shard(b, 2, 1 << 50), f"{A} has a shard in __0_0.distcp at byte .* that"),
    "a late start": (lambda b: first_shard(b, 4, 1 << 40), "manifest.json cannot be read: field tensors"),
    "a negative offset": (lambda b: first_shard(b, 1, -1), "manifest.json cannot be read: field tensors"),
    "another rank's file": (lambda b: first_shard(b, 0, 7), "__0_0.distcp has|__7_0.distcp is missing"),
    "a file by its name": (lambda b: first_shard(b, 0, "../x"), "manifest.json cannot be read: field tensors"),
    "a short shard": (lambda b: b["tensors"]["model.a"]["shards"][0].pop(), "manifest.json cannot be read: field tens"),
    "numbers beyond 64 bits": (lambda b: b["tensors"]["model.a"].update(shape=[INT64, 4]), "manifest.json cannot be "),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused(forgery, save, tmp_path):
    """Whatever its SHA-256 says: nothing outside the folder is looked at, nothing is left unread."""
    save(tmp_path, 5, 1.0)
    change, said = FORGERIES[forgery]
    forge(folder_of(tmp_path, 5), change)
    with pytest.raises(Damaged, match=f"^{said}") as info:
        load_tensors(tmp_path, 5, tensors(0.0))
    assert "\n" not in str(info.value) and len(str(info.value)) < 500


def test_a_forgery_that_changes_nothing_is_read(save, tmp_path):
    """So what the others are refused for is the change."""
    save(tmp_path, 5, 1.0)
    forge(folder_of(tmp_path, 5), lambda body: body)
    assert loaded(tmp_path) == (5, 1.0, 1.0)


def duplicate(folder):
    """The same key twice; readers of JSON differ in which they take."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"iteration":5', '"iteration":4,"iteration":5', 1))


def replace_by(make):
    def change(path):
        path.unlink()
        make(path)

    return change


NO_FILES = {
    "pipe": replace_by(os.mkfifo),
    "device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "link": replace_by(lambda path: (path.parent.with_name("kept").write_bytes(b"{}"), path.symlink_to("../kept"))),
    "folder": replace_by(Path.mkdir),
}


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_refused_at_once(kind, name, save, tmp_path):
    save(tmp_path, 5, 1.0)
    NO_FILES[kind](folder_of(tmp_path, 5) / name)
    with pytest.raises(Damaged, match=f"^{name} (cannot be read|is missing|has 2 bytes of)"):
        load_tensors(tmp_path, 5, tensors(0.0))


def test_a_manifest_in_another_form_or_too_large(save, tmp_path):
    save(tmp_path, 5, 1.0)
    folder = folder_of(tmp_path, 5)
    text = (folder / "manifest.json").read_bytes()
    duplicate(folder)
    with pytest.raises(Damaged, match="its SHA-256 or its form differs"):
        check(tmp_path, 5)
    for content, said in (
        (b"[" * 100_000, "manifest.json cannot be read: it is nested too deeply|manifest.json cannot be read: "),
        (text.replace(b'"version":', b'"more":' + b"[" * 100_000 + b"]" * 100_000 + b',"version":'), "manifest.json "),
        (text.replace(b"model.a", b"model.\xff"), "manifest.json cannot be read: "),
        (b"5" * 5000, "manifest.json cannot be read: "),
    ):
        (folder / "manifest.json").write_bytes(content)
        with pytest.raises(Damaged, match=said):
            check(tmp_path, 5)
    os.truncate(folder / "manifest.json", 1 << 40)
    with pytest.raises(Damaged, match=r"manifest.json has 1099511627776 bytes, but at most 67108864 can be read"):
        check(tmp_path, 5)


GRIDS = {
    "whole": ((5, 4), [[0, 0, 5, 4]]),
    "rows, the last ones without any": ((5, 4), [[0, 0, 3, 4], [3, 0, 2, 4], [5, 0, 0, 4], [5, 0, 0, 4]]),
    "a grid": ((5, 4), [[r, c, n, 2] for r, n in ((0, 3), (3, 2)) for c in (0, 2)]),
    "columns, each with rows of its own": ((2, 4), [[0, 0, 1, 4], [1, 0, 1, 1], [1, 1, 1, 3]]),
    "a number": ((), [[]]),
    "nothing": ((0, 4), [[0, 0, 0, 4]]),
    "nothing, and nobody who has it": ((0, 4), []),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_shards_as_meshes_cut_them_fill_a_tensor(grid):
    shape, parts = GRIDS[grid]
    half = len(shape)
    shards = tuple(
        manifest_module.Shard(0, 0, 4 * math.prod(part[half:]), 0, 0, tuple(part[:half]), tuple(part[half:]))
        for part in parts
    )
    assert manifest_module._unfit(manifest_module.SavedTensor("float32", shape, shards)) == ""
    if math.prod(shape):
        for left_out in range(len(shards)):
            rest = shards[:left_out] + shards[left_out + 1 :]
            whole = 0 in shards[left_out].sizes
            said = manifest_module._unfit(manifest_module.SavedTensor("float32", shape, rest))
            assert (said == "") == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "this state is not JSON"),
        (b"\xff", "this state is not JSON"),
        (b"3", "this state holds a JSON int, not an object"),
        (b"[" * 100_000, "this state is not JSON (it is nested too deeply"),
        (b'{"iteration": ' + b"5" * 5000 + b"}", "this state is not JSON"),
        (b"{}", "version is None, but this code reads "),
        (json.dumps({"version": 99}).encode(), "version is 99, but this code reads "),
        (
            json.dumps({"version": VERSION, "iteration": 4}).encode(),
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
