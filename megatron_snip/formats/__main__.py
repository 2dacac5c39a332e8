"""``python -m megatron_snip.formats [name ...]``: print a table of formats."""

from __future__ import annotations

import sys

from megatron_snip.formats import ROW, Format, format_names, get_format

_HEADER = (
    "format",
    "element",
    "bits/element",
    "max",
    "min normal",
    "min subnormal",
    "input (dim 1)",
    "weight",
    "scale",
    "stochastic",
    "Hadamard",
    "recast",
)

_NUMBERS = ("max", "min_normal", "min_subnormal")


def _row(fmt: Format) -> tuple[str, ...]:
    """One row of the table.  The input tile is for reduction dim 1.  A second element is the gradients'."""
    recast = ", ".join(sorted(fmt.recast)) or "-"
    if fmt.element is None:
        return (fmt.name, "-", "16", *["-"] * (len(_HEADER) - 4), recast)
    shapes = [fmt.block_shape(role, 1) for role in ("input", "weight")]
    blocks = ["row" if ROW in shape else "x".join(map(str, shape)) for shape in shapes]
    numbers = ["/".join(f"{getattr(element, name):.6g}" for element in fmt.elements) for name in _NUMBERS]
    stochastic = ", ".join(sorted(fmt.stochastic_roles)) or "-"
    rest = (fmt.scale, stochastic, _transform(fmt), recast)
    names = "/".join(element.name for element in fmt.elements)
    return (fmt.name, names, f"{fmt.bits_per_element:.6g}", *numbers, *blocks, *rest)


def _transform(fmt: Format) -> str:
    """The transform's length and the GEMMs whose operands it transforms, such as "16 wgrad"."""
    return "-" if fmt.hadamard is None else f"{fmt.hadamard.length} {', '.join(sorted(fmt.hadamard.gemms))}"


def table(names: list[str]) -> str:
    """An aligned text table of the named formats.  Raises UserError for an unknown name."""
    rows = [_HEADER, *(_row(get_format(name)) for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Print the formats named on the command line, or all registered ones."""
    try:
        print(table(sys.argv[1:] or format_names()))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
