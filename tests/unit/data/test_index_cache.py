"""The folder of indices: hits, damage, and a folder that cannot be written."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest

from megatron_snip.data.index_cache import array_hash, cached


class Counter:
    """A build function that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"a": np.arange(6, dtype=np.int32).reshape(3, 2), "b": np.arange(4, dtype=np.uint32)}


def same(arrays):
    expected = Counter()()
    return arrays.keys() == expected.keys() and all(
        np.array_equal(arrays[k], expected[k]) and arrays[k].dtype == expected[k].dtype for k in expected
    )


def test_built_once_for_each_description(tmp_path):
    build = Counter()
    assert same(cached(tmp_path, {"n": 1}, build)) and same(cached(tmp_path, {"n": 1}, build))
    assert build.calls == 1
    cached(tmp_path, {"n": 2}, build)
    assert build.calls == 2
    assert not any(p.suffix == ".tmp" for p in tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept(tmp_path):
    build = Counter()
    cached(None, {}, build), cached(None, {}, build)
    assert build.calls == 2 and list(tmp_path.iterdir()) == []


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_description(path):
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "description": {"n": 7}}))


def other_names(path):
    """An array of another folder, which is whole."""
    record = json.loads(path.read_text())
    (path.parent / "elsewhere").mkdir()
    (path.parent / f"{path.stem}.").mkdir()
    shutil.copy(path.with_suffix(".a.npy"), path.parent / "elsewhere/a.npy")
    arrays = {"/../elsewhere/a": record["arrays"]["a"], "b": record["arrays"]["b"]}
    path.write_text(json.dumps({**record, "arrays": arrays}))


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.b.npy", flip_last_byte),
        ("*.a.npy", lambda path: path.write_bytes(path.read_bytes()[:-4])),
        ("*.a.npy", lambda path: path.unlink()),
        ("*.a.npy", lambda path: path.write_bytes(b"")),
        ("*.json", lambda path: path.write_text("{")),
        ("*.json", lambda path: path.write_text("[]")),
        ("*.json", other_description),
        ("*.json", other_names),
        ("*.json", lambda path: path.write_text('{"description": {"n": 1}, "arrays": {"a": 5}}')),
    ],
)
def test_damage_is_seen_and_repaired(tmp_path, caplog, pattern, damage):
    build = Counter()
    cached(tmp_path, {"n": 1}, build)
    damage(next(tmp_path.glob(pattern)))
    with caplog.at_level(logging.WARNING):
        assert same(cached(tmp_path, {"n": 1}, build))
    assert build.calls == 2 and "damaged" in caplog.text
    assert same(cached(tmp_path, {"n": 1}, build)) and build.calls == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--data-cache-path .*file.* cannot be written"):
        cached(tmp_path / "file" / "cache", {}, Counter())


def test_array_hash_sees_values_and_dtype():
    a = np.arange(5, dtype=np.int32)
    assert array_hash(a) == array_hash(a.copy())
    assert len({array_hash(a), array_hash(a + 1), array_hash(a.astype(np.int64))}) == 3
