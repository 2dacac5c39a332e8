"""Pretrain a Llama: `torchrun --nproc_per_node N pretrain_llama.py --config FILE.toml [options]`."""

from __future__ import annotations

import sys

from megatron_snip.arguments import parse
from megatron_snip.runtime import report_errors
from megatron_snip.train.dry_run import dry_run
from megatron_snip.train.loop import train

if __name__ == "__main__":
    with report_errors() as ending:
        config = parse(sys.argv[1:])
        if config.dry_run.dry_run:
            dry_run(config)
        else:
            train(config, ending)
