"""The last step of the authors' workflow: the schemes of one budget side by side.

    python examples/authors_workflow/compare.py runs/authors_workflow

A row for each run in DIR/schemes: FP4's share of the linears' FLOPs and the loss divergence that was predicted, both of
DIR/plans/pareto.json, and the validation loss at the last iteration, in the scheme's own precision, with its difference
from BF16's.  The table is printed and written to DIR/schemes.md.  Losses are nats a token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line
from megatron_snip.files.json import JsonFileError, Share, Text, checked, read_json, write_atomic
from megatron_snip.train.run.metrics import read_metrics

KEY = "lm loss validation"


class _Plan(msgspec.Struct):
    """What this table takes of a plan."""

    hash: Text | None = None
    fp4_share: Share | None = None
    loss_divergence: float | None = None


class _Plans(msgspec.Struct):
    """pareto.json."""

    plans: dict[str, _Plan]


def last_validation(run: Path, plan: str | None) -> tuple[int, float]:
    """Iteration and loss of a run's last validation.  UserError if it has none, or it ran under another plan's hash."""
    found = None
    for row in read_metrics(run / "metrics.jsonl"):
        if KEY in row:
            found = row["iteration"], row[KEY]
        if plan is not None and row.get("snip/plan_hash", plan) != plan:
            raise UserError(
                f"{run} trained under plan {row['snip/plan_hash']}, and the plan of this name is {plan}; "
                "remove this run and run the step schemes again, or give another WORKFLOW_DIR"
            )
    if found is None:
        raise UserError(f"{run} has no validation loss; let it train to its end with --eval-interval and --eval-iters")
    return found


def rows(folder: Path) -> list[list[str]]:
    """The table, the best validation loss first.  UserError if BF16 is missing or a scheme is not as far as it."""
    runs = {path.name: path for path in sorted((folder / "schemes").iterdir()) if (path / "metrics.jsonl").is_file()}
    if "bf16" not in runs:
        raise UserError(f"{folder / 'schemes'} has no run bf16 to compare with; run the step schemes first")
    file = folder / "plans/pareto.json"
    values = read_json(file, "table of plans", "run the step plans first")
    try:
        plans = checked(values, _Plans).plans
    except JsonFileError as error:
        raise UserError(f"{file}: {error}; run the step plans again") from None
    losses = {name: last_validation(path, plans[name].hash if name in plans else None) for name, path in runs.items()}
    end, reference = losses["bf16"]
    if late := [name for name, (iteration, _) in losses.items() if iteration != end]:
        raise UserError(f"{late[0]} ends at iteration {losses[late[0]][0]}, bf16 at {end}; run the step schemes again")
    shares = {"bf16": 0.0, "fp8": 0.0, "fp4": 1.0}
    table = []
    for name, (_, loss) in sorted(losses.items(), key=lambda item: item[1][1]):
        plan = plans.get(name, _Plan(fp4_share=shares.get(name)))
        share, predicted = plan.fp4_share, plan.loss_divergence
        told = ["-" if share is None else f"{share:.1%}", "-" if predicted is None else f"{predicted:.2e}"]
        table.append([name, *told, f"{loss:.4f}", f"{loss - reference:+.4f}"])
    return table


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the workflow's folder")
    folder = parser.parse_args().folder
    heads = ["scheme", "in FP4", "predicted", "validation loss", "against BF16"]
    try:
        table = [heads, ["---"] * len(heads), *rows(folder)]
        write_atomic(folder / "schemes.md", "".join(f"| {' | '.join(row)} |\n" for row in table))
    except (UserError, OSError) as error:
        print(f"compare: {one_line(error)}", file=sys.stderr)
        return 1
    print((folder / "schemes.md").read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
