"""Runs to start from, and the study of which terms of the objective matter."""
