"""A group of linears that read one input: whoever runs a linear runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_snip

PACKAGE = Path(megatron_snip.__file__).parent


def users(source: str, attribute: str) -> list[str]:
    """Functions that read an attribute of that name, once for each time; of numpy's there is another."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and inner.attr == attribute and ast.unparse(inner.value) != "np"
    ]


def test_one_place_multiplies_for_each_gemm():
    assert users("def a(b):\n    return b.multiply()\n", "multiply") == ["a"], "or the list below proves little"
    found = {str(path.relative_to(PACKAGE)): users(path.read_text(), "multiply") for path in PACKAGE.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {
        "quant/linears/group.py": ["forward", "backward", "_wgrad"]
    }
