"""The documents as a site: it builds without a warning, and what its pages quote is what the source says."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_snip import __version__

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "\0"


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= built
    assert "repository/SECURITY.md.txt" in built and "repository/examples/authors_workflow/run.sh.txt" in built
    api = (tmp_path / "site/api.html").read_text()
    assert all(f'id="megatron_snip.{name}"' in api for name in ("attach.attach", "attach.Snip.probe", "quant.quantize"))
    # a reader's browser asks no other host for anything
    index = (tmp_path / "site/index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)', index)
    assert f"megatron_snip {__version__}" in index
    # search works in a folder without a server: its index is a script, and so is what stands in for a Worker
    assert '<script src="assets/iframe-worker.js">' in index and "assets/iframe-worker.js" in built
    assert (tmp_path / "site/search/search_index.js").read_text().startswith("var __index = {")


def texts() -> list[str]:
    """Every string in the source, f-strings with a placeholder for each value, implicit joins joined."""
    found = []
    for path in [*(ROOT / "megatron_snip").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values]
                found.append("".join(map(str, parts)))
    return found


def quoted() -> list[str]:
    """The lines of the troubleshooting page."""
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


def says(text: str, line: str) -> bool:
    """Whether a message of the source reads like a quoted line, in which `...` stands for anything."""
    at = 0
    for part in line.split("..."):
        found = text.find(part.strip(), at)
        if found < 0:
            return False
        at = found + len(part.strip())
    return True


@pytest.fixture(scope="module")
def source() -> list[str]:
    return texts()


@pytest.mark.parametrize("line", quoted())
def test_a_quoted_line_is_in_the_source(line: str, source: list[str]) -> None:
    assert any(says(text, line) for text in source), f"no message reads like {line}"


def test_a_line_that_nobody_says_is_found_out(source: list[str]) -> None:
    assert len(quoted()) > 30
    assert not any(says(text, "no data: give --data-paths") for text in source)
    assert says(f"rank {PLACEHOLDER} was started with other options", "rank ... was started with")
    assert not says("was started with rank", "rank ... was started with")


def test_the_program_on_the_api_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported transformers."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    assert program and "range(120)" in program[1]
    fewer = program[1].replace("range(120)", "range(12)").replace("batch(16)", "batch(2)")
    assert fewer.count("batch(2)") == 1
    (tmp_path / "program.py").write_text(fewer)
    monkeypatch.setattr(sys, "argv", ["program.py", str(ROOT / "README.md")])
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    share = int(re.search(r"step 11: .* (\d+)% in FP4", capsys.readouterr().out)[1])
    assert 75 <= share < 100
