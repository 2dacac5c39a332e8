"""Pretraining whose linears run in BF16, FP8 or FP4 as a plan says, re-solved during training.

Source: SNIP, arXiv 2602.01410.  Nothing of ours is imported here, so that small processes (the solver) stay small.
"""

import os

__version__ = "0.1.0"

#: The process that started this one, taken before anything slow is imported, while it still is the parent.
PARENT = os.getppid()
