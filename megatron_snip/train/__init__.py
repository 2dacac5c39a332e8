"""The training loop and its parts: step, optimiser, checkpoint, metrics, report.  Imports nothing."""
