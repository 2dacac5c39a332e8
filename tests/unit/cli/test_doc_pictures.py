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


def test_pictures_of_the_documents_are_small_and_the_gallery_shows_them_all():
    root = ROOT
    images = sorted((root / "docs/images").iterdir())
    assert images and all(path.stat().st_size < 150_000 for path in images)
    shown = (root / "docs/gallery.md").read_text()
    assert [
        path.name for path in images if path.name.startswith("snip_") and f"(images/{path.name})" not in shown
    ] == []
