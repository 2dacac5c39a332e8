"""Show a plan as a table of blocks and linears, what it saves, and what changed against another plan.

    python tools/show_plan.py PLAN.json [--against OTHER.json]

Convention: a cell is the format of all three GEMMs, or fprop/dgrad/wgrad; "*" marks what differs from OTHER.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.snip.cost import block_of, saving
from megatron_snip.snip.plan import Plan

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def table(plan: Plan, other: Plan | None = None) -> str:
    """A line per block and a column per kind of linear; linears outside blocks follow, one a line."""
    found = dict.fromkeys(name.rpartition(".")[2] for name in plan.linears if block_of(name) is not None)
    kinds = [kind for kind in KINDS if kind in found] + [kind for kind in found if kind not in KINDS]
    rows: dict[int, dict[str, str]] = {}
    rest = []
    for name, precision in plan.linears.items():
        changed = other is not None and other.linears.get(name) != precision
        cell = f"{precision}{'*' if changed else ''}"
        block = block_of(name)
        if block is None:
            rest.append(f"{name}  {cell}")
        else:
            rows.setdefault(block, {})[name.rpartition(".")[2]] = cell
    heads = ["block", *(kind.removesuffix("_proj") for kind in kinds)]
    lines = [[str(block), *(row.get(kind, "-") for kind in kinds)] for block, row in sorted(rows.items())]
    widths = [max(map(len, column)) for column in zip(heads, *lines)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in [heads, *lines]]
    return "\n".join(line.rstrip() for line in [*text, *rest])


def overview(plan: Plan, other: Plan | None = None) -> str:
    """What the plan is, what it saves and how it was found, one fact a line."""
    counts = Counter(str(precision) for precision in plan.linears.values())
    shares = ", ".join(f"{option} {number}" for option, number in counts.most_common())
    mean = sum(saving(p) for p in plan.linears.values()) / max(1, len(plan.linears))
    solver = plan.solver
    lines = [
        f"plan {plan.hash} from iteration {plan.iteration}, objective {plan.objective}",
        f"{plan.achieved:.2%} of the linears' FLOPs in FP4 (target {plan.target:.2%})",
        f"{len(plan.linears)} linears: {shares}; {mean:.1%} of their GEMMs in FP4, sizes aside",
    ]
    if solver.status != "none":
        lines.append(
            f"solver: {solver.status}, objective {solver.objective:.6g}, bound {solver.bound:.6g}, "
            f"gap {solver.gap:.2e}, {solver.seconds:.2f} s"
        )
    if other is not None:
        lines.append(f"against plan {other.hash} of iteration {other.iteration}: {plan.churn(other):.1%} differ")
        if gone := sorted(other.linears.keys() - plan.linears.keys()):
            lines.append(f"only in the other plan: {', '.join(gone)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Show a plan, or what changed between two.")
    parser.add_argument("plan", type=Path, help="plan file, such as RUN_DIR/plans/iter_0000100.json")
    parser.add_argument("--against", type=Path, help="another plan to compare with")
    options = parser.parse_args(arguments)
    try:
        plan = Plan.load(options.plan)
        other = Plan.load(options.against) if options.against else None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{overview(plan, other)}\n\n{table(plan, other)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
