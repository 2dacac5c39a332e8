"""Rules of the source tree, each a function over source text so that a bad snippet can show it going red.

docs/architecture.md has the import order, CONTRIBUTING.md the other rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_snip"
MAX_FILE, MAX_FUNCTION = 400, 60
# Lower may not import higher, and neighbours of one level may not import each other.
LEVELS = [
    {"errors", "faults"},
    {"formats", "files", "config"},
    {"megatron_options", "runtime", "mesh"},
    {"arguments", "quant"},
    {"parallel"},
    {"model", "data", "snip", "checkpoint"},
    {"interop"},
    {"attach", "train"},
    {"cli", "integrations"},
    {"tools", "pretrain_llama"},
]
SHAPED = ("quant", "parallel", "model")  # tensor functions here name their shapes
UNTOLD_METHODS = {"forward", "backward", "setup_context"}  # torch calls them; their class tells them

Rule = Callable[[str, str], list[str]]


def python_files(*folders: str) -> list[Path]:
    """Python files under the folders of the repository; a name that ends in .py is a file."""
    files: list[Path] = []
    for folder in folders:
        path = ROOT / folder
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return files


def module_name(path: Path) -> str:
    """megatron_snip/quant/casts/cast.py -> megatron_snip.quant.casts.cast"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, lazy ones too; `from a import b` gives a.b, a relative one .b."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def unit_of(name: str) -> str | None:
    """The unit of LEVELS that a dotted name belongs to; None for the package itself and for others."""
    parts = name.split(".")
    if parts[0] == PACKAGE:
        return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else None
    return parts[0] if parts[0] in {"tools", "pretrain_llama"} else None


def import_order(source: str, module: str) -> list[str]:
    """Imports that go up or sideways, and relative ones, which hide where they go."""
    level = {unit: i for i, units in enumerate(LEVELS) for unit in units}
    me = unit_of(module)
    problems = [] if me in level or module == PACKAGE else [f"{module}: {me} has no place in the import order"]
    for line, name in imported(source):
        if name.startswith("."):
            problems.append(f"{module}:{line} imports {name}; write the full name")
            continue
        other = unit_of(name)
        if other is None or other == me:
            continue
        if other not in level or me not in level or level[other] >= level[me]:
            problems.append(f"{module}:{line} {me or module} may not import {other}")
    return problems


def file_size(source: str, module: str) -> list[str]:
    """Files that are too long."""
    lines = len(source.splitlines())
    return [f"{module} has {lines} lines, more than {MAX_FILE}"] if lines > MAX_FILE else []


def function_size(source: str, module: str) -> list[str]:
    """Functions that are too long, docstring included."""
    return [
        f"{module}:{node.lineno} {node.name} has {size} lines, more than {MAX_FUNCTION}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION
    ]


def public_definitions(source: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, ast.ClassDef | None]]:
    """Public classes, functions and methods of a module, each with its class; nested ones are left out."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node, None
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                        yield member, node


def docstrings(source: str, module: str) -> list[str]:
    """Modules and public definitions that say nothing about themselves."""
    problems = [] if ast.get_docstring(ast.parse(source)) else [f"{module} has no docstring"]
    for node, owner in public_definitions(source):
        if owner is not None and node.name in UNTOLD_METHODS:
            continue
        if not ast.get_docstring(node):
            problems.append(f"{module}:{node.lineno} {node.name} has no docstring")
    return problems


def shapes(source: str, module: str) -> list[str]:
    """Public functions of tensors whose docstring (or their class's) names no shape in brackets."""
    problems = []
    for node, owner in public_definitions(source):
        if not isinstance(node, ast.FunctionDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if not any(a.annotation and "Tensor" in ast.unparse(a.annotation) for a in arguments):
            continue
        told = (ast.get_docstring(node) or "") + ((ast.get_docstring(owner) or "") if owner else "")
        if "[" not in told:
            problems.append(f"{module}:{node.lineno} {node.name} takes tensors and names no shape")
    return problems


def environment_reads(source: str, module: str) -> list[str]:
    """Uses of os.environ or os.getenv."""
    return [
        f"{module}:{node.lineno} touches the environment; runtime.py is the only place for that"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in {"environ", "getenv", "environb"} for alias in node.names)
        )
    ]


def mutable_state(source: str, module: str) -> list[str]:
    """Module-level lists, dicts and sets that are no UPPER_CASE constant, and `global` statements."""
    containers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    tree = ast.parse(source)
    problems = [
        f"{module}:{node.lineno} global {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        mutable = isinstance(value, literals) or (
            isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in containers
        )
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            if mutable and not name.isupper() and not name.startswith("__"):
                problems.append(f"{module}:{node.lineno} {name} is mutable module-level state")
    return problems


