"""A plan from statistics; megatron_snip/cli/generate_plan.py tells how to call it."""

from __future__ import annotations

import sys

from megatron_snip import runtime
from megatron_snip.cli.generate_plan import main

if __name__ == "__main__":
    with runtime.report_errors():
        sys.exit(main(sys.argv[1:]))
