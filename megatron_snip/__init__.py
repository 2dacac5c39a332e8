"""Pretraining whose linears run in BF16, FP8 or FP4 as a plan says, re-solved during training.

Source: SNIP, arXiv 2602.01410.  Nothing of ours is imported here, so that small processes (the solver) stay small.
"""

import os
import sys

__version__ = "0.1.0"

#: The process that started this one, taken before anything slow is imported, while it still is the parent.
PARENT = os.getppid()
#: The folder that this package lies in, taken before any data is read: what data does later cannot move it.
PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def child_command(module: str) -> list[str]:
    """Words that start a process which runs ``main`` of one of our modules, found here, never in the current folder."""
    code = f"import sys; sys.path.insert(0, {PLACE!r}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code]
