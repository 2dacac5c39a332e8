"""The package as a wheel: what is in it, installed where there is a compiler and where there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import megatron_snip
from megatron_snip.cli.__main__ import COMMANDS
from megatron_snip.quant import kernels

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
    assert KERNEL not in names and {
        "megatron_snip/cli/evaluate.py",
        "megatron_snip/quant/kernels/cpu.h",
        "megatron_snip/train/report/templates/page.html",
    } <= {*names}
    assert wheel.name.startswith(f"megatron_snip-{megatron_snip.__version__}-py3-none-")
    done = installed(wheel, tmp_path)
    assert done.stdout.split() == [megatron_snip.__version__, str(128.0 * 128)]
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("the CPU kernel is not built: ")


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes half a minute of a core
def test_a_release_has_a_kernel_that_needs_glibc_alone(tmp_path):
    if sys.platform != "linux" or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler is here, or this is no Linux")
    release(tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    tags = run(tmp_path, "-m", "auditwheel", "show", str(wheel)).stdout
    assert "GLIBC_" in tags and "GLIBCXX" not in tags, "the newest C++ runtime is on few machines"
    assert KERNEL in zipfile.ZipFile(wheel).namelist()
    done = installed(wheel, tmp_path)
    assert done.stdout.split()[1] == str(128.0 * 128) and done.stderr == ""


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """What tools/build_release.sh makes, with the kernel of this environment: the folder of a wheel and an sdist."""
    kernel = Path(kernels.__file__).with_name("_cpu.so")
    if sys.platform != "linux" or not kernel.is_file():
        pytest.skip("a manylinux tag needs Linux and a compiled kernel")
    folder = tmp_path_factory.mktemp("release")
    release(folder / "dist", KERNEL=str(kernel))
    return folder / "dist"


def release(folder: Path, **environment: str) -> None:
    """Run the script that builds a release."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SKIP_SET_UP": "1", **environment}
    command = ["bash", str(ROOT / "tools/build_release.sh"), str(folder)]
    done = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr


def test_a_release_is_a_wheel_that_an_index_takes_and_a_source_distribution(released, tmp_path):
    wheel, sdist = sorted(path.name for path in released.iterdir())
    version = megatron_snip.__version__
    assert re.fullmatch(rf"megatron_snip-{version}-py3-none-manylinux_2_\d+_\w+\.whl", wheel)
    assert sdist == f"megatron_snip-{version}.tar.gz"
    with tarfile.open(released / sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "megatron_snip/quant/kernels/cpu.cpp", "megatron_snip/megatron_options.toml"} <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".so")]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SKIP_SET_UP": "1"}
    again = ["bash", str(ROOT / "tools/build_release.sh"), str(released)]
    done = subprocess.run(again, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith(f"error: {released} is not empty; give a new folder\n")


def fresh(folder: Path, wheel: Path) -> Path:
    """A new virtual environment with the wheel, and the dependencies of this one: its folder of programs."""
    run(folder, "-m", "venv", "--without-pip", str(folder / "env"))
    (site,) = (folder / "env").glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # without what is editable there
    words = ["install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    run(folder, "-m", "pip", "--python", str(folder / "env/bin/python"), *words)
    return folder / "env/bin"


@pytest.mark.dist
def test_the_wheel_alone_runs_the_quickstarts_job(released, tmp_path):
    """Text, tokenizer, tokens and a plan, outside the repository and without a compiler.

    One process of a smaller model: test_readme.py starts the quickstart's four.
    """
    (wheel,) = released.glob("*.whl")
    programs, text = fresh(tmp_path, wheel), tmp_path / "text"
    text.mkdir()
    for name in ("arguments.py", "config.py", "attach.py", "runtime.py", "mesh.py"):
        shutil.copy(ROOT / "megatron_snip" / name, text)
    shutil.copy(ROOT / "examples/quickstart.toml", tmp_path)
    env = {"PATH": str(programs), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CXX": "no-compiler"}

    def command(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    snip = str(programs / "megatron-snip")
    command(snip, "gather", "--source", "text", "--min-bytes", "1", "--valid-fraction", "0", "--output", "gathered")
    command(snip, "tokenizer", "--input", "gathered/train.jsonl", "--vocab-size", "512", "--output-prefix", "tok")
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "tok.model"]
    command(
        snip, "preprocess", "--input", "gathered/train.jsonl", "--output-prefix", "data", "--append-eod", *tokenizer
    )
    python = [str(programs / "python"), "-m", "torch.distributed.run", "--rdzv-backend", "one_node"]
    data = ["--train-data-path", "data_text_document", "--valid-data-path", "data_text_document", *tokenizer]
    few = "--train-iters 3 --snip-start 2 --snip-interval 9 --snip-apply-lag 1 --eval-interval 3 --eval-iters 1"
    few += " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-sequence-parallel --num-layers 2"
    few += " --global-batch-size 2 --snip-probe-tokens 512 --snip-trials 2 --snip-trial-tokens 512"
    job = ["-m", "megatron_snip.cli", "train", "--config", "quickstart.toml", *data, "--run-dir", "run", *few.split()]
    told = command(*python, "--nproc_per_node", "1", *job)
    assert (tmp_path / "run/report.html").is_file() and list((tmp_path / "run/plans").glob("iter_*.json")), told
    assert "the CPU kernel is not built" not in told
    place = command(str(programs / "python"), "-c", "import megatron_snip; print(megatron_snip.__file__)")
    assert Path(place.strip()).is_relative_to(tmp_path / "env")


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
