"""The documents' commands: each is run here, launched with a stand-in for torchrun, or checked word by word."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_snip import megatron_options
from megatron_snip.cli.__main__ import COMMANDS, main
from megatron_snip.config import option_groups
from megatron_snip.train.run.metrics import metrics_file, read_metrics
from tests.test_examples import WORLD_SIZES, check_command_line, environment, stubs

__all__ = ["stubs"]  # a fixture

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
TEST_COMMAND = "bash tests/run.sh"  # it runs this very test


def commands(text: str) -> list[str]:
    """Commands of the ```bash blocks, continued lines joined, comments dropped."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
#: All commands of all pages, each once.
README = [*dict.fromkeys(command for page in PAGES for command in commands(page.read_text()))]


@functools.cache
def help_of(name: str) -> str:
    """What a Python script or a command of megatron-snip says to --help; in this process, since each imports torch."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [name, "--help"])
        if name.endswith(".py"):
            patch.setattr(sys, "path", [str((ROOT / name).parent), *sys.path])
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            sys.exit(main([name, "--help"]))
    assert not end.value.code, (name, end.value.code)
    return said.getvalue()


def split_environment(command: str) -> tuple[dict[str, str], list[str]]:
    """Leading NAME=value words and the rest of a command."""
    words = shlex.split(command)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def launched(command: str, stubs: Path, folder: Path) -> tuple[str, int]:
    """Run a launch command with the stand-in for torchrun; the output and world size it would have."""
    variables, words = split_environment(command)
    if "--config" in words and not (ROOT / words[words.index("--config") + 1]).exists():
        # what tools/convert_checkpoint.py import writes: the options of the model, without the length of a sample
        model = (ROOT / "examples/llama_1b/llama_1b.toml").read_text().partition("[model]")[2].partition("\n[")[0]
        model = re.sub("\nseq-length.*", "", model)
        (folder / "model.toml").write_text(model)
        words[words.index("--config") + 1] = str(folder / "model.toml")
    data, run = str(folder / "data"), str(folder / "run")
    for name in ("text", "tokenizer", "tokens"):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    env = environment(stubs, **variables, QUICKSTART_DATA=data, QUICKSTART_RUN=run)
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, check_command_line(done.stdout)[1]


def check_options(words: list[str]) -> None:
    """The help of a script or command has all its options here; the trainer's own may follow a command's."""
    text, options = help_of(words[0]), {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    taken = options - {f"--{name.replace('_', '-')}" for name in option_groups()} if words[0] in COMMANDS else options
    missing = [option for option in sorted(taken) if option not in text]
    assert not missing, f"{words[0]} --help does not tell {missing}"


def workflow_script() -> str:
    """The script of the authors' workflow, with a line for each of its steps."""
    script = (ROOT / "examples/authors_workflow/run.sh").read_text()
    steps = re.search(r"^    (prepare[ |a-z]+)\)", script, re.MULTILINE)
    assert steps
    return script + "".join(f"    {step.strip()})\n" for step in steps[1].split("|"))


@pytest.mark.parametrize("command", README)
def test_command(command: str, stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    variables, words = split_environment(command)
    if command == TEST_COMMAND:
        return
    if words[:2] == ["bash", "examples/quickstart.sh"]:
        assert launched(command, stubs, tmp_path)[1] == 4
    elif words[0] == "bash" and words[1].startswith("examples/llama_"):
        assert launched(command, stubs, tmp_path)[1] == WORLD_SIZES[Path(words[1]).parent.name]
    elif words[0] == "torchrun" and "megatron_snip.cli" in words and "train" not in words:
        check_options(words[words.index("megatron_snip.cli") + 1 :])
    elif words[0] == "torchrun":
        launched(command, stubs, tmp_path)
    elif words[0] == "megatron-snip":
        assert not words[1:] or words[1] in COMMANDS
        check_options(words[1:] or ["train"])
    elif words == ["source", ".venv/bin/activate"]:
        assert ".venv" in (ROOT / "tools/set_up.sh").read_text()  # which makes it
    elif words[0] == "sbatch":
        assert all((ROOT / word).is_file() for word in words[1:] if not word.startswith("--"))
    elif words[:2] == ["bash", "examples/authors_workflow/run.sh"]:
        script = workflow_script()
        assert f"    {words[2] if len(words) > 2 else 'all'})" in script
        assert variables.keys() <= set(re.findall("WORKFLOW_[A-Z]+", script))
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[2] == "-e" and set(words[3].removeprefix(".[").removesuffix("]").split(",")) <= extras.keys()
    elif words[:2] == ["hf", "download"]:
        options = {word for word in words if word.startswith("--")}
        assert options <= {"--repo-type", "--include", "--local-dir"}
        assert words[words.index("--repo-type") + 1] == "dataset"
    elif words[:2] == ["python", "-m"]:
        text = (ROOT / f"{words[2].replace('.', '/')}.py").read_text()
        assert all(f'"{word}"' in text for word in words[3:] if word.startswith("--"))
    elif words[0] == "python":
        check_options(words[1:])
    else:
        pytest.fail(f"no check for this command: {command}; add one")


def test_commands_are_found() -> None:
    text = "a\n```bash\nA=1 bash x.sh \\\n    --y 1  # why\n\n# nothing\npython z.py\n```\n```python\nno\n```\n"
    assert commands(text) == ["A=1 bash x.sh --y 1", "python z.py"]
    assert split_environment("A=1 B=2 bash x.sh C=3") == ({"A": "1", "B": "2"}, ["bash", "x.sh", "C=3"])
    assert TEST_COMMAND in README and "bash examples/quickstart.sh" in README


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    gone = [link for link in links if "://" not in link and not (path.parent / link.partition("#")[0]).exists()]
    assert not gone


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_named_in_prose_exist(path: Path) -> None:
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    words = re.findall(r"`[^`\n]*`", prose)
    options = {option for word in words for option in re.findall(r"--([a-z][a-z0-9-]+)", word)}
    names = {name.replace("_", "-") for name in option_groups()}
    if path.name == "from_megatron.md":
        names |= set().union(*megatron_options.tables()[:4])
    scripts = [path for folder in ("tools", "benchmarks", "megatron_snip/cli") for path in (ROOT / folder).glob("*.py")]
    names |= {option for script in scripts for option in re.findall(r'"--([a-z][a-z-]+)"', script.read_text())}
    known = (
        names
        | {f"no-{name}" for name in names}
        | {
            "help",
            "all",
            "config",
            "fast",
            "fresh",
            "gpus-per-task",
            "max-restarts",
            "rdzv-backend",
            "standalone",
        }
    )
    assert options <= known


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_quickstart_runs_and_goes_on(twice: bool, tmp_path: Path) -> None:
    """The real quickstart, all steps and four processes, cut short; or in two starts, of which the second goes on.

    Iterations, probes and trials have a quarter of the tokens; the model is the quickstart's.
    """
    data, run = tmp_path / "data", tmp_path / "run"
    env = environment(tmp_path, QUICKSTART_DATA=str(data), QUICKSTART_RUN=str(run), QUICKSTART_BYTES="1500000")
    options = "--train-iters 3 --snip-start 2 --snip-interval 2 --snip-apply-lag 1 --eval-interval 3 --eval-iters 1"
    options += " --seq-length 128 --global-batch-size 4 --snip-probe-tokens 512"
    options += " --snip-trials 2 --snip-trial-tokens 512"

    def quickstart(*more: str) -> str:
        words = ["bash", str(ROOT / "examples/quickstart.sh"), *options.split(), *more]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output = quickstart(*(["--exit-interval", "2"] if twice else []))
    made = {path: os.stat(path).st_mtime_ns for path in data.rglob("*") if path.is_file()}
    assert {path.name for path in made} >= {"train.jsonl", "tokenizer.model", "train_text_document.bin"}
    if twice:
        output = quickstart("--no-preflight")
    assert str(run / "report.html") in output
    assert (run / "report.html").is_file()
    rows = read_metrics(metrics_file(run))
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["snip/plan_hash"]
    assert list((run / "plans").glob("iter_*.json"))
    assert made == {path: os.stat(path).st_mtime_ns for path in data.rglob("*") if path.is_file()}
