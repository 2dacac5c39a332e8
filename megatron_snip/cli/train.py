"""Pretrain a Llama: what pretrain_llama.py and `megatron-snip train` run.

torchrun --nproc_per_node N pretrain_llama.py --config FILE.toml [options]
torchrun --nproc_per_node N -m megatron_snip.cli train --config FILE.toml [options]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_snip.arguments import asks_for_help, parse
from megatron_snip.errors import UserError


def main(words: Sequence[str]) -> None:
    """Command line; every error ends it with one line."""
    if asks_for_help(words):
        try:
            parse(words)  # prints and ends, before anything slow is imported
        except UserError:
            pass  # reported below
        except BrokenPipeError:  # of `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
    from megatron_snip.runtime import report_errors

    with report_errors() as ending:
        config = parse(words)
        if config.dry_run.dry_run:
            from megatron_snip.train.dry_run import dry_run

            dry_run(config)
        else:
            from megatron_snip.train.loop import train

            train(config, ending)
