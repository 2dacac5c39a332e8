"""The training loop and what surrounds it: step, optimiser, checkpoint, metrics, report.  Imports nothing."""
