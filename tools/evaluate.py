"""Scores of a model on benchmarks; megatron_snip/cli/evaluate.py tells how to call it."""

from __future__ import annotations

import sys

from megatron_snip import runtime
from megatron_snip.cli.evaluate import main

if __name__ == "__main__":
    with runtime.report_errors():
        main(sys.argv[1:])
