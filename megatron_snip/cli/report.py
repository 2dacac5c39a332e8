"""Print a run's summary and write report.html, from the run folder.  The run may still be in progress.

    megatron-snip report runs/my
    megatron-snip report runs/snip runs/bf16 runs/fp8 --compare

Each run gets its own report.  --compare writes one report for the first run, with the losses of the others and the
difference from each: compare.html in the first run's folder, unless you give --output.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_snip.cli import parsers
from megatron_snip.cli.command import reported
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.train.report.run_summary import format_summary
from megatron_snip.train.report.sections import compared, write_report


def report(runs: Sequence[str], compare: bool, output: str | None) -> str:
    """Write the reports and return the text for the terminal.  Raises UserError for conflicting options."""
    if compare and len({Path(run).resolve() for run in runs}) < max(2, len(runs)):
        raise UserError(f"--compare needs two or more different runs, but got {' '.join(runs)}; name another folder")
    if output and not compare and len(runs) > 1:
        raise UserError(f"--output {output} is one file, but there are {len(runs)} reports; give --compare, or one run")
    name = "compare.html" if compare else "report.html"
    jobs = [(runs[0], runs[1:])] if compare else [(run, ()) for run in runs]
    shown = []
    for run, others in jobs:
        file = Path(output) if output else Path(run) / name
        check_output("--output" if output else "the report", file)
        shown.append(f"{format_summary(run)}\n\n{write_report(run, others, file)}")
    return "\n\n".join([*shown[:-1], compared(runs), shown[-1]] if compare else shown)


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    own = parsers.report().parse_intermixed_args(arguments)
    print(report(own.runs, own.compare, own.output))
    return 0
