"""docs/site/pictures.py: the pictures of a run that was really made."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_all_pictures_of_a_run_are_drawn(finished_run: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/site/pictures.py")
    assert spec and spec.loader
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    pictures.draw(finished_run, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs/images").glob("snip_*.png")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
