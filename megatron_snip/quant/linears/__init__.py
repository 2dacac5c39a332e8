"""Runs quantised linears in groups that read one input: their three GEMMs, and the backends for these."""
