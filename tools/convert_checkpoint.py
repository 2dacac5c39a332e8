"""Hugging Face models to and from checkpoints; megatron_snip/cli/convert_checkpoint.py tells how to call it."""

from __future__ import annotations

import sys

from megatron_snip import runtime
from megatron_snip.cli.convert_checkpoint import main

if __name__ == "__main__":
    with runtime.report_errors():
        main(sys.argv[1:])