def machine_paths(source: str, module: str) -> list[str]:
    """Absolute paths that exist on one machine only."""
    pattern = re.compile(r"(?<![\w.}$])/(?:work|root|home|opt|Users|mnt)/\w")
    return [
        f"{module}:{number} names a machine's path: {line.strip()[:80]}"
        for number, line in enumerate(source.splitlines(), 1)
        if pattern.search(line)
    ]


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Import cycles of a graph module -> imported modules, each once, as a -> b -> a."""
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            loop = path[path.index(module) :]
            found.setdefault(frozenset(loop), " -> ".join([*loop, module]))
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return sorted(found.values())


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which of the modules (name -> source) import which."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = {name if name in sources else name.rpartition(".")[0] for _, name in imported(source)}
        graph[module] = found & sources.keys() - {module}
    return graph


PROGRAM = (PACKAGE, "tools", "pretrain_llama.py")
ALL = (*PROGRAM, "setup.py", "tests", "benchmarks", "examples")
HOME = "/".join(["", "home", "someone", "data"])
# rule -> the files it holds for, and a snippet (with the module it would stand in) that breaks it.
RULES: dict[Rule, tuple[tuple[str, ...], str, str]] = {
    import_order: (
        PROGRAM,
        "def f():\n    from megatron_snip.train import loop\n",
        "megatron_snip.quant.casts.cast",
    ),
    file_size: (ALL, "x = 1\n" * (MAX_FILE + 1), "a"),
    function_size: (ALL, "def f():\n" + "    x = 1\n" * MAX_FUNCTION, "a"),
    docstrings: (PROGRAM, '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...\n', "a"),
    shapes: (
        tuple(f"{PACKAGE}/{unit}" for unit in SHAPED),
        '"""M."""\ndef f(x: Tensor | None):\n    """Halve x."""\n',
        "a",
    ),
    environment_reads: (PROGRAM, "from os import environ\n", "a"),
    mutable_state: (PROGRAM, "cache: dict[str, int] = {}\n", "a"),
    machine_paths: (ALL, f"PATH = '{HOME}'\n", "a"),
}
EXEMPT = {
    environment_reads: {f"{PACKAGE}.runtime"},
    file_size: {f"{PACKAGE}.config"},  # the one table of all options, a line or two each
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule: Rule) -> None:
    problems: list[str] = []
    for path in python_files(*RULES[rule][0]):
        module = module_name(path)
        if module not in EXEMPT.get(rule, ()):
            problems += rule(path.read_text(), module)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_goes_red_on_a_bad_snippet(rule: Rule) -> None:
    _, snippet, module = RULES[rule]
    assert len(rule(snippet, module)) == 1


@pytest.mark.parametrize(
    ("rule", "snippet", "module"),
    [
        (import_order, "from megatron_snip.model import llama\n", "megatron_snip.snip.stats"),
        (import_order, "from megatron_snip.data import loader\n", "megatron_snip.model.llama"),
        (import_order, "import megatron_snip.data.loader\n", "megatron_snip.model.llama"),
        (import_order, "from megatron_snip import mesh\n", "megatron_snip.runtime"),
        (import_order, "from .llama import Llama\n", "megatron_snip.model.flops"),
        (import_order, "from megatron_snip import config\n", "megatron_snip"),
        (import_order, '"""A new unit."""\n', "megatron_snip.utilities.paths"),
        (import_order, "import tools.evaluate\n", "megatron_snip.train.loop"),
        (environment_reads, "import os\nx = os.environ['A']\n", "a"),
        (environment_reads, "import os\nX = os.getenv('A')\n", "a"),
        (mutable_state, "def f():\n    global x\n    x = 1\n", "a"),
        (mutable_state, "seen = set()\n", "a"),
        (docstrings, "def _f(): ...\n", "a"),
    ],
)
def test_more_bad_snippets(rule: Rule, snippet: str, module: str) -> None:
    assert len(rule(snippet, module)) == 1


def test_no_import_cycles() -> None:
    sources = {module_name(path): path.read_text() for path in python_files(*PROGRAM)}
    assert not cycles(import_graph(sources))


def test_a_cycle_is_found() -> None:
    sources = {
        "p.a": "def f():\n    from p import b\n",
        "p.b": "from p.c import x\n",
        "p.c": "import p.a\n",
        "p": "",
    }
    assert cycles(import_graph(sources)) == ["p.a -> p.b -> p.c -> p.a"]


def test_text_files_name_no_machine() -> None:
    suffixes = {".sh", ".sbatch", ".toml", ".md", ".txt", ".yaml", ".cpp", ".h", ".cu"}
    folders = ("megatron_snip", "tools", "tests", "examples", "benchmarks", "docs", "requirements")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    files += [p for p in ROOT.iterdir() if p.suffix in suffixes]
    problems = [x for p in files for x in machine_paths(p.read_text(), str(p.relative_to(ROOT)))]
    assert not problems, "\n".join(problems)


def test_the_solver_starts_without_torch() -> None:
    code = "import sys, megatron_snip.snip.plan.ilp; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_requirements_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().split()]
    pinned = {line.partition("==")[0].replace("-", "_") for line in lines if "==" in line}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["evaluate"]]
    names = {re.split(r"[<>=\[ ]", requirement)[0].replace("-", "_") for requirement in wanted}
    assert not names - pinned


def test_pytest_goes_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """Folders called `dist` are among those that it leaves out by itself."""
    files = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    folders = {parent.name for path in files for parent in path.parents if parent.name}
    assert "dist" in folders
    patterns = pytestconfig.getini("norecursedirs")
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in patterns)] == []
