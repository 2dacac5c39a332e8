"""One command for all: `megatron-snip COMMAND ...`, or `python -m megatron_snip.cli COMMAND ...`.

Under torchrun: `torchrun --rdzv-backend one_node --nproc_per_node N -m megatron_snip.cli COMMAND ...`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron_snip import __version__

#: Command -> (module whose ``main`` takes the remaining words, description).
COMMANDS = {
    "train": ("megatron_snip.cli.train", "pretrain a Llama or Qwen3 (pretrain_llama.py)"),
    "probe": ("megatron_snip.cli.collect_stats", "statistics of a checkpoint (tools/collect_stats.py)"),
    "plan": ("megatron_snip.cli.generate_plan", "a plan from statistics (tools/generate_plan.py)"),
    "report": ("megatron_snip.cli.report", "report.html of a run folder (tools/report.py)"),
    "convert": ("megatron_snip.cli.convert_checkpoint", "Hugging Face in and out (tools/convert_checkpoint.py)"),
    "evaluate": ("megatron_snip.cli.evaluate", "scores on benchmarks (tools/evaluate.py)"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: megatron-snip COMMAND ...", "", *lines, "", "COMMAND --help lists its options."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status, 2 for an unknown command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        print(f"unknown command {words[0]!r}; give one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    sys.argv = [f"megatron-snip {name}", *rest]  # argparse shows this name
    module = importlib.import_module(COMMANDS[name][0])
    if name in ("train", "report"):  # these print their errors themselves
        return module.main(rest) or 0
    from megatron_snip.runtime import report_errors

    with report_errors():
        return module.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
