"""Reports of run folders; megatron_snip/cli/report.py tells how to call it."""

from __future__ import annotations

import sys

from megatron_snip.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
