"""The command for all, and that help waits for nothing slow."""

from __future__ import annotations

import importlib
import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_snip
from megatron_snip.arguments import FIRST, parse
from megatron_snip.cli.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]


def test_it_lists_what_there_is(capsys):
    assert main(["--help"]) == 0 and main([]) == 2
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out == megatron_snip.__version__ + "\n"


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == f"unknown command 'trian'; give one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gives_its_words_to_its_main(name, monkeypatch):
    module = importlib.import_module(COMMANDS[name][0])
    assert len(inspect.signature(module.main).parameters) == 1
    seen = []
    monkeypatch.setattr(module, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert main([name, "--a", "b"]) == 0 and seen == [["--a", "b"]]
    assert sys.argv == [f"megatron-snip {name}", "--a", "b"]


def test_a_failure_is_the_status_of_the_command_and_of_its_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(importlib.import_module("megatron_snip.cli.generate_plan"), "main", lambda words: 1)
    assert main(["plan"]) == 1
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools/generate_plan.py"), run_name="__main__")
    assert ended.value.code == 1


def test_the_version_stands_in_one_place():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'attr = "megatron_snip.__version__"' in project


def test_a_reader_that_stops_reading_help_sees_no_traceback():
    words = [sys.executable, "pretrain_llama.py", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 0


@pytest.mark.parametrize("words", [["pretrain_llama.py"], ["-m", "megatron_snip.cli", "train"]])
def test_help_begins_with_what_matters_and_imports_no_torch(words):
    code = (
        "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); w = sys.argv[1:]; "
        "m = w[0] == '-m'; sys.argv = w[m:] + ['--help']; "
        "(runpy.run_module if m else runpy.run_path)(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "False", done.stderr
    begins = [line.split()[0] for line in lines[1:11]]
    assert begins == ["--config", *(f"--{name.replace('_', '-')}" for name in FIRST)]
    assert "─ snip options ─" in done.stdout


@pytest.mark.slow
def test_help_beside_an_unknown_option_is_one_line():
    command = [sys.executable, "pretrain_llama.py", "--help", "--gloabl-batch-size", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean --global-batch-size?" in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_options_that_matter_first_say_something(capsys):
    with pytest.raises(SystemExit):
        parse(["-h"])
    lines = capsys.readouterr().out.splitlines()[1:11]
    assert len(FIRST) == 9 and all(len(line) < 121 and line[29:].strip() for line in lines)
