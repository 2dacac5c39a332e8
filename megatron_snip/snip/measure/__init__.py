"""Measurement in a pass: from forward and backward over the next batch to `Statistics`."""
