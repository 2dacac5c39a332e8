"""One command for all: `megatron-snip COMMAND ...`, or `python -m megatron_snip.cli COMMAND ...`.

Under torchrun: `torchrun --rdzv-backend one_node --nproc_per_node N -m megatron_snip.cli COMMAND ...`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from megatron_snip import __version__
from megatron_snip.arguments import asks_for_help
from megatron_snip.cli.parsers import PARSERS
from megatron_snip.errors import UserError

#: Command -> (module of the package whose ``main`` takes the remaining words, description).
COMMANDS = {
    "train": ("cli.train", "pretrain a Llama or Qwen3 in mixed FP4 and FP8"),
    "probe": ("cli.collect_stats", "collect a checkpoint's statistics, from which plans are made"),
    "plan": ("cli.generate_plan", "make plans from statistics, and baselines to compare with"),
    "show": ("cli.show_plan", "show a plan as a table, or what differs from another"),
    "analyse": ("cli.analyse", "measure what FP4 and FP8 would cost in each linear of a model"),
    "export": ("cli.export_plan", "write a plan for Megatron-LM, torchtitan, Transformer Engine, ModelOpt or torchao"),
    "convert": ("cli.convert_checkpoint", "turn a Hugging Face model into a checkpoint, or a checkpoint into one"),
    "evaluate": ("cli.evaluate", "score a model on benchmarks"),
    "report": ("cli.report", "write the report of a run, or compare runs"),
    "dashboard": ("cli.wandb_dashboard", "make a wandb workspace for runs"),
    "profile": ("cli.profile_gemms", "time the GEMMs of a model on this machine, for plans that save time"),
    "gather": ("cli.gather_text", "gather text that is already on this machine"),
    "tokenizer": ("cli.train_tokenizer", "train a sentencepiece tokenizer"),
    "preprocess": ("cli.preprocess_data", "tokenise text into Megatron's datasets"),
    "merge": ("cli.merge_datasets", "merge datasets into one"),
}
#: Commands whose ``main`` raises its errors: they may run on many ranks, and one of these reports.
ON_RANKS = {"probe", "plan", "analyse", "convert", "evaluate"}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: megatron-snip COMMAND ...", "", *lines, "", "COMMAND --help lists its options."])


def run(name: str, words: Sequence[str]) -> int:
    """Run a command.  Returns the exit status, 0 if the reader of its output has left, as in `... | head`."""
    try:
        try:
            return _run(name, words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0


def _run(name: str, words: Sequence[str]) -> int:
    """Import a command's modules, which help does not need, and run it."""
    if asks_for_help(words) and name in PARSERS:
        with contextlib.suppress(UserError):  # the command itself reports it
            PARSERS[name]().parse_known_args(words)
    module = importlib.import_module(f"megatron_snip.{COMMANDS[name][0]}")
    if name not in ON_RANKS:
        return module.main(words) or 0
    from megatron_snip.runtime import report_errors

    with report_errors():
        return module.main(words) or 0


def script(name: str) -> None:
    """What a script in tools/ runs: a command under the script's own name."""
    sys.exit(run(name, sys.argv[1:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status, 2 for an unknown command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}; give one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"megatron-snip {name}", *rest]  # help shows this name
    return run(name, rest)


if __name__ == "__main__":
    sys.exit(main())
