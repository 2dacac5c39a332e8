"""Pretraining with linears in BF16, FP8 or FP4 according to a plan, which is solved again during training.

Source: SNIP, arXiv 2602.01410.  This module imports nothing of ours, so that small processes (the solver) stay small.
"""

import os
import sys

__version__ = "0.1.0"

#: Parent process, read before slow imports, while it is still alive.
PARENT = os.getppid()
#: This package's folder, read before any data can influence it.
PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def child_command(module: str) -> list[str]:
    """A command that runs ``main`` of one of our modules, found in this folder and never in the current one."""
    code = f"import sys; sys.path.insert(0, {PLACE!r}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code]
