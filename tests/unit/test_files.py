"""Files are whole or absent."""

from __future__ import annotations

import pytest

from megatron_snip.files import atomic_output, temporary_beside


def test_file_appears_only_at_the_end(tmp_path):
    target = tmp_path / "made" / "a.txt"
    with atomic_output(target) as path:
        path.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="half"), atomic_output(target) as path:
        path.write_text("ne")
        raise RuntimeError("half")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_names_are_fresh(tmp_path):
    assert temporary_beside(tmp_path / "a") != temporary_beside(tmp_path / "a")
