"""Probe a checkpoint without training; megatron_snip/cli/collect_stats.py tells how to call it."""

from __future__ import annotations

import sys

from megatron_snip import runtime
from megatron_snip.cli.collect_stats import main

if __name__ == "__main__":
    with runtime.report_errors():
        main(sys.argv[1:])
