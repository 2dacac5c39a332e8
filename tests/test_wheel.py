"""The package as a wheel: what is in it, installed where there is a compiler and where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_snip
from megatron_snip.cli.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "megatron_snip/quant/kernels/_cpu.so"
#: Runs in the installed wheel: the command's list, one of its modules, Megatron-LM's options, and a cast.
TRIAL = """
import sys
from pathlib import Path
import megatron_snip, torch
from megatron_snip.cli.__main__ import main
assert Path(megatron_snip.__file__).is_relative_to(sys.argv[1]), megatron_snip.__file__
assert main(["--version"]) == 0
from megatron_snip.megatron_options import without_megatrons
assert without_megatrons(["--swiglu", "--bf16"]) == ["--bf16"]
from megatron_snip.quant import fake_quantize
print(fake_quantize(torch.ones(128, 128), "fp8", role="weight", dim=1).sum().item())
"""


def build(folder: Path, **environment: str) -> Path:
    """The wheel of a copy of what it is made from."""
    source = folder / "source"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "megatron_snip", source / "megatron_snip", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder / "out"), str(source)]
    run(folder, "-m", "pip", *words, **environment)
    (wheel,) = (folder / "out").iterdir()
    return wheel


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python somewhere else than in the repository."""
    env = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    return done


def installed(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the installed wheel says to TRIAL; its console script lists every command."""
    target = folder / "site"
    run(folder, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    told = run(folder, str(target / "bin/megatron-snip"), "--help", PYTHONPATH=str(target))
    assert all(f"  {name}" in told.stdout for name in COMMANDS)
    return run(folder, "-c", TRIAL, str(target), PYTHONPATH=str(target))


def test_without_a_compiler_one_line_says_so(tmp_path):
    wheel = build(tmp_path, CC="no-compiler", CXX="no-compiler", CPLUS_INCLUDE_PATH="")
    names = zipfile.ZipFile(wheel).namelist()
    assert KERNEL not in names and {"megatron_snip/cli/evaluate.py", "megatron_snip/quant/kernels/cpu.h"} <= {*names}
    assert wheel.name.startswith(f"megatron_snip-{megatron_snip.__version__}-py3-none-")
    done = installed(wheel, tmp_path)
    assert done.stdout.split() == [megatron_snip.__version__, str(128.0 * 128)]
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("the CPU kernel is not built: ")


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes half a minute of a core
def test_with_a_compiler_the_kernel_is_there(tmp_path):
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler is here")
    wheel = build(tmp_path)
    assert KERNEL in zipfile.ZipFile(wheel).namelist()
    done = installed(wheel, tmp_path)
    assert done.stdout.split()[1] == str(128.0 * 128) and done.stderr == ""


def test_containers_name_what_is_there():
    """They are built nowhere in the tests."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert "megatron_snip" in copied and all((ROOT / word).exists() for word in copied)
    for path in (ROOT / ".devcontainer").rglob("devcontainer.json"):
        settings = json.loads(path.read_text())
        assert settings["postCreateCommand"]
        if "build" in settings:
            assert (path.parent / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
            assert (path.parent / settings["build"]["context"]).resolve() == ROOT
