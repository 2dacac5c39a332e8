"""Show a plan as a table of blocks and linears, its savings, and its differences from another plan.

    megatron-snip show PLAN.json [--against OTHER.json]
    megatron-snip show PLAN.json --load runs/my/checkpoints

If you name the model (by --load or the trainer's options: --config FILE, --num-layers ...,
--pipeline-model-parallel-size), it also shows what each pipeline stage saves.

Convention: a cell is the format of all three GEMMs, or fprop/dgrad/wgrad; "*" marks what differs from OTHER.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_snip.cli import parsers
from megatron_snip.cli.command import reported
from megatron_snip.cli.tables import aligned
from megatron_snip.model.spec import linear_place
from megatron_snip.quant import KINDS
from megatron_snip.snip.plan.cost import by_stage, saving
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.run_folder import options_of
from megatron_snip.train.setup import snip_shapes


def table(plan: Plan, other: Plan | None = None) -> str:
    """A line per block and a column per kind of linear, then a line for each linear outside blocks."""
    places = {name: linear_place(name) for name in plan.linears}
    kinds = [kind for kind in KINDS if any(place and place[1] == kind for place in places.values())]
    rows: dict[int, dict[str, str]] = {}
    rest = []
    for name, precision in plan.linears.items():
        changed = other is not None and other.linears.get(name) != precision
        cell = f"{precision}{'*' if changed else ''}"
        if place := places[name]:
            rows.setdefault(place[0], {})[place[1]] = cell
        else:
            rest.append(f"{name}  {cell}")
    heads = ["block", *kinds]
    lines = [[str(block), *(row.get(kind, "-") for kind in kinds)] for block, row in sorted(rows.items())]
    return "\n".join([aligned([heads, *lines]), *rest])


def overview(plan: Plan, other: Plan | None = None) -> str:
    """The plan's origin, savings and solver, one fact per line."""
    counts = Counter(str(precision) for precision in plan.linears.values())
    shares = ", ".join(f"{option} {number}" for option, number in counts.most_common())
    mean = sum(saving(p) for p in plan.linears.values()) / max(1, len(plan.linears))
    solver = plan.solver
    lines = [
        f"plan {plan.hash} from iteration {plan.iteration}, objective {plan.objective}",
        f"{plan.achieved:.2%} of the linears' FLOPs in FP4 (target {plan.asked})",
        f"{len(plan.linears)} linears: {shares}; {mean:.1%} of their GEMMs in FP4 (by number)",
    ]
    if solver.status != "none":
        lines.append(
            f"solver: {solver.status}, objective {solver.objective:.6g}, bound {solver.bound:.6g}, "
            f"gap {solver.gap:.2e}, {solver.seconds:.2f} s"
        )
    if other is not None:
        lines.append(f"against plan {other.hash} of iteration {other.iteration}: {plan.churn(other):.1%} differ")
        both = [(other.linears[name], now) for name, now in plan.linears.items() if name in other.linears]
        moves = Counter(f"{then} -> {now}" for then, now in both if then != now)
        if moves:
            lines.append("changed: " + ", ".join(f"{move} {number}" for move, number in moves.most_common()))
        if gone := sorted(other.linears.keys() - plan.linears.keys()):
            lines.append(f"only in the other plan: {', '.join(gone)}")
    return "\n".join(lines)


def stages(plan: Plan, words: Sequence[str]) -> str:
    """A line per pipeline stage of the model in the trainer's options.  Raises UserError if the plan does not fit."""
    shapes = snip_shapes(options_of(words, ("model", "parallel")))
    plan.check_names(shape.name for shape in shapes)
    return "\n".join(
        f"stage {stage}: {share:.2%} in FP4, {taken:.3f} of the model's time in BF16 (nominal GEMM times)"
        for stage, (share, taken) in by_stage(shapes, plan.linears).items()
    )


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    options, rest = parsers.show().parse_known_args(arguments)
    plan = Plan.load(options.plan)
    other = Plan.load(options.against) if options.against else None
    each = f"\n{stages(plan, rest)}" if rest else ""
    print(f"{overview(plan, other)}{each}\n\n{table(plan, other)}")
    return 0
