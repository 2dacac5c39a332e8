"""Pretrain a Llama or Qwen3: what pretrain_llama.py and `megatron-snip train` run.

torchrun --rdzv-backend one_node --nproc_per_node N pretrain_llama.py --config FILE.toml [options]
torchrun --rdzv-backend one_node --nproc_per_node N -m megatron_snip.cli train --config FILE.toml [options]
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_snip.arguments import asks_for_help, parse, warn_of_unused
from megatron_snip.errors import UserError


@contextmanager
def _imports() -> Iterator[None]:
    """Exempt imported modules from garbage collection, now and later; this saves an eighth of the startup time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main(words: Sequence[str]) -> None:
    """Command line.  Every error ends it with one line."""
    if asks_for_help(words):
        try:
            parse(words)  # prints and exits, before any slow import
        except UserError:
            pass  # reported below
        except BrokenPipeError:  # as in `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
    with _imports():
        from megatron_snip.runtime import report_errors

    with report_errors() as ending:
        config = parse(words)
        warn_of_unused(words, config)
        if config.dry_run.dry_run:
            with _imports():
                from megatron_snip.train.dry_run.command import dry_run
            dry_run(config)
        else:
            with _imports():
                from megatron_snip.train.loop import train
            train(config, ending)
