"""Llama pretraining whose linears run in BF16, FP8 or FP4 as a plan says, re-solved during training.

Source: SNIP, arXiv 2602.01410.  Nothing is imported here, so that small processes (the solver) stay small.
"""

__version__ = "0.1.0"
