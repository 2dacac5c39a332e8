"""The examples of docs/numerics.md run, and its table has the code's numbers."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_snip.formats import format_names, get_format

TEXT = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})


def test_the_table_is_that_of_the_formats():
    section = TEXT[TEXT.index("## Formats") : TEXT.index("## Blocks and scales")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "| `" in line]
    assert [row[0].strip("`") for row in rows] == format_names()
    for row in rows[1:]:
        fmt = get_format(row[0].strip("`"))
        element = fmt.element
        assert row[1] == element.name
        numbers = [2.0 ** int(cell[2:]) if cell.startswith("2^") else float(cell) for cell in row[2:6]]
        assert numbers == [element.max, element.min_normal, element.min_subnormal, fmt.bits_per_element]
        assert row[6:8] == ["x".join(map(str, fmt.block_shape(role, 1))) for role in ("input", "weight")]
        assert row[8:] == [fmt.scale, ", ".join(sorted(fmt.stochastic_roles)) or "-"]
