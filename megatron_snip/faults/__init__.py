"""Failures of a run: restarts, hangs, the error line and failed writes."""
