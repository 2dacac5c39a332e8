"""The command for all, and that help waits for nothing slow."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_snip
from megatron_snip.arguments import FIRST, parse
from megatron_snip.cli.__main__ import COMMANDS, ON_RANKS, main
from megatron_snip.cli.convert_checkpoint import DTYPES
from megatron_snip.cli.parsers import PARSERS
from megatron_snip.interop.exports import TARGETS

ROOT = Path(__file__).resolve().parents[3]


def test_it_lists_what_there_is(capsys):
    assert main(["--help"]) == 0 and main([]) == 2
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out == megatron_snip.__version__ + "\n"


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == f"error: there is no command 'trian'; give one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gives_its_words_to_its_main(name, monkeypatch):
    module = importlib.import_module(f"megatron_snip.{COMMANDS[name][0]}")
    assert len(inspect.signature(module.main).parameters) == 1
    seen = []
    monkeypatch.setattr(module, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert main([name, "--a", "b"]) == 0 and seen == [["--a", "b"]]
    assert sys.argv == [f"megatron-snip {name}", "--a", "b"]


def test_a_failure_is_the_status_of_the_command_and_of_its_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(importlib.import_module("megatron_snip.cli.show_plan"), "main", lambda words: 7)
    assert main(["show"]) == 7
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools/show_plan.py"), run_name="__main__")
    assert ended.value.code == 7


def test_every_script_of_tools_is_a_command():
    doors = {path.stem: path.read_text() for path in (ROOT / "tools").glob("*.py")}
    modules = {module.partition(".")[2]: name for name, (module, _) in COMMANDS.items() if name != "train"}
    assert doors.keys() == modules.keys()
    assert all(f'script("{name}")' in doors[module] for module, name in modules.items())


#: What each command says to --help, and whether that imports torch.
ASK = """
import contextlib, io, json, sys
from megatron_snip.cli.__main__ import COMMANDS, main
found = {}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([name, "--help"])
    found[name] = said.getvalue()
found["torch"] = "torch" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps():
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_commands_name_and_no_default_of_what_is_required(name, helps):
    assert f"usage: megatron-snip {name} " in helps[name].replace("\n", " ")
    assert not re.search(r"required\W*(│\s*│\s*)?\(default", helps[name])
    assert "python tools/" not in helps[name], "an installed package has no such folder"


def test_help_of_no_command_imports_torch(helps):
    assert helps["torch"] is False


def test_choices_are_what_there_is():
    def choices(parser, dest):
        return next(action.choices for action in parser._actions if action.dest == dest)

    assert [*choices(PARSERS["export"](), "to")] == [*TARGETS]
    assert [*choices(choices(PARSERS["convert"](), "which")["export"], "dtype")] == [*DTYPES]


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - ON_RANKS - {"train"}))
def test_a_mistake_is_one_line_with_the_same_status_and_beginning(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"])
    assert main([name, "--gloabl-batch-size"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "--help lists" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_RANKS | {"train"}))
def test_so_it_is_with_commands_on_many_ranks(name):
    words = [sys.executable, "-m", "megatron_snip.cli", name, "--gloabl-batch-size", "3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_the_version_stands_in_one_place():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'attr = "megatron_snip.__version__"' in project


@pytest.mark.parametrize("program", ["pretrain_llama.py --help", "tools/gather_text.py --source docs --min-bytes 1"])
def test_a_reader_that_stops_reading_sees_no_traceback(program, tmp_path):
    words = [sys.executable, *program.split(), *(["--output", str(tmp_path)] if "gather" in program else [])]
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
