"""The examples of loops that are not ours run as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/library"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("llama_adamw.py", ["--steps", "14", "--every", "3"], "step 13: loss "),
        ("trainer_callback.py", ["--steps", "14", "--output"], "75.0% of the linears' FLOPs in FP4"),
    ],
)
def test_examples(name, words, said, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    output = [str(tmp_path / "out")] if words[-1] == "--output" else []
    monkeypatch.setattr(sys, "argv", [name, "--data", str(text), *words, *output])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert said in capsys.readouterr().out
